"""Global memory: host addresses, reached through one numpy view and checked before every access.

What a kernel may touch is either a list of ranges or every mapping of this process
(/proc/self/maps, Linux). A wild pointer is an OutOfBounds error with its address, never a crash.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ptxemu.errors import HardwareRefusal, OutOfBounds

FIRST_ADDRESS = 1 << 16  # below: never mapped
_LIMIT = 1 << 47  # user addresses of x86-64 and most aarch64 processes end here
_MAPS = Path("/proc/self/maps")

Range = tuple[int, int, bool]  # start, end, writable


def views_of(memory: np.ndarray) -> dict[int, np.ndarray]:
    """Bytes as unsigned elements, by their size in bytes."""
    return {size: memory.view(f"u{size}") for size in (1, 2, 4, 8)}


def process_ranges() -> list[Range]:
    """Every readable mapping of this process."""
    if not _MAPS.exists():
        raise HardwareRefusal(
            "this system has no /proc/self/maps: name what the kernel may touch with memory=[...]"
        )
    ranges = []
    for line in _MAPS.read_text().splitlines():
        fields = line.split()
        start, end = (int(part, 16) for part in fields[0].split("-"))
        if fields[1][0] == "r" and start < _LIMIT and "[v" not in line:
            ranges.append((start, min(end, _LIMIT), fields[1][1] == "w"))
    return ranges


def as_range(item: Any) -> Range:
    """(start, end, writable) of a torch tensor, numpy array or (address, nbytes) pair."""
    if isinstance(item, tuple):
        return item[0], item[0] + item[1], True
    if hasattr(item, "untyped_storage"):
        storage = item.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes(), True
    view = item.base if isinstance(item.base, np.ndarray) else item
    return view.ctypes.data, view.ctypes.data + view.nbytes, view.flags.writeable


def _merge(ranges: list[Range]) -> list[Range]:
    """Sorted; neighbours with equal rights joined."""
    joined: list[Range] = []
    for start, end, writable in sorted(r for r in ranges if r[1] > r[0]):
        if joined and start <= joined[-1][1] and writable == joined[-1][2]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]), writable)
        else:
            joined.append((start, end, writable))
    return joined


class Allocations:
    """The memory that a program is known to have allocated. An access beside it, though to memory
    of the process, is told to `outside(message)`."""

    def __init__(self, ranges: list[Range], outside: Callable[[str], None]) -> None:
        self._ranges = sorted(ranges)
        self._starts = [r[0] for r in self._ranges]
        self._last = (0, 0, False)
        self._outside = outside

    def holds(self, low: int, high: int) -> bool:
        last = self._last
        if last[0] <= low and high <= last[1]:
            return True
        index = bisect.bisect_right(self._starts, low) - 1
        if index < 0 or high > self._ranges[index][1]:
            return False
        self._last = self._ranges[index]
        return True

    def check(self, low: int, high: int, write: bool) -> None:
        if self.holds(low, high):
            return
        what = "write to" if write else "read of"
        message = f"{what} {high - low} bytes at {low:#x}, in no allocation"
        index = bisect.bisect_right(self._starts, low) - 1
        if index >= 0:
            start, end, _ = self._ranges[index]
            message += f"; the one below has {end - start:,} and ends {low - end:,} before"
        self._outside(message)


class GlobalMemory:
    """Bounds-checked access to host memory by address."""

    def __init__(self, allowed: list[Any] | None = None) -> None:
        self._whole_process = allowed is None
        self._extra: list[Range] = []
        self.allocations: Allocations | None = None  # where a checker wants to know more
        self._set(process_ranges() if allowed is None else [as_range(item) for item in allowed])
        space: Any = (ctypes.c_uint8 * (_LIMIT - FIRST_ADDRESS)).from_address(FIRST_ADDRESS)
        bytes_ = np.frombuffer(space, np.uint8)
        self.views = views_of(bytes_)

    def _set(self, ranges: list[Range]) -> None:
        self._ranges = _merge(ranges + self._extra)
        self._starts = [r[0] for r in self._ranges]
        self._last = (0, 0, False)

    def allow(self, address: int, nbytes: int) -> None:
        """Add a range, for parameter blocks and module variables."""
        self._extra.append((address, address + nbytes, True))
        self._set(self._ranges)

    def watch(self, ranges: list[Range], outside: Callable[[str], None]) -> None:
        """Tell `outside` of accesses beside `ranges` and what else was allowed."""
        self.allocations = Allocations(ranges + self._extra, outside)

    # -- checks -----------------------------------------------------------------------------

    def check(self, low: int, high: int, write: bool) -> None:
        """Every byte of [low, high) must lie in one allowed range."""
        self._check_mapped(low, high, write)
        if self.allocations is not None:
            self.allocations.check(low, high, write)

    def _check_mapped(self, low: int, high: int, write: bool) -> None:
        last = self._last
        if last[0] <= low and high <= last[1] and (last[2] or not write):
            return
        found = self._find(low, high, write)
        if found is None and self._whole_process:
            self._set(process_ranges())  # something may have been allocated since
            found = self._find(low, high, write)
        if found is None:
            what = "write to" if write else "read of"
            raise OutOfBounds(
                f"{what} {high - low} bytes at {low:#x}: not memory that the kernel may touch"
            )
        self._last = found

    def _find(self, low: int, high: int, write: bool) -> Range | None:
        index = bisect.bisect_right(self._starts, low) - 1
        if index < 0:
            return None
        found = self._ranges[index]
        return found if high <= found[1] and (found[2] or not write) else None

    def _check_each(self, addresses: np.ndarray, nbytes: int, write: bool) -> None:
        """One check for all where they share a range, else one by one."""
        low, high = int(addresses.min()), int(addresses.max()) + nbytes
        try:
            self._check_mapped(low, high, write)
            if self.allocations is None or self.allocations.holds(low, high):
                return
        except OutOfBounds:
            pass
        for address in addresses.tolist():
            self.check(address, address + nbytes, write)

    @staticmethod
    def _aligned(address: int, nbytes: int) -> None:
        if address & (nbytes - 1):
            raise HardwareRefusal(f"misaligned global access of {nbytes} bytes")

    # -- access -----------------------------------------------------------------------------

    def load(self, address: int, size: int) -> int:
        """One element of `size` bytes, as an int."""
        self._aligned(address, size)
        self.check(address, address + size, False)
        return int(self.views[size][(address - FIRST_ADDRESS) // size])

    def store(self, address: int, size: int, value: int) -> None:
        self._aligned(address, size)
        self.check(address, address + size, True)
        self.views[size][(address - FIRST_ADDRESS) // size] = value

    def gather(self, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
        """`count` consecutive elements at each address (uint64, 1-d) -> uint [count, n]."""
        index = self._index(addresses, size, count, False)
        return self.views[size][index + np.arange(count, dtype=np.int64)[:, None]]

    def scatter(self, addresses: np.ndarray, size: int, values: np.ndarray) -> None:
        """values [count, n] -> `count` consecutive elements at each of n addresses."""
        count = len(values)
        index = self._index(addresses, size, count, True)
        self.views[size][index + np.arange(count, dtype=np.int64)[:, None]] = values

    def _index(self, addresses: np.ndarray, size: int, count: int, write: bool) -> np.ndarray:
        signed = (
            addresses.view(np.int64) if addresses.dtype == np.uint64 else addresses.astype(np.int64)
        )
        nbytes = size * count if count in (1, 2, 4, 8) else size
        self._aligned(int(np.bitwise_or.reduce(signed)), nbytes)
        self._check_each(signed, size * count, write)
        return (signed - FIRST_ADDRESS) // size

    def read_rows(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """n rows of `nbytes` bytes -> uint8 (n, nbytes)."""
        if len(addresses) == 0:
            return np.empty((0, nbytes), np.uint8)
        view, index = self._rows(addresses, nbytes, False)
        return view[index].view(np.uint8)

    def write_rows(self, addresses: np.ndarray, data: np.ndarray) -> None:
        """uint8 (n, nbytes) -> n rows."""
        if len(addresses) == 0:
            return
        view, index = self._rows(addresses, data.shape[1], True)
        view[index] = np.ascontiguousarray(data).view(view.dtype)

    def _rows(
        self, addresses: np.ndarray, nbytes: int, write: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """(memory in the widest elements that all rows are aligned to, theirs), checked."""
        self._check_each(addresses, nbytes, write)
        addresses = addresses.astype(np.int64)
        together = int(np.bitwise_or.reduce(addresses)) | nbytes
        size = 8
        while together & (size - 1):
            size //= 2
        first = (addresses - FIRST_ADDRESS) // size
        return self.views[size], first[:, None] + np.arange(nbytes // size)
