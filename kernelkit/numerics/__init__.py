"""Definitions in fp64 and fp32, and how far a kernel may be from them."""
