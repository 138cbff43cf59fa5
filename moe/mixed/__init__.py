"""Experts with bf16 activations, and four-bit weights that are converted to bf16 in the kernel."""
