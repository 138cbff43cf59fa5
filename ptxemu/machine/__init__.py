"""The machine: warps, CTAs, clusters, memories, barriers, asynchronous units, and their
scheduler.
"""
