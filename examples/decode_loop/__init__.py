"""A decode loop of a Llama- or Qwen-like model on the kernels of this repository."""
