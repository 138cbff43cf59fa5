"""The grouped GEMM of Hopper, whose weights of four bits become bf16 in registers."""
