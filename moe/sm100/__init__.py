"""The grouped GEMM of compute capability 10.x."""
