"""Examples: kernels to learn from, and whole models on the packages of this repository."""
