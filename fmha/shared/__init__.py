"""Device code that the kernels of all architectures share."""
