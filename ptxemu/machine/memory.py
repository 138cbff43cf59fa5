"""Global memory: host addresses, accessed through one numpy view and checked before every access.

A kernel may access a list of ranges, the blocks that the caller knows to be allocated, or every
mapping of this process (/proc/self/maps, Linux). Any other access raises OutOfBounds with its
address. If a function is registered with `tell`, it gets the access instead; the access then reads
poison and writes nothing.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ptxemu.errors import HardwareRefusal, OutOfBounds
from ptxemu.native.memory import Table

FIRST_ADDRESS = 1 << 16  # below: never mapped
_LIMIT = 1 << 47  # user addresses of x86-64 and most aarch64 processes end here
_MAPS = Path("/proc/self/maps")
_NAME = 73  # column of a mapping's name in it
_POISON = (1 << 64) - 1  # all bits: what is read where nothing may be read

Range = tuple[int, int, bool]  # start, end, writable


class Block(NamedTuple):
    """An allocation: what was asked for is [start, end), what the allocator gave [start, last)."""

    start: int
    end: int
    last: int


class Allocated(Protocol):
    """Source of the blocks of memory that a program has allocated."""

    def known(self) -> list[Block]:
        """Return the blocks that are known without a search."""
        ...

    def look(self) -> list[Block]:
        """Return all blocks that can be found now; this may be slow."""
        ...

    def look_at_frozen(self) -> list[Block]:
        """Return also what can only be found in a way that disturbs the program."""
        ...


class Fixed:
    """Ranges given by the caller, as `Allocated`."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._blocks = [Block(start, end, end) for start, end, _ in ranges]

    def known(self) -> list[Block]:
        return self._blocks

    look = look_at_frozen = known


@dataclass(frozen=True)
class Stray:
    """Access to [low, high) that is not allowed.

    slack: whether the access lies in the block of an allocation, but not within the requested size.
    near: the nearest allocation, if there is any.
    """

    low: int
    high: int
    write: bool
    slack: bool = False
    near: Block | None = None

    def words(self) -> str:
        """Such as "write to 4 bytes at 0x7f00, in no allocation; ..."."""
        what = "write to" if self.write else "read of"
        return f"{what} {self.high - self.low} bytes at {self.low:#x}, {self.where()}"

    def where(self) -> str:
        """Describe the allocation at the address, or next to it."""
        near = self.near
        if near is None:
            return "in no allocation"
        size = f"{near.end - near.start:,} bytes"
        if self.low < near.start:
            return f"in no allocation: {near.start - self.low:,} before one of {size}"
        if self.low < near.end:
            if self.high > near.end:
                return f"across the end of an allocation of {size}"
            return f"in an allocation of {size} that cannot be written" * self.write or (
                f"in an allocation of {size} that is not mapped"
            )
        gap = f"{self.low - near.end:,} bytes behind" if self.low > near.end else "right behind"
        if self.slack:
            return f"{gap} the end of an allocation of {size}, in what its block is rounded up by"
        return f"in no allocation: {gap} one of {size}"


def views_of(memory: np.ndarray) -> dict[int, np.ndarray]:
    """Bytes as unsigned elements, by their size in bytes."""
    return {size: memory.view(f"u{size}") for size in (1, 2, 4, 8)}


def as_addresses(values: Iterable[int]) -> np.ndarray:
    """Addresses of 64 bits as int64, those of the upper half negative, where nothing lies."""
    return np.array([value & _POISON for value in values], np.uint64).view(np.int64)


def process_ranges() -> list[Range]:
    """Every readable mapping of this process. The data of libraries and the stack count as read-
    only: no kernel has anything to write there, and the process would not survive it."""
    if not _MAPS.exists():
        raise HardwareRefusal(
            "this system has no /proc/self/maps: name what the kernel may touch with memory=[...]"
        )
    return list(_ranges_of(_MAPS.read_text())[0])


def joined_ranges() -> list[Range]:
    """Return the ranges of `process_ranges`, those that touch with equal rights as one."""
    if not _MAPS.exists():
        return process_ranges()
    return _ranges_of(_MAPS.read_text())[1]


@lru_cache(maxsize=2)  # from launch to launch they mostly stay
def _ranges_of(text: str) -> tuple[list[Range], list[Range]]:
    """Every readable mapping, as it is and joined with its neighbours."""
    mappings = [_mapping(line) for line in text.splitlines()]
    code = {m.name for m in mappings if m.executable} | {"[stack]"}
    found = [
        (m.start, m.end, m.writable and (not m.name or m.name not in code))
        for m in mappings
        if m.readable
    ]
    return found, _merge(found)


class _Mapping(NamedTuple):
    """A line of the list of mappings. readable: a kernel may have something to read there."""

    start: int
    end: int
    readable: bool
    writable: bool
    executable: bool
    name: str


