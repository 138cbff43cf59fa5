"""Warp roles of the attention kernel in data-flow order: load, mma, softmax (with publish),
correction (with epilogue and rope), store. `rows` says who owns which query row."""
