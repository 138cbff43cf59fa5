"""Device code that the kernels of several families share."""
