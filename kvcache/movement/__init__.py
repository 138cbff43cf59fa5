"""Kernels that move what the cache holds: append, gather, copy, checksum."""
