"""Ways to evaluate a NEP, one file a way, and the choice between them."""
