"""Warps of bound kernels by the cycle: routines of `ptxemu.native`, and what makes their tables."""
