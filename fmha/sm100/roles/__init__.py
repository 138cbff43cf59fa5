"""Warp roles of the attention kernel in data-flow order: load, gather, mma, softmax (with publish),
correction (the softmax warps' own work, or a role of its own in the ping-pong schedule), epilogue
(with rope). `rows` says who owns which query row."""
