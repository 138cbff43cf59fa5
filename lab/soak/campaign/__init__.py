"""Random problems of a family of kernels, natively or in the emulator, each beside a definition."""
