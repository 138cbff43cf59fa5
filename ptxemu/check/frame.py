"""Routines of `native.shadow`, and the lists that they write to."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from ptxemu.native import shadow as native
from ptxemu.native.library import Library, library

_MOST_FOUND = 1 << 19  # two for each cell of a memory of a CTA
_LANES = 32

FOUND = np.zeros(_MOST_FOUND, np.int64)  # what `unread` and `writers` give
FOUND_AT = FOUND.ctypes.data
_lanes = np.zeros(_LANES, np.int64)
_LANES_AT = _lanes.ctypes.data


class Routines(NamedTuple):
    """Routines of `native.shadow`."""

    visit: Callable[..., int]
    visit_all: Callable[..., int]
    visit_lanes: Callable[..., int]
    visit_global: Callable[..., int]
    unread: Callable[[int, int, int], int]
    writers: Callable[[int, int, int], int]


def routines() -> Routines | None:
    """Return the routines, or None without machine code."""
    found = library()
    return None if found is None else _of(found)


@cache
def _of(found: Library) -> Routines:
    return Routines(*(found.routine(getattr(native, name)) for name in Routines._fields))


def address_of(array: np.ndarray) -> int:
    """Return the address of a numpy array, quicker than `ctypes.data`."""
    address: int = array.__array_interface__["data"][0]
    return address


def words(*values: int) -> tuple[array[int], int]:
    """Return a table of words for the routines, and its address."""
    table = array("q", values)
    return table, table.buffer_info()[0]


def listed(lane: int | np.ndarray) -> int:
    """Return the last argument of `visit` for a `Mark.lane`; valid until the next call."""
    if isinstance(lane, int):
        return lane
    _lanes[: len(lane)] = lane
    return _LANES_AT


# An access by lanes: addresses of all of them, which the checker writes, the place that
# `visit_lanes` makes of them, and the numbers of the active ones.
ADDRESSES = np.zeros(_LANES, np.uint32)
_starts = np.zeros(_LANES, np.int64)
_place, _place_at = words(_starts.ctypes.data, 0, 1, 0, 0)
LANE_PLACES = ADDRESSES.ctypes.data, _place_at, _LANES_AT
