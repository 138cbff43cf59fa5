"""The machine: warps, CTAs, clusters, memories, barriers, asynchronous units, and their
scheduler.
"""

from ptxemu import ops  # noqa: F401  (first, since its files and those here need each other)
