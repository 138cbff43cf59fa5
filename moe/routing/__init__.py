"""From router logits to rows sorted by expert, and back: top-k, permutation, combination."""

from moe.routing.api import Permutation, combine, permutation, route

__all__ = ["Permutation", "combine", "permutation", "route"]
