"""Scripts behind every figure that the documentation states."""