@lru_cache(maxsize=8192)  # most lines are those of the launch before
def _mapping(line: str) -> _Mapping:
    where, rights, _ = line.split(" ", 2)
    low, _, high = where.partition("-")
    start, end, name = int(low, 16), min(int(high, 16), _LIMIT), line[_NAME:]
    readable = rights[0] == "r" and start < _LIMIT and not name.startswith("[v")
    return _Mapping(start, end, readable, rights[1] == "w", rights[2] == "x", name)


def as_range(item: Any) -> Range:
    """Return (start, end, writable) of a torch tensor, numpy array or (address, nbytes) pair."""
    if isinstance(item, tuple):
        return item[0], item[0] + item[1], True
    if hasattr(item, "untyped_storage"):
        storage = item.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes(), True
    view = item.base if isinstance(item.base, np.ndarray) else item
    return view.ctypes.data, view.ctypes.data + view.nbytes, view.flags.writeable


def _merge(ranges: list[Range], *, neighbours: bool = True) -> list[Range]:
    """Sort ranges; join ranges with equal rights that overlap or, with `neighbours`, touch."""
    joined: list[Range] = []
    for start, end, writable in sorted(r for r in ranges if r[1] > r[0]):
        if joined and start < joined[-1][1] + neighbours and writable == joined[-1][2]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]), writable)
        else:
            joined.append((start, end, writable))
    return joined


def _mapped(ranges: list[Range]) -> list[Range]:
    """The parts of the ranges that the process can read, each with the rights that it has there: a
    tensor may be of a file that is mapped for reading, and an address of nothing at all."""
    if not _MAPS.exists():
        return ranges
    maps = joined_ranges()
    starts = [r[0] for r in maps]
    parts = []
    for start, end, writable in ranges:
        for low, high, can_write in maps[max(bisect.bisect_right(starts, start) - 1, 0) :]:
            if low >= end:
                break
            parts.append((max(start, low), min(end, high), writable and can_write))
    return parts


