"""Shadow of global memory: like `shadow`, but sparse and across clusters.

Clocks belong to a cluster. Another cluster's accesses are ordered only through global memory
itself: a release to an address and an acquire from it ("Memory Consistency Model", release and
acquire patterns). Reads are kept as a log, since a kernel writes few of the addresses it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxemu.check import frame
from ptxemu.check.agents import Agent, foreign_seen
from ptxemu.check.clocks import ATOMIC, SITE_MASK, Mark, join
from ptxemu.check.footprints import Scattered, Span
from ptxemu.check.shadow import is_atomic, unordered
from ptxemu.check.zeros import blank
from ptxemu.native.shadow import BELOW, CLUSTER, WRITES

_CHUNK_BITS = 20  # bytes that are shadowed together: 1 MiB
_FEW = 64  # numbers that Python compares as quickly as numpy


class Piece:
    """`nbytes` at each of `starts`, int64 addresses, touched by one instruction of a cluster: all
    of it lies in [low, high)."""

    __slots__ = ("starts", "nbytes", "cluster", "mark", "low", "high")

    def __init__(self, starts: np.ndarray, nbytes: int, cluster: int, mark: Mark) -> None:
        self.starts, self.nbytes = starts, nbytes
        self.cluster, self.mark = cluster, mark
        self.low = self.high = 0
        if 0 < starts.size <= _FEW:
            each = starts.ravel().tolist()
            self.low, self.high = min(each), max(each) + nbytes
        elif starts.size:
            self.low, self.high = int(starts.min()), int(starts.max()) + nbytes

    def meets(self, other: Piece | GlobalShadow | _Chunk) -> bool:
        """Return whether the address ranges overlap."""
        return self.low < other.high and self.high > other.low

    def only(self, kept: np.ndarray | None) -> Piece:
        """Return the piece with only those starts for which `kept` is true."""
        if kept is None:
            return self
        stamp, lane = self.mark
        if isinstance(lane, np.ndarray):
            lane = np.broadcast_to(lane, kept.shape)[kept]
        return Piece(self.starts[kept], self.nbytes, self.cluster, Mark(stamp, lane))

    def chunks(self) -> Iterable[int]:
        """Return the chunks that the piece touches.

        One instruction may read allocations that are terabytes apart.
        """
        first, last = self.low >> _CHUNK_BITS, self.high - 1 >> _CHUNK_BITS
        if last - first <= 1:
            return range(first, last + 1)
        ends = zip(
            (self.starts >> _CHUNK_BITS).flat,
            (self.starts + self.nbytes - 1 >> _CHUNK_BITS).flat,
            strict=True,
        )
        return sorted({c for low, high in set(ends) for c in range(int(low), int(high) + 1)})


# (stamp, its cluster, address, it was a write) -> whether it is excused
OnRace = Callable[[int, int, int, bool], bool]


@dataclass
class _Chunk:
    last: np.ndarray
    owner: np.ndarray  # cluster + 1 of the last write
    # The same below atomics, as in `Shadow`.
    below: np.ndarray | None = None
    below_owner: np.ndarray | None = None
    low: int = 1 << 62  # what has been written lies in [low, high)
    high: int = 0

    def __post_init__(self) -> None:
        self._table, at = frame.words(self.last.ctypes.data)
        owners = self.owner.ctypes.data
        self.words, self.at = frame.words(at, 0, 0, len(self.last), owners, 0, 0)

    def writes(self, index: Any, atomic: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(stamps, owners) of what an access is to be ordered after; `atomic`: it is one."""
        yield self.last[index], self.owner[index]
        if atomic and self.below is not None and self.below_owner is not None:
            yield self.below[index], self.below_owner[index]

    def keep_below(self, index: Any, atomic: bool) -> None:
        """Before a write."""
        if self.below is None or self.below_owner is None:
            if not atomic:
                return
            self.below, self.below_owner = np.zeros_like(self.last), np.zeros_like(self.owner)
            self.words[BELOW] = self.below.ctypes.data
        if not atomic:
            self.below[index] = 0
            return
        last, over = self.last[index], is_atomic(self.last[index])
        self.below[index] = np.where(over, self.below[index], last)
        self.below_owner[index] = np.where(over, self.below_owner[index], self.owner[index])


