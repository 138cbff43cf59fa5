"""Basic blocks of PTX -> Python functions over numpy: analysis, lowering, grouping, compilation."""
