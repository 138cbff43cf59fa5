"""What a kernel would take on a GPU, from its machine code and a recorded run on a CPU."""
