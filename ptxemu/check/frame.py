"""The frame by which the checker tells routines what to look at (`native.shadow`): one for all, as
each is filled for one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from ptxemu.check.agents import Agent
from ptxemu.check.clocks import Mark
from ptxemu.check.footprints import Cells
from ptxemu.native import shadow as native
from ptxemu.native.library import Library, library
from ptxemu.native.shadow import (
    ACTIVE,
    AGENT,
    BASE,
    BEFORE,
    COUNT,
    LANE,
    LANES,
    NBYTES,
    ROOM,
    RUN,
    SHIFT,
    STAMP,
    STARTS,
    STREAM,
)

_MOST_FOUND = 1 << 18  # cells of a memory of a CTA
_LANES = 32

_words = np.zeros(native.WORDS, np.int64)
WORDS = _words.data  # quicker to fill than an array
ADDRESS = _words.ctypes.data
FOUND = np.zeros(_MOST_FOUND, np.int64)  # what `unread` and `writers` give
_words[native.OUT] = FOUND.ctypes.data
_lanes = np.zeros(_LANES, np.int64)
_LANES_AT = _lanes.ctypes.data
_starts = np.zeros(_LANES, np.int64)
_STARTS_AT = _starts.ctypes.data


class Routines(NamedTuple):
    """Those of `native.shadow` that are called with the address of the frame."""

    visit: Callable[[int], int]
    visit_lanes: Callable[[int], int]
    visit_global: Callable[[int], int]
    unread: Callable[[int], int]
    writers: Callable[[int], int]


def routines() -> Routines | None:
    """None where there is no machine code."""
    found = library()
    return None if found is None else _of(found)


@cache
def _of(found: Library) -> Routines:
    return Routines(*(found.routine(getattr(native, name)) for name in Routines._fields))


def place(cells: Cells) -> None:
    """Which cells."""
    words = WORDS
    words[STARTS], words[COUNT], words[RUN] = cells.address, cells.count, cells.run
    words[SHIFT], words[BASE] = cells.shift, cells.base


def lanes(starts: np.ndarray, mb: int, nbytes: int, room: int, grain: int) -> None:
    """Which cells, for `visit_lanes`: `nbytes` at each of `starts`, uint32 [32], for the lanes of
    `mb`, in a memory of `room` bytes."""
    words = WORDS
    _starts[:] = starts
    words[STARTS], words[LANES], words[ACTIVE] = _STARTS_AT, _LANES_AT, mb
    words[NBYTES], words[ROOM] = nbytes, room
    words[RUN], words[SHIFT], words[BASE] = nbytes // grain or 1, grain.bit_length() - 1, 0


def agent(by: Agent, space: str, stamp: int) -> None:
    """Who accesses them, and when."""
    words = WORDS
    words[AGENT] = by.words(space)
    words[STREAM], words[BEFORE] = by.in_order
    words[STAMP] = stamp


def access(by: Agent, space: str, mark: Mark) -> None:
    """Who accesses the cells that have been placed."""
    words = WORDS
    agent(by, space, mark.stamp)
    if isinstance(mark.lane, int):
        words[LANE], words[LANES] = mark.lane, 0
    else:
        _lanes[: len(mark.lane)] = mark.lane
        words[LANES] = _LANES_AT
