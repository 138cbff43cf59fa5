"""Device code that kernels of several files and architectures share."""
