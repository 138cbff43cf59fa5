"""Fragments: lanes of a warp at the same block, and what they wait for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ptxemu.codegen.namespace import bits_mask

ALL = 0xFFFFFFFF


def unravelled(index: Any, dims: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    """A place, or an array of places, in a grid of so many, x fastest."""
    x, y, _ = dims
    return index % x, index // x % y, index // (x * y)


@lru_cache(maxsize=1024)
def thread_numbers(warp: int, block: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    """%tid of the lanes of a warp."""
    return unravelled(np.arange(warp * 32, warp * 32 + 32, dtype=np.uint32), block)


@lru_cache(maxsize=4096)
def lanes_of(mask: int) -> tuple[int, ...]:
    """The lanes in a mask, in order."""
    return tuple(lane for lane in range(32) if mask >> lane & 1)


@dataclass(eq=False, slots=True)
class Fragment:
    """Lanes at one block.

    wait: the object they are parked on.
    token: meaning of a wake-up.
    polls: the mbarrier and parity that the lanes last tested without success, and the block.
    """

    pc: int
    mask: int
    lanes: np.ndarray | None = None
    wait: object | None = None
    token: Any = None
    polls: tuple[Any, int, int] | None = None

    def active(self) -> np.ndarray:
        if self.lanes is None:
            self.lanes = bits_mask(self.mask)
        return self.lanes


# Who is parked on something, to be woken: a warp (`ptxemu.machine.state.Warp`) and its lanes.
Waiters = list[tuple[Any, Fragment]]


def not_told(w: Any, starts: np.ndarray, mb: int, nbytes: int, write: bool) -> bool:
    """Whether all listeners have heard of an ordinary access of the CTA's shared memory by the
    lanes of `mb`, `nbytes` at each of `starts`, uint32 [32], and there is nothing more to it: then
    it is in bounds, and a primitive does it. Where a listener knows that, it replaces this."""
    return False
