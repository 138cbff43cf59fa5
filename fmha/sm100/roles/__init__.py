"""Warp roles of the attention kernel in data-flow order: load, mma, softmax, correction, store (in
`epilogue`). `rows` says who owns which query row.
"""
