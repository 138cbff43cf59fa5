"""Which bytes of global memory a process has read and written: what processes that execute parts of
one launch compare, to know that the parts did not talk to each other.

An access is noted where it is checked. Machine code would note nothing, so a memory that is
watched lets it know of no range: each access is left to Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ptxemu.machine.memory import GlobalMemory
from ptxemu.native.memory import Table

_ROOM = 1 << 18  # addresses that are noted before they are joined to ranges


class Ranges:
    """Bytes as disjoint ranges [low, high), sorted; int64 (n, 2)."""

    def __init__(self) -> None:
        self._joined = np.empty((0, 2), np.int64)
        self._noted: dict[int, list[np.ndarray]] = {}  # starts, by bytes at each
        self._pairs: list[tuple[int, int]] = []
        self._count = 0

    def add(self, low: int, high: int) -> None:
        self._pairs.append((low, high))
        self._counted(1)

    def add_each(self, starts: np.ndarray, nbytes: int) -> None:
        """`nbytes` at each of the addresses."""
        self._noted.setdefault(nbytes, []).append(starts.astype(np.int64).ravel())
        self._counted(starts.size)

    def _counted(self, more: int) -> None:
        self._count += more
        if self._count > max(_ROOM, len(self._joined)):
            self.joined()

    def joined(self) -> np.ndarray:
        """All of them."""
        parts = [self._joined, np.array(self._pairs, np.int64).reshape(-1, 2)]
        for nbytes, noted in self._noted.items():
            starts = np.sort(np.concatenate(noted))
            parts.append(_join(np.stack([starts, starts + nbytes], 1)))
        self._joined = _join(np.concatenate(parts))
        self._noted, self._pairs, self._count = {}, [], 0
        return self._joined


def _join(ranges: np.ndarray) -> np.ndarray:
    """Sorted, those that overlap or touch made one."""
    if not len(ranges):
        return ranges
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ranges[:, 1])
    first = np.flatnonzero(np.concatenate([[True], ranges[1:, 0] > ends[:-1]]))
    return np.stack([ranges[first, 0], ends[np.append(first[1:], len(ranges)) - 1]], 1)


def _meet(some: np.ndarray, others: np.ndarray) -> bool:
    """Whether two lists of ranges have a byte in common."""
    if not len(some) or not len(others):
        return False
    behind = np.searchsorted(others[:, 0], some[:, 1], "left")  # others that begin before it ends
    return bool((others[np.maximum(behind - 1, 0), 1] > some[:, 0])[behind > 0].any())


def talk(parts: Sequence[tuple[np.ndarray, np.ndarray]], grain: int) -> bool:
    """Whether a part has written what another one has read or written. parts: what each has read
    and written. grain: bytes that count as one."""
    cells = [(_cells(reads, grain), _cells(writes, grain)) for reads, writes in parts]
    return any(
        _meet(writes, touched)
        for one, (_, writes) in enumerate(cells)
        for other, both in enumerate(cells)
        if other != one
        for touched in both
    )


def _cells(ranges: np.ndarray, grain: int) -> np.ndarray:
    low, high = ranges[:, 0] // grain * grain, -(-ranges[:, 1] // grain) * grain
    return _join(np.stack([low, high], 1))


class _Blind(Table):
    """Knows of no range."""

    def remember(self, low: int, high: int, writable: bool) -> None: ...


class Shared(Exception):
    """A write to memory that other processes have, too: it cannot be taken back."""


class WatchedMemory(GlobalMemory):
    """Notes what is accessed from `watch` on."""

    _watched = False
    _shared: Sequence[tuple[int, int]] = ()

    def watch(self) -> None:
        """Before any CTA begins."""
        self.table = _Blind()
        self.read, self.written = Ranges(), Ranges()
        self._shared = _shared_mappings()
        self._watched = True

    def check(self, low: int, high: int, write: bool) -> bool:
        allowed = super().check(low, high, write)
        if allowed and self._watched:
            self._keep_apart(low, high, write)
            (self.written if write else self.read).add(low, high)
        return allowed

    def _check_each(self, addresses: np.ndarray, nbytes: int, write: bool) -> np.ndarray | None:
        kept = super()._check_each(addresses, nbytes, write)
        if self._watched:
            done = addresses if kept is None else addresses[kept]
            if done.size:
                self._keep_apart(int(done.min()), int(done.max()) + nbytes, write)
                (self.written if write else self.read).add_each(done, nbytes)
        return kept

    def _keep_apart(self, low: int, high: int, write: bool) -> None:
        if write and any(low < end and high > start for start, end in self._shared):
            raise Shared


def _shared_mappings() -> list[tuple[int, int]]:
    """What this process shares with others, and may write."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, rights = line.split(" ", 2)[:2]
        if rights[1] == "w" and rights[3] == "s":
            low, _, high = where.partition("-")
            found.append((int(low, 16), int(high, 16)))
    return found
