"""Loops in the SASS of our kernels, counted by kind."""
