"""Executes copies between pools: as few launches as their order allows, one for a group of copies
of which none reads or overwrites what another one writes.

Whole slots to or from the host's memory are left to the copy engines instead: a kernel that waits
for the bus takes the SMs from the decode steps beside it, which then take twice as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from kvcache.books.work import Copy, Pool
from kvcache.layouts.layout import GUARD_BYTES
from kvcache.memory.storage import Storage
from kvcache.movement.api import copy_slots, cut_segments

TABLES = 256  # of segments that are kept on the device


class Mover:
    """Copies between the pools of a storage, on the current stream."""

    def __init__(self, storage: Storage, *, backend: str = "auto", arch: str | None = None) -> None:
        self._storage = storage
        self._place: dict[str, Any] = {"backend": backend, "arch": arch}
        self._segments = lru_cache(TABLES)(self._make_segments)

    def move(self, copies: Iterable[Copy]) -> None:
        """In order; without a wait for the device."""
        pools, stream = self._storage.pools, _stream_on(self._storage.device)
        for group in grouped(copies):
            first = group[0]
            on_host = first.source.on_host or first.target.on_host
            if on_host and first.position is None and self._storage.device.type == "cuda":
                self._over_the_bus(group)
                continue
            pairs = torch.tensor([(c.source_slot, c.target_slot) for c in group])
            position = first.position
            if position is not None:
                position = self._storage.layout.alike(position)  # few tables serve all positions
            copy_slots(
                pools[first.source], pools[first.target], self._storage.table(pairs),
                self._segments(first.source, first.target, position, stream), **self._place,
            )  # fmt: skip

    def _over_the_bus(self, group: Sequence[Copy]) -> None:
        """Whole slots, by the copy engines."""
        pools = self._storage.pools
        source, target = (pools[pool][:, :-GUARD_BYTES] for pool in group[0][:2])
        for copy in group:
            target[copy.target_slot].copy_(source[copy.source_slot], non_blocking=True)

    def _make_segments(
        self, source: Pool, target: Pool, position: int | None, stream: int
    ) -> torch.Tensor:
        """int64 [s, 3]. Guards stay: each slot has its own.

        stream: each has tables of its own, since they arrive, and are forgotten, in its order.
        """
        layout = self._storage.layout
        if position is None:
            size = self._storage.pools[source].shape[1] - GUARD_BYTES
            segments = [(0, 0, size)]
        elif target is Pool.CHECKPOINTS:
            segments = layout.segments(position)
        elif source is Pool.CHECKPOINTS:
            segments = [(place, offset, size) for offset, place, size in layout.segments(position)]
        else:
            segments = [(offset, offset, size) for offset, size in layout.live(position)]
        return self._storage.table(cut_segments(segments))


def _stream_on(device: torch.device) -> int:
    """The current one, by its number."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def grouped(copies: Iterable[Copy]) -> Iterator[Sequence[Copy]]:
    """Runs of copies that one launch can do in any order, with the same segments."""
    group: list[Copy] = []
    read: set[tuple[Pool, int]] = set()
    written: set[tuple[Pool, int]] = set()
    for copy in copies:
        source, target = (copy.source, copy.source_slot), (copy.target, copy.target_slot)
        alike = not group or group[0][:2] + group[0][4:] == copy[:2] + copy[4:]
        if not alike or source in written or target in written or target in read:
            yield group
            group, read, written = [], set(), set()
        group.append(copy)
        read.add(source)
        written.add(target)
    if group:
        yield group
