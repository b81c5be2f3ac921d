"""The formulas of a NEP, one concept a module, in torch. Pair tensors are component first: (k, ...) rows over pairs."""
