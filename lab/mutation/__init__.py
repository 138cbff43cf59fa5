"""Mutants of kernels: one synchronising instruction changed, and what notices it."""