@dataclass
class GlobalShadow:
    """`grain`: bytes of a cell. `before`: that of the launch before, where this one may overlap
    it (programmatic dependent launch), and so on."""

    grain: int
    before: GlobalShadow | None = None
    chunks: dict[int, _Chunk] = field(default_factory=dict)
    reads: dict[int, list[Piece]] = field(default_factory=dict)
    read_in: dict[int, tuple[int, int]] = field(default_factory=dict)  # [low, high) of `reads`
    earlier: dict[int, list[Piece]] = field(default_factory=dict)
    low: int = 1 << 62
    high: int = 0
    # (addresses, bytes at each) -> which of them are there, None where all are: the others have
    # been refused, and wild addresses would need shadows without end
    inside: Callable[[np.ndarray, int], np.ndarray | None] = lambda *_: None
    holds: Callable[[int, int], bool] = lambda *_: False  # whether all of [low, high) is

    def read(self, piece: Piece, by: Agent, on_race: OnRace) -> None:
        piece = self._inside(piece)
        if not piece.starts.size:
            return
        if piece.meets(self) and not self._surely(piece, by, False):
            self._against_writes(piece, by, on_race)
        for chunk in piece.chunks():
            self.reads.setdefault(chunk, []).append(piece)
            low, high = self.read_in.get(chunk, (piece.low, piece.high))
            self.read_in[chunk] = min(low, piece.low), max(high, piece.high)

    def write(self, piece: Piece, by: Agent, on_race: OnRace) -> None:
        piece = self._inside(piece)
        if not piece.starts.size:
            return
        if self._surely(piece, by, True):
            return
        low, high = piece.low, piece.high
        excused = piece.meets(self) and self._against_writes(piece, by, on_race)
        self._against_reads(piece, by, on_race, excused)
        self.low, self.high = min(self.low, low), max(self.high, high)
        cells = self._cells(piece)
        marks = np.broadcast_to(piece.mark.packed, cells.shape)
        for chunk, chosen, index in self._parts(cells):
            found = self._chunk(chunk)
            found.keep_below(index, _atomic(piece))
            found.last[index] = marks[chosen]
            found.owner[index] = piece.cluster + 1
            found.low, found.high = min(found.low, low), max(found.high, high)

    def _chunk(self, number: int) -> _Chunk:
        """Made on first use."""
        found = self.chunks.get(number)
        if found is None:
            count = (1 << _CHUNK_BITS) // self.grain
            found = _Chunk(blank(count), blank(count // 2).view(np.int32))
            self.chunks[number] = found
        return found

    def _surely(self, piece: Piece, by: Agent, write: bool) -> bool:
        """Check as `Shadow.surely` within one chunk; a read is not recorded."""
        routines, number = frame.routines(), piece.low >> _CHUNK_BITS
        if routines is None or _atomic(piece) or piece.high - 1 >> _CHUNK_BITS != number:
            return False
        if write and self._may_be_read(number, piece):
            return False
        chunk = self._chunk(number) if write else self.chunks.get(number)
        if chunk is None or not (write or piece.meets(chunk)):
            return True
        base = -(number << _CHUNK_BITS) // self.grain
        cells, mark = Scattered(piece.starts, piece.nbytes, self.grain, base), piece.mark
        where = chunk.at, cells.at, by.at("global"), *by.in_order
        access = WRITES if write else 0, mark.stamp, frame.listed(mark.lane)
        chunk.words[CLUSTER] = piece.cluster + 1
        if routines.visit_global(*where, *access):
            return False
        if write:
            chunk.low, chunk.high = min(chunk.low, piece.low), max(chunk.high, piece.high)
            self.low, self.high = min(self.low, piece.low), max(self.high, piece.high)
        return True

    def _may_be_read(self, number: int, piece: Piece) -> bool:
        """Whether something has been read between the ends of `piece`."""
        low, high = self.read_in.get(number, (0, 0))
        if piece.low >= high or piece.high <= low:
            return False
        return any(map(piece.meets, self.reads.get(number, ())))

    def _inside(self, piece: Piece) -> Piece:
        """Return the part of the piece that lies in the shadow."""
        if self.holds(piece.low, piece.high):
            return piece
        return piece.only(self.inside(piece.starts, piece.nbytes))

    def touches(self, piece: Piece, write: bool) -> int | None:
        """Return an address of `piece` that was written here, or read if `write`; else None."""
        if piece.meets(self):
            cells = self._cells(piece)
            for chunk, chosen, index in self._parts(cells):
                if chunk in self.chunks and self.chunks[chunk].last[index].any():
                    return int(cells[chosen].flat[0]) * self.grain
        if write:
            for chunk in piece.chunks():
                for read in filter(piece.meets, self.reads.get(chunk, ())):
                    both = np.intersect1d(self._cells(piece), self._cells(read))
                    if len(both):
                        return int(both[0]) * self.grain
        return None

    def writes(self, piece: Piece) -> set[tuple[int, int]]:
        """(stamp, its cluster) of the last writes to `piece`."""
        found: set[tuple[int, int]] = set()
        if not piece.meets(self):
            return found
        for chunk, _, index in self._parts(self._cells(piece)):
            if chunk in self.chunks:
                last, owner = self.chunks[chunk].last[index], self.chunks[chunk].owner[index]
                some = last != 0
                found.update(zip(last[some].tolist(), (owner[some] - 1).tolist(), strict=True))
        return found

    def told(self) -> tuple[Any, ...]:
        """Return the state for `add` in another process: last writers of cells, and reads."""
        written = {}
        for number, chunk in self.chunks.items():
            cells = np.flatnonzero(chunk.last)
            ends = chunk.low, chunk.high
            written[number] = cells, chunk.last[cells], chunk.owner[cells], ends
        return written, self.reads, self.read_in, self.earlier

    def add(self, told: tuple[Any, ...]) -> None:
        """Add accesses of other clusters, which wrote nothing that is known here."""
        written, reads, read_in, earlier = told
        for number, (cells, last, owner, (low, high)) in written.items():
            chunk = self._chunk(number)
            chunk.last[cells], chunk.owner[cells] = last, owner
            chunk.low, chunk.high = min(chunk.low, low), max(chunk.high, high)
            self.low, self.high = min(self.low, low), max(self.high, high)
        for mine, more in ((self.reads, reads), (self.earlier, earlier)):
            for number, pieces in more.items():
                mine.setdefault(number, []).extend(pieces)
        for number, (low, high) in read_in.items():
            known = self.read_in.get(number, (low, high))
            self.read_in[number] = min(low, known[0]), max(high, known[1])

    def written(self, low: int, high: int) -> tuple[int, set[int]]:
        """Return how many bytes of [low, high) have been written, and the sites of last writes."""
        cells, sites, routines = 0, set[int](), frame.routines()
        for number in range(low >> _CHUNK_BITS, (high - 1 >> _CHUNK_BITS) + 1):
            chunk, start = self.chunks.get(number), number << _CHUNK_BITS
            if chunk is None:
                continue
            first = max(max(low, chunk.low) - start, 0) // self.grain
            end = -(-min(min(high, chunk.high) - start, 1 << _CHUNK_BITS) // self.grain)
            last = chunk.last[first : max(end, first)]
            span = Span(first, len(last))
            cells += int(np.count_nonzero(last))
            if routines is not None and len(last) <= len(frame.FOUND):
                count = routines.writers(chunk.at, span.at, frame.FOUND_AT)
                stamps = frame.FOUND[:count]
            else:
                stamps = np.unique(last)
            sites.update((stamps[stamps != 0] & SITE_MASK).tolist())
        return cells * self.grain, sites

    def may_have_written(self, low: int, high: int) -> bool:
        """Whether some of [low, high) may have been written."""
        chunks = range(low >> _CHUNK_BITS, (high - 1 >> _CHUNK_BITS) + 1)
        found = (self.chunks.get(number) for number in chunks)
        return any(chunk and low < chunk.high and high > chunk.low for chunk in found)

    def chain(self) -> Iterator[GlobalShadow]:
        """Yield this shadow, and those of earlier launches that may overlap it."""
        shadow: GlobalShadow | None = self
        while shadow:
            yield shadow
            shadow = shadow.before

    def forget(self, low: int, high: int) -> None:
        """Forget accesses to [low, high), which now belongs to another allocation."""
        for chunk in range(low >> _CHUNK_BITS, (high - 1 >> _CHUNK_BITS) + 1):
            start = chunk << _CHUNK_BITS
            if chunk in self.chunks:
                first, last = max(low - start, 0), min(high - start, 1 << _CHUNK_BITS)
                self.chunks[chunk].last[first // self.grain : -(-last // self.grain)] = 0
            for reads in (self.reads, self.earlier):
                reads[chunk] = [r for r in reads.get(chunk, ()) if r.low < low or r.high > high]

    # -- checks -------------------------------------------------------------------------------

    def _against_writes(self, piece: Piece, by: Agent, on_race: OnRace) -> bool:
        """Whether there is a race that is excused."""
        excused = False
        cells = self._cells(piece)
        lanes = np.broadcast_to(piece.mark.lane, cells.shape)
        for chunk, chosen, index in self._parts(cells):
            found = self.chunks.get(chunk)
            if found is None or not piece.meets(found):
                continue
            for old, owner in found.writes(index, _atomic(piece)):
                for cluster in np.unique(owner[old != 0]).tolist():
                    part = (owner == cluster) & (old != 0)
                    seen = self._seen(cluster - 1, piece, by, True)
                    bad = unordered(old[part], *seen, lanes[chosen][part])
                    for where in np.flatnonzero(bad).tolist():
                        address = int(cells[chosen][part][where]) * self.grain
                        if not on_race(int(old[part][where]), cluster - 1, address, True):
                            break
                        excused = True
        return excused

    def _against_reads(self, piece: Piece, by: Agent, on_race: OnRace, excused: bool) -> None:
        """excused: `piece` is not ordered after some write, which does not matter since both write
        the same. What was read before that one may be what `piece` wrote: it counts here alone,
        since whoever is ordered after a write is ordered after all that came before it."""
        low, high = piece.low, piece.high
        for chunk in piece.chunks():
            earlier = self.earlier.setdefault(chunk, [])
            for read in filter(piece.meets, earlier if excused else ()):
                self._against_read(piece, read, by, on_race)
            reads = self.reads.get(chunk, [])
            met = [each for each in reads if each.low < high and each.high > low]  # of very many
            over = {each for each in met if self._against_read(piece, each, by, on_race)}
            if over:
                self.reads[chunk] = [each for each in reads if each not in over]
                earlier += [each for each in met if each in over]

    def _against_read(self, piece: Piece, read: Piece, by: Agent, on_race: OnRace) -> bool:
        """Whether `piece` overwrites all that was read."""
        mine, its = self._cells(piece), self._cells(read)
        both, here, there = np.intersect1d(mine, its, return_indices=True)
        if not len(both):
            return False
        marks = np.broadcast_to(read.mark.packed, its.shape).ravel()[there]
        lanes = np.broadcast_to(piece.mark.lane, mine.shape).ravel()[here]
        seen = self._seen(read.cluster, piece, by, False)
        bad = unordered(marks, *seen, lanes)
        if bad.any():
            where = int(np.flatnonzero(bad)[0])
            on_race(int(marks[where]), read.cluster, int(both[where]) * self.grain, False)
        return len(both) == len(np.unique(its))

    def _seen(
        self, cluster: int, piece: Piece, by: Agent, was_write: bool
    ) -> tuple[np.ndarray, Agent | None]:
        """Return what `by` is ordered after in `cluster`, and `by` if it belongs to that
        cluster."""
        if cluster == piece.cluster:
            return by.seen(was_write, "global"), by
        return foreign_seen(by, cluster, was_write), None

    # -- cells --------------------------------------------------------------------------------

    def _cells(self, piece: Piece) -> np.ndarray:
        count = max(piece.nbytes // self.grain, 1)
        return piece.starts // self.grain + np.arange(count, dtype=np.int64)[:, None]

    def _parts(self, cells: np.ndarray) -> list[tuple[Any, ...]]:
        """(chunk, which of the cells, their indices in it)."""
        per_chunk = (1 << _CHUNK_BITS) // self.grain
        chunks = cells // per_chunk
        first = int(chunks.flat[0])
        if (chunks == first).all():
            return [(first, ..., cells - first * per_chunk)]
        return [
            (chunk, chunks == chunk, cells[chunks == chunk] - chunk * per_chunk)
            for chunk in np.unique(chunks).tolist()
        ]


def _atomic(piece: Piece) -> bool:
    return not isinstance(piece.mark.lane, np.ndarray) and piece.mark.lane == ATOMIC


class Flags:
    """Addresses that carry synchronisation, with what their last release published."""

    def __init__(self) -> None:
        self._told: dict[object, dict[int, np.ndarray]] = {}

    def release(self, address: object, told: dict[int, np.ndarray], *, adds: bool) -> None:
        """Publish a release; an atomic adds to the published state, a store replaces it.

        told: rows by cluster.
        """
        old = self._told.get(address) if adds else None
        self._told[address] = told if old is None else merged(old, told)

    def acquire(self, address: object) -> dict[int, np.ndarray]:
        return self._told.get(address, {})


def merged(one: dict[int, np.ndarray], other: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Merge two sets of knowledge, by cluster."""
    result = dict(one)
    for cluster, rows in other.items():
        have = result.get(cluster)
        result[cluster] = rows if have is None else join(have.copy(), rows)
    return result
