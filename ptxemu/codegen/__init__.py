"""Basic blocks of PTX -> Python functions over numpy: analysis, lowering, grouping, compilation."""

from ptxemu import ops  # noqa: F401  (first, since its files and those here need each other)