class GlobalMemory:
    """Bounds-checked access to host memory by address.

    An access outside raises OutOfBounds, unless a function given to `tell` handles it.

    allowed: tensors, arrays or (address, nbytes) that a kernel may access.
    allocated: source of the allocated blocks, used if `allowed` is None. Without either, every
        mapping of this process may be accessed.
    """

    def __init__(
        self,
        allowed: list[Any] | None = None,
        allocated: Allocated | None = None,
    ) -> None:
        self._allocated = allocated if allowed is None else None
        self._of_process = allowed is None and allocated is None
        self._outside: Callable[[Stray], None] | None = None
        self._extra: list[Range] = []
        self._heap: dict[int, Range] = {}  # blocks that kernels have allocated
        self._blocks: list[Block] = []  # sorted
        self._can_refresh = allowed is None
        self.table = Table()
        if allowed is not None:
            given = [as_range(item) for item in allowed]
            self._blocks = sorted(Block(start, end, end) for start, end, _ in given)
            by_address = any(isinstance(item, tuple) for item in allowed)
            self._set(_mapped(_merge(given, neighbours=False)) if by_address else given)
        elif self._allocated is not None:
            self._take(self._allocated.known())
        else:
            self._set(joined_ranges())
        space: Any = (ctypes.c_uint8 * (_LIMIT - FIRST_ADDRESS)).from_address(FIRST_ADDRESS)
        bytes_ = np.frombuffer(space, np.uint8)
        self.views = views_of(bytes_)

    def _set(self, ranges: list[Range]) -> None:
        """Set the ranges, and what else is allowed. Mappings that touch are joined. Allocations and
        ranges of the caller stay apart: no access may be across a border."""
        self._given = ranges
        more = [*self._extra, *self._heap.values()]
        self._ranges = _merge(ranges + more, neighbours=self._of_process)
        self._starts = [r[0] for r in self._ranges]
        self._last = (0, 0, False)
        self.table.forget()

    def _take(self, blocks: list[Block]) -> None:
        """Allow access to allocated blocks; to whole blocks without a checker, as on hardware."""
        self._blocks = sorted(blocks)
        ends = [b.end if self._outside else b.last for b in self._blocks]
        given = [(b.start, end, True) for b, end in zip(self._blocks, ends, strict=True)]
        self._set(_mapped(_merge(given, neighbours=False)))

    def allow(self, address: int, nbytes: int) -> None:
        """Add a range, for parameter blocks and module variables."""
        self._extra.append((address, address + nbytes, True))
        self._set(self._given)

    def insert(self, address: int, nbytes: int) -> None:
        """Add a block of the device's heap, quickly: there may be thousands."""
        found = address, address + nbytes, True
        if self._find(*found) is not None:  # every mapping of the process is allowed
            return
        self._heap[address] = found
        index = bisect.bisect_right(self._starts, address)
        self._ranges.insert(index, found)
        self._starts.insert(index, address)

    def remove(self, address: int) -> None:
        """Remove a block that `insert` added."""
        if self._heap.pop(address, None) is None:
            return
        index = bisect.bisect_left(self._starts, address)
        if self._starts[index : index + 1] == [address]:
            del self._ranges[index], self._starts[index]
        self._last = (0, 0, False)
        self.table.forget()

    def tell(self, outside: Callable[[Stray], None] | None) -> None:
        """Register a function that gets every access that is not allowed; None: nobody does.

        Such an access reads poison and writes nothing. Blocks end at the requested size from
        then on.
        """
        self._outside = outside
        if outside is not None and self._allocated is not None:
            self._take(self._allocated.known())

    # -- checks -----------------------------------------------------------------------------

    def check(self, low: int, high: int, write: bool) -> bool:
        """Whether every byte of [low, high) lies in one allowed range.

        Raises OutOfBounds if not and no function is registered with `tell`.
        """
        last = self._last
        if last[0] <= low and high <= last[1] and (last[2] or not write):
            return True
        return self._may(low, high, write) or self._stray(low, high, write)

    def _may(self, low: int, high: int, write: bool) -> bool:
        found = self._find(low, high, write)
        if found is None and self._can_refresh:  # something may have been allocated since
            found = self._found_anew(low, high, write)
            self._can_refresh = found is not None or self._outside is None  # it is all known now
        if found is None:
            return False
        self._last = found
        self.table.remember(*found)
        return True

    def _found_anew(self, low: int, high: int, write: bool) -> Range | None:
        """Look for it among all that is there now."""
        if self._allocated is None:
            self._set(joined_ranges())
            return self._find(low, high, write)
        self._take(self._allocated.look())
        found = self._find(low, high, write)
        if found is None:
            self._take(self._allocated.look_at_frozen())
            found = self._find(low, high, write)
        return found

    def blocks(self) -> list[Block]:
        """Allocations, as far as they are known."""
        return self._blocks

    def block_at(self, address: int) -> Block | None:
        """The allocation that holds an address, as far as allocations are known."""
        near = self._nearest(address)
        return near if near is not None and near.start <= address < near.last else None

    def _nearest(self, address: int) -> Block | None:
        """The allocation that an address is most likely meant for."""
        index = bisect.bisect_right(self._blocks, (address, _LIMIT, _LIMIT))
        below = self._blocks[max(index - 1, 0) : index]
        above = self._blocks[index : index + 1]
        if below and above:
            return min(below[0], above[0], key=lambda b: max(b.start - address, address - b.end))
        return next(iter(below + above), None)

    def _stray(self, low: int, high: int, write: bool) -> bool:
        """Report a stray access or raise; return whether it is done nevertheless: a read inside a
        block."""
        near = self._nearest(low)
        slack = near is not None and near.start <= low and near.end < high <= near.last
        stray = Stray(low, high, write, slack, near)
        if self._outside is None:
            what = "write to" if write else "read of"
            raise OutOfBounds(
                f"{what} {high - low} bytes at {low:#x}: not memory that the kernel may touch"
                + f", {stray.where()}" * (near is not None)
            )
        self._outside(stray)
        return slack and not write

    def _find(self, low: int, high: int, write: bool) -> Range | None:
        index = bisect.bisect_right(self._starts, low) - 1
        if index < 0:
            return None
        found = self._ranges[index]
        return found if high <= found[1] and (found[2] or not write) else None

    def _check_each(self, addresses: np.ndarray, nbytes: int, write: bool) -> np.ndarray | None:
        """Return which of the accesses are to be done; None if all are.

        There is one check for all accesses that share a range, else one for each access.
        """
        low, high = int(addresses.min()), int(addresses.max()) + nbytes
        last = self._last
        if last[0] <= low and high <= last[1] and (last[2] or not write):
            return None
        found = self._find(low, high, write)
        if found is not None:
            self._last = found
            self.table.remember(*found)
            return None
        kept = [self.check(low, low + nbytes, write) for low in addresses.tolist()]
        return None if all(kept) else np.array(kept)

    def holds(self, low: int, high: int) -> bool:
        """Whether all of [low, high) can be read."""
        return self._find(low, high, False) is not None

    def read_together(self, first: int, offsets: np.ndarray, nbytes: int, extent: int) -> bool:
        """Whether machine code may read `nbytes` bytes at `first` plus each offset, which lie in
        `extent` bytes; nothing is reported."""
        return self.holds(first, first + extent)

    def inside(self, addresses: np.ndarray, nbytes: int) -> np.ndarray | None:
        """Return which of [address, address + nbytes) can be read, without a report; None if all
        can."""
        low, high = int(addresses.min()), int(addresses.max()) + nbytes
        if self._find(low, high, False) is not None:
            return None
        each = addresses.ravel().tolist()
        kept = [self._find(low, low + nbytes, False) is not None for low in each]
        return None if all(kept) else np.array(kept).reshape(addresses.shape)

    @staticmethod
    def _aligned(address: int, nbytes: int) -> None:
        if address & (nbytes - 1):
            raise HardwareRefusal(f"misaligned global access of {nbytes} bytes")

    # -- access -----------------------------------------------------------------------------

    def place(self, address: int, size: int, count: int, write: bool) -> tuple[np.ndarray, int]:
        """Return (memory in elements of `size` bytes, index of the first) of `count` elements,
        checked.

        If they may not be accessed, the memory is a poisoned substitute, which is discarded.
        """
        if self.check(address, address + size * count, write):
            return self.views[size], (address - FIRST_ADDRESS) // size
        return np.full(count, _POISON, np.uint64).view(f"u{size}"), 0

    def load(self, address: int, size: int) -> int:
        """Load one element of `size` bytes as an int."""
        self._aligned(address, size)
        view, index = self.place(address, size, 1, False)
        return int(view[index])

    def store(self, address: int, size: int, value: int) -> None:
        self._aligned(address, size)
        view, index = self.place(address, size, 1, True)
        view[index] = value

    def gather(self, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
        """`count` consecutive elements at each address (uint64, 1-d) -> uint [count, n]."""
        index, kept = self._index(addresses, size, count, False)
        step = np.arange(count, dtype=np.int64)[:, None]
        if kept is None:
            return self.views[size][index + step]
        found = np.full((count, len(index)), _POISON, np.uint64).astype(f"u{size}")
        found[:, kept] = self.views[size][index[kept] + step]
        return found

    def scatter(self, addresses: np.ndarray, size: int, values: np.ndarray) -> None:
        """values [count, n] -> `count` consecutive elements at each of n addresses."""
        count = len(values)
        index, kept = self._index(addresses, size, count, True)
        if kept is not None:
            index, values = index[kept], values[:, kept]
        self.views[size][index + np.arange(count, dtype=np.int64)[:, None]] = values

    def _index(
        self, addresses: np.ndarray, size: int, count: int, write: bool
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return (index of the first element of each, which of them are to be accessed)."""
        signed = (
            addresses.view(np.int64) if addresses.dtype == np.uint64 else addresses.astype(np.int64)
        )
        nbytes = size * count if count in (1, 2, 4, 8) else size
        self._aligned(int(np.bitwise_or.reduce(signed)), nbytes)
        kept = self._check_each(signed, size * count, write)
        return (signed - FIRST_ADDRESS) // size, kept

    def read_bytes(self, address: int, nbytes: int) -> bytes:
        """Bytes of one place."""
        if not self.holds(address, address + nbytes):
            return self.read_rows(as_addresses([address]), nbytes).tobytes()
        self.check(address, address + nbytes, False)  # whoever follows accesses is told there
        start = address - FIRST_ADDRESS
        return self.views[1][start : start + nbytes].tobytes()

    def read_rows(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """n rows of `nbytes` bytes -> uint8 (n, nbytes)."""
        if len(addresses) == 0 or not nbytes:
            return np.empty((len(addresses), nbytes), np.uint8)
        view, index, kept = self._rows(addresses, nbytes, False)
        if kept is None:
            return view[index].view(np.uint8)
        rows = np.full((len(addresses), nbytes), 0xFF, np.uint8)
        rows[kept] = view[index[kept]].view(np.uint8)
        return rows

    def write_rows(self, addresses: np.ndarray, data: np.ndarray) -> None:
        """uint8 (n, nbytes) -> n rows."""
        if len(addresses) == 0 or not data.size:
            return
        view, index, kept = self._rows(addresses, data.shape[1], True)
        if kept is not None:
            index, data = index[kept], data[kept]
        view[index] = np.ascontiguousarray(data).view(view.dtype)

    def _rows(
        self, addresses: np.ndarray, nbytes: int, write: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return (memory in the widest elements that all rows are aligned to, theirs, which of the
        rows are to be accessed)."""
        kept = self._check_each(addresses, nbytes, write)
        addresses = addresses.astype(np.int64)
        together = int(np.bitwise_or.reduce(addresses)) | nbytes
        size = 8
        while together & (size - 1):
            size //= 2
        first = (addresses - FIRST_ADDRESS) // size
        return self.views[size], first[:, None] + np.arange(nbytes // size), kept
