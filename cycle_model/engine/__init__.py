"""Warps of bound kernels, cycle by cycle: routines of `ptxemu.native`, and what makes their tables."""
