"""Frame that passes arguments from the checker to the routines of `native.shadow`.

There is only one, as each is filled for one call.
"""

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
    """Routines of `native.shadow` that are called with the address of the frame."""

    visit: Callable[[int], int]
    visit_lanes: Callable[[int], int]
    visit_global: Callable[[int], int]
    unread: Callable[[int], int]
    writers: Callable[[int], int]


def routines() -> Routines | None:
    """Return the routines, or None without machine code."""
    found = library()
    return None if found is None else _of(found)


@cache
def _of(found: Library) -> Routines:
    return Routines(*(found.routine(getattr(native, name)) for name in Routines._fields))


def place(cells: Cells) -> None:
    """Write the cells of an access to the frame."""
    words = WORDS
    words[STARTS], words[COUNT], words[RUN] = cells.address, cells.count, cells.run
    words[SHIFT], words[BASE] = cells.shift, cells.base


def lanes(starts: np.ndarray, mb: int, nbytes: int, room: int, grain: int) -> None:
    """Write the cells of an access by lanes to the frame, for `visit_lanes`.

    Args:
        starts: uint32 [32], address of each lane.
        mb: Mask of the active lanes.
        nbytes: Bytes per lane.
        room: Size of the memory in bytes.
        grain: Bytes per cell.
    """
    words = WORDS
    _starts[:] = starts
    words[STARTS], words[LANES], words[ACTIVE] = _STARTS_AT, _LANES_AT, mb
    words[NBYTES], words[ROOM] = nbytes, room
    words[RUN], words[SHIFT], words[BASE] = nbytes // grain or 1, grain.bit_length() - 1, 0


def agent(by: Agent, space: str, stamp: int) -> None:
    """Write the accessing agent and the stamp to the frame."""
    words = WORDS
    words[AGENT] = by.words(space)
    words[STREAM], words[BEFORE] = by.in_order
    words[STAMP] = stamp


def access(by: Agent, space: str, mark: Mark) -> None:
    """Write the agent that accesses the placed cells to the frame."""
    words = WORDS
    agent(by, space, mark.stamp)
    if isinstance(mark.lane, int):
        words[LANE], words[LANES] = mark.lane, 0
    else:
        _lanes[: len(mark.lane)] = mark.lane
        words[LANES] = _LANES_AT
