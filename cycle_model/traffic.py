"""Global memory reads of a launch: which miss L2, and which other clusters make at the same time.

A second read of an address hits L2. If all clusters were recorded, the first reader of an address
is known. If some were, the others are assumed to read as much, but together no more than the
allocation holds. If all of them would read an allocation several times over, a share of each
cluster's reads counts as first reads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property

from cycle_model.binding.bound import BoundLaunch
from ptxemu.native.accesses import GLOBAL, SECTOR, SHARED, SIZE_BITS, kind
from ptxemu.record import recording as r
from ptxemu.record.recording import WarpRecord

Far = Callable[[int], bool]  # whether an address that is read now misses L2
Share = Callable[[int], float]


class Traffic:
    """Traffic of one launch with `clusters` clusters.

    If `cold`, L2 is empty before the launch. Else L2 holds what the launch reads, if that fits into
    `l2` bytes.
    """

    def __init__(self, launch: BoundLaunch, clusters: int, *, cold: bool, l2: int) -> None:
        self.launch, self.clusters = launch, clusters
        self._blocks = sorted(launch.recording.memory)
        self._starts = [start for start, _ in self._blocks]
        self._cold, self._l2 = cold, l2

    @cached_property
    def _reads(self) -> dict[int, dict[int, int]]:
        """Addresses and bytes that each recorded cluster reads."""
        return {
            number: dict(read for warp in self.launch.records(number) for read in _reads_of(warp))
            for number in self.launch.clusters
        }

    @cached_property
    def _demand(self) -> Counter[int]:
        """Bytes of each allocation that all clusters would read, if no two read the same."""
        total: Counter[int] = Counter()
        for reads in self._reads.values():
            for address, nbytes in reads.items():
                total[self._block(address)] += nbytes
        recorded = len(self._reads)
        return Counter({block: n * self.clusters // recorded for block, n in total.items()})

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes that are read at least once."""
        if len(self._reads) == self.clusters:
            return sum(
                dict(each for reads in self._reads.values() for each in reads.items()).values()
            )
        return sum(min(n, self._room(block)) for block, n in self._demand.items())

    def of(self, cluster: int) -> Far:
        """Return a classifier of one recorded cluster's reads, to be called in their order."""
        if not self._cold and self.nbytes <= self._l2:
            return lambda address: False
        if len(self._reads) == self.clusters:
            first = self._first
            return lambda address: first.get(address // SECTOR * SECTOR) == cluster
        seen: set[int] = set()
        owed: Counter[int] = Counter()

        def far(address: int) -> bool:
            address = address // SECTOR * SECTOR
            if address in seen:
                return False
            seen.add(address)
            block = self._block(address)
            demand = max(self._demand[block], 1)
            owed[block] += min(self._room(block), demand)
            if owed[block] < demand:
                return False
            owed[block] -= demand
            return True

        return far

    @cached_property
    def _first(self) -> dict[int, int]:
        """Address -> the first cluster that reads there."""
        first: dict[int, int] = {}
        for number in sorted(self._reads):
            for address in self._reads[number]:
                first.setdefault(address, number)
        return first

    @cached_property
    def _common(self) -> dict[int, float]:
        """Share of a cluster's reads in each allocation that the next cluster makes as well.

        The share is an average over all recorded neighbours.
        """
        read: Counter[int] = Counter()
        both: Counter[int] = Counter()
        for number, reads in self._reads.items():
            if (beside := self._reads.get(number + 1)) is None:
                continue
            for address, nbytes in reads.items():
                block = self._block(address)
                read[block] += nbytes
                both[block] += nbytes if address in beside else 0
        return {block: both[block] / nbytes for block, nbytes in read.items() if nbytes}

    def alone(self, clusters: float) -> Share:
        """Return the share of a read that L2 serves for one of `clusters` neighbouring clusters.

        Neighbours that request the same line at the same time receive the same answer.
        """
        common, fewer = self._common, 1 - 1 / max(clusters, 1)
        return lambda address: 1 - common.get(self._block(address), 0.0) * fewer

    def _block(self, address: int) -> int:
        """Return the allocation of an address, or -1 if it is in no known one."""
        place = bisect_right(self._starts, address) - 1
        return place if place >= 0 and address < self._blocks[place][1] else -1

    def _room(self, block: int) -> int:
        """Bytes of an allocation; of one that is not known, as many as are asked for."""
        if block < 0:
            return max(self._demand[block], 1)
        start, end = self._blocks[block]
        return end - start


def _reads_of(warp: WarpRecord) -> Iterator[tuple[int, int]]:
    """(address, bytes) of what a warp reads."""
    words = warp.words.reshape(-1, 2)
    head, address = words[:, 0], words[:, 1]
    kinds = (head & 0xFFFF) >> SIZE_BITS
    stores = (kind(memory, True, 0) >> SIZE_BITS for memory in (SHARED, GLOBAL))
    shared = kind(SHARED, False, 0) >> SIZE_BITS
    loads = kinds != shared
    for each in stores:
        loads &= kinds != each
    address = address // SECTOR * SECTOR  # what one access leaves of them the next finds in L1
    yield from zip(address[loads].tolist(), (SECTOR * (head[loads] >> 16)).tolist(), strict=True)
    for event in warp.events:
        if event.what == r.LOAD:
            yield event.address // SECTOR * SECTOR, event.shape[0] * event.shape[1]
