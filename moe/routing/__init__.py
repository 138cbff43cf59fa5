"""From router logits to rows sorted by expert, and back: top-k, permutation, combination."""

from typing import TYPE_CHECKING

from kernelkit.exports import exports

if TYPE_CHECKING:
    from moe.routing.api import Permutation, combine, permutation, route

__all__ = ["Permutation", "combine", "permutation", "route"]

__getattr__, __dir__ = exports(__name__, {
    "moe.routing.api": "Permutation combine permutation route",
})  # fmt: skip
