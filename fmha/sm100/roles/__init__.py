"""Warp roles of the attention kernel, one file each, in data-flow order: load, mma, softmax,
correction, epilogue."""
