"""Routing: top-k choice, permutation of rows by expert, and combination of their results."""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from moe.routing.api import Permutation, combine, permutation, route, route_tokens

__all__ = ["Permutation", "combine", "permutation", "route", "route_tokens"]

exports(__name__, {
    "moe.routing.api": "Permutation combine permutation route route_tokens",
})  # fmt: skip
