"""Experts whose activations stay bf16, and whose weights of four bits become it on the way."""
