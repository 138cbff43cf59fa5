"""Arrays of int64 for shadows, mostly zeros, which later launches use again.

The first touch of each page of a new array costs more than the check of an access.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np

_MOST = 64 << 20  # bytes that are kept

_kept: dict[int, list[np.ndarray]] = {}  # by their number of elements, the latest at the end
_kept_bytes = 0


def blank(count: int) -> np.ndarray:
    """Return int64 zeros of which few will be written: pages are allocated on first touch."""
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, 8 * count, flags=anonymous), np.int64)


def zeros(count: int) -> np.ndarray:
    """Return int64 zeros, of which many may be written."""
    if count not in _kept:
        return blank(count)
    array = left(count)
    array[:] = 0
    return array


def left(count: int) -> np.ndarray:
    """Return int64 of any values."""
    global _kept_bytes
    kept = _kept.get(count)
    if not kept:
        return blank(count)
    array = kept.pop()
    if not kept:
        del _kept[count]
    _kept_bytes -= array.nbytes
    return array


def keep(arrays: Iterable[np.ndarray]) -> None:
    """Keep arrays from `zeros` that nobody uses any more for later calls."""
    global _kept_bytes
    for array in arrays:
        _kept[len(array)] = [*_kept.pop(len(array), ()), array]
        _kept_bytes += array.nbytes
    while _kept_bytes > _MOST:
        oldest = next(iter(_kept))
        _kept_bytes -= 8 * oldest
        _kept[oldest].pop()
        if not _kept[oldest]:
            del _kept[oldest]
