"""From tokens or logits to rows sorted by expert, and back: top-k, permutation, combination."""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from moe.routing.api import Permutation, combine, permutation, route, route_tokens

__all__ = ["Permutation", "combine", "permutation", "route", "route_tokens"]

__getattr__, __dir__ = exports(__name__, {
    "moe.routing.api": "Permutation combine permutation route route_tokens",
})  # fmt: skip
