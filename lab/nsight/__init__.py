"""Nsight Compute over our kernels."""
