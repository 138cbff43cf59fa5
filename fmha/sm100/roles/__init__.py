"""Warp roles of the attention kernel in data-flow order: load, gather, mma, softmax (with publish),
correction, epilogue (with rope)."""
