"""Weights in GGUF's format Q8_0: kernels that read them in two layouts, with the same bits."""
