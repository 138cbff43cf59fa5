"""What kernels would take, by the cycle model."""
