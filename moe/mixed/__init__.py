"""Experts whose activations stay numbers and whose weights of four bits become such in registers."""
