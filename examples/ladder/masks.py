"""Masks of the ladder's kernels: which query sees which key.

A mask is a function of two positions, counted from 0, that returns whether the query sees the key.
The kernel calls it with 32-bit integers of the DSL, the reference with integer tensors of torch. It
may therefore use comparisons, arithmetic, `&` and `|`, but neither `and`, `or` nor `if`.

To add a mask, write the function and name it in `MASKS`. Every rung then accepts it as `--mask` and
is checked against the same function in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Mask = Callable[[Any, Any], Any]


def causal(query: Any, key: Any) -> Any:
    """A query sees the keys up to its own position."""
    return key <= query


MASKS: dict[str, Mask | None] = {"full": None, "causal": causal}
