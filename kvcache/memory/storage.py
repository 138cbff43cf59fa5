"""The memory of a cache: one uint8 tensor per pool, copies between pools, guards and checksums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from kernelkit.call.tensors import brought, require_type
from kvcache.books.manager import CLEAN, RESERVED
from kvcache.books.slot_pool import Sizes
from kvcache.books.work import Copy, Pool
from kvcache.checks import require, whole
from kvcache.layouts.layout import GUARD_BYTES, Layout, Region, Ring, Stream, Tail
from kvcache.layouts.rows import Rows, TailRows
from kvcache.movement.api import checksum, copy_slots, cut_segments

# ---- Tensors of pools, views of them for every layer, the clean slots
#
# Nothing is cleared but the null block and the clean state: whatever a slot held before it was
# handed out is somebody else's, and nobody may read it.


@dataclass(frozen=True)
class Buffer:
    """The memory of a pool: slot i begins at address + i * slot_bytes.

    regions: the pages of a slot; none of a checkpoint, whose rows lie where its position says.
    """

    pool: Pool
    address: int
    slots: int
    slot_bytes: int
    regions: tuple[Region, ...]


class Storage:
    """Pools of `layout` with room for `sizes`: device pools on `device`, host pools pinned.

    pools: Pool -> uint8 [slots, slot_bytes].
    """

    def __init__(self, layout: Layout, sizes: Sizes, device: torch.device) -> None:
        self.layout, self.device = layout, device
        slot_bytes = {
            Pool.BLOCKS: layout.block_bytes,
            Pool.STATES: layout.state_bytes,
            Pool.CHECKPOINTS: layout.checkpoint_bytes,
            Pool.HOST_BLOCKS: layout.block_bytes,
            Pool.HOST_STATES: layout.state_bytes,
        }
        slots = {pool: getattr(sizes, pool.name.lower()) for pool in Pool}
        slots[Pool.BLOCKS] += RESERVED
        slots[Pool.STATES] += RESERVED
        self.pools = {
            pool: _empty(slots[pool], slot_bytes[pool], device, pool.on_host) for pool in Pool
        }
        self.pools[Pool.BLOCKS][0] = 0
        if layout.has_state:
            self._clean()

    def _clean(self) -> None:
        """The state of no tokens: a compressor's scores and maxima begin at minus infinity."""
        self.pools[Pool.STATES][CLEAN] = 0
        for tail in self.layout.tails:
            for copy in range(tail.copies):
                scores = self.tail(tail.name, copy).parts()[0 if tail.online else 1]
                scores[CLEAN] = -math.inf

    def buffers(self) -> list[Buffer]:
        """Every pool that has slots, and what a slot of it consists of: to register or transfer."""
        layout = self.layout
        regions = {Pool.BLOCKS: layout.block_regions, Pool.HOST_BLOCKS: layout.block_regions}
        regions |= {Pool.STATES: layout.state_regions, Pool.HOST_STATES: layout.state_regions}
        return [
            Buffer(pool, memory.data_ptr(), len(memory), memory.shape[1], regions.get(pool, ()))
            for pool, memory in self.pools.items()
            if memory.numel()
        ]

    def table(self, numbers: torch.Tensor) -> torch.Tensor:
        """`numbers` on the device, without a wait: on the current stream, out of pinned memory."""
        return brought(numbers, self.device)

    def rows(self, name: str, copy: int) -> Rows:
        """Return the entries of one copy of a stream or ring."""
        place = self.layout.place(name, copy)
        stays = isinstance(self.layout.find(name), Stream)
        pool = self.pools[Pool.BLOCKS if stays else Pool.STATES]
        return Rows(pool, **vars(place))

    def marks(self, name: str, copy: int) -> Rows:
        """Return the rows of one copy of a ring in the pool of checkpoints; see `Layout.mark`."""
        return Rows(self.pools[Pool.CHECKPOINTS], **vars(self.layout.mark(name, copy)))

    def pages(
        self, name: str, copy: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """A view [slots, rows, *shape] of entries that are plain numbers: what attention reads.

        shape: of an entry, all of its bytes. ValueError for an entry with scales, or of other size,
        and for a ring with room for drafts: it has rows that the next token does not see.
        """
        rows, array = self.rows(name, copy), self.layout.find(name)
        if isinstance(array, Ring) and rows.rows != array.window:
            raise ValueError(
                f"ring {name!r} has {rows.rows} rows for a window of {array.window}: attention "
                "cannot read a ring with drafts as a page. Use a layout without draft, or read its "
                "rows with kvcache.gather"
            )
        require_type("dtype", dtype, torch.dtype)
        require("shape", shape, tuple)
        for place, length in enumerate(shape):
            whole(f"shape[{place}]", length, 1)
        record, size = rows.record, math.prod(shape) * dtype.itemsize
        if record.scale_bytes or record.data_bytes != size:
            raise ValueError(
                f"entries of {name!r} are {record.name}, {record.data_bytes} + "
                f"{record.scale_bytes} bytes, but {dtype} {shape} needs {size} + 0"
            )
        return rows.data().view(dtype).unflatten(-1, shape)

    def tail(self, name: str, copy: int) -> TailRows:
        """Return the rows of one copy of a tail."""
        tail, offset = self.layout.find(name), self.layout.offset(name, copy)
        if not isinstance(tail, Tail):
            raise TypeError(f"{name!r} is not a tail")
        return TailRows(self.pools[Pool.STATES], offset, tail.rows(self.layout.draft), tail)


def _empty(slots: int, slot_bytes: int, device: torch.device, on_host: bool) -> torch.Tensor:
    where = torch.device("cpu") if on_host else device
    pinned = on_host and device.type == "cuda"
    return torch.empty((slots, slot_bytes), dtype=torch.uint8, device=where, pin_memory=pinned)


# ---- Copies between pools: as few launches as their order allows
#
# One launch serves a group of copies of which none reads or overwrites what another one writes.
# Whole slots to or from the host's memory are left to the copy engines instead: a kernel that waits
# for the bus takes the SMs from the decode steps beside it, which then take twice as long.

TABLES = 256  # of segments that are kept on the device


class Mover:
    """Copies between the pools of a storage, on the current stream."""

    def __init__(self, storage: Storage, *, backend: str = "auto", arch: str | None = None) -> None:
        self._storage = storage
        self._place: dict[str, Any] = {"backend": backend, "arch": arch}
        self._segments = lru_cache(TABLES)(self._make_segments)

    def move(self, copies: Iterable[Copy]) -> None:
        """Execute copies in order, without a wait for the device."""
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


# ---- Guards and checksums, which notice what nobody had a right to change
#
# Every slot of every pool ends in a guard that its number determines. What does not change any more
# (full blocks, checkpoints, what is in the host tier) has a checksum, too, taken on the device when
# it was complete. Looking waits for the device.

GUARD_WORDS = GUARD_BYTES // 8
MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd number without a pattern
SEALED = (Pool.BLOCKS, Pool.CHECKPOINTS, Pool.HOST_BLOCKS, Pool.HOST_STATES)


class Canary:
    """Guards of all pools of a storage, and checksums of the slots that are sealed."""

    def __init__(self, storage: Storage, *, backend: str = "auto", arch: str | None = None) -> None:
        self._storage = storage
        self._place: dict[str, Any] = {"backend": backend, "arch": arch}
        self._sums = {pool: torch.zeros(len(storage.pools[pool]), dtype=torch.int64,
                                        device=storage.device) for pool in SEALED}  # fmt: skip
        self.sealed: dict[Pool, set[int]] = {pool: set() for pool in SEALED}
        # A layout without states has no bytes in their pools.
        self.guarded = [pool for pool in Pool if storage.pools[pool].shape[1]]
        for pool in self.guarded:
            self._guards(pool).copy_(self._expected(pool))

    def seal(self, pool: Pool, slots: Sequence[int]) -> None:
        """These slots are complete: remember what is in them. Nothing waits."""
        if slots:
            numbers = self._numbers(slots)
            self._sums[pool][numbers] = self._checksums(pool, numbers)
            self.sealed[pool].update(slots)

    def unseal(self, pool: Pool, slots: Sequence[int]) -> None:
        """These slots are written again."""
        self.sealed[pool].difference_update(slots)

    def broken_seals(self, pool: Pool, slots: Sequence[int]) -> list[int]:
        """Return the sealed slots among `slots` whose contents changed since they were sealed."""
        slots = [slot for slot in slots if slot in self.sealed[pool]]
        if not slots:
            return []
        numbers = self._numbers(slots)
        differ = self._checksums(pool, numbers) != self._sums[pool][numbers]
        return numbers[differ].tolist()

    def broken_guards(self, pool: Pool) -> list[int]:
        """Slots of `pool` whose guard was written."""
        differ = self._guards(pool) != self._expected(pool)
        return differ.any(1).nonzero().flatten().tolist()

    def _guards(self, pool: Pool) -> torch.Tensor:
        """A view int64 [slots, GUARD_WORDS]."""
        return self._storage.pools[pool][:, -GUARD_BYTES:].view(torch.int64)

    def _expected(self, pool: Pool) -> torch.Tensor:
        guards = self._guards(pool)
        first = list(Pool).index(pool) << 40
        numbers = torch.arange(guards.numel(), device=guards.device).view(guards.shape)
        return (numbers + first + 1) * MIX  # modulo 2^64

    def _checksums(self, pool: Pool, slots: torch.Tensor) -> torch.Tensor:
        memory = self._storage.pools[pool]
        end = memory.shape[1] - GUARD_BYTES
        return checksum(memory, slots, 0, end, **self._place)

    def _numbers(self, slots: Sequence[int]) -> torch.Tensor:
        return self._storage.table(torch.tensor(slots, dtype=torch.int64))
