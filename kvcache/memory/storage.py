"""The memory of a cache: one uint8 tensor per pool, views of it for every layer, the clean slots.

Nothing is cleared but the null block and the clean state: whatever a slot held before it was handed
out is somebody else's, and nobody may read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernelkit.call.tensors import brought, require_type
from kvcache.books.manager import CLEAN, RESERVED
from kvcache.books.slot_pool import Sizes
from kvcache.books.work import Pool
from kvcache.checks import require, whole
from kvcache.layouts.layout import Layout, Region, Ring, Stream, Tail
from kvcache.layouts.rows import Rows, TailRows


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
        """Where the entries of one copy of a stream or ring lie."""
        place = self.layout.place(name, copy)
        stays = isinstance(self.layout.find(name), Stream)
        pool = self.pools[Pool.BLOCKS if stays else Pool.STATES]
        return Rows(pool, **vars(place))

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
                f"ring {name!r} has {rows.rows} rows for a window of {array.window}: with drafts a "
                "ring is no page of attention. Use a layout without draft, or read its rows by "
                "kvcache.gather"
            )
        require_type("dtype", dtype, torch.dtype)
        require("shape", shape, tuple)
        for place, length in enumerate(shape):
            whole(f"shape[{place}]", length, 1)
        record, size = rows.record, math.prod(shape) * dtype.itemsize
        if record.scale_bytes or record.data_bytes != size:
            raise ValueError(
                f"entries of {name!r} are {record.name}, {record.data_bytes} + "
                f"{record.scale_bytes} bytes; {dtype} {shape} would be {size} + 0"
            )
        return rows.data().view(dtype).unflatten(-1, shape)

    def tail(self, name: str, copy: int) -> TailRows:
        """Where the rows of one copy of a tail lie."""
        tail, offset = self.layout.find(name), self.layout.offset(name, copy)
        if not isinstance(tail, Tail):
            raise TypeError(f"{name!r} is no tail")
        return TailRows(self.pools[Pool.STATES], offset, tail.rows(self.layout.draft), tail)


def _empty(slots: int, slot_bytes: int, device: torch.device, on_host: bool) -> torch.Tensor:
    where = torch.device("cpu") if on_host else device
    pinned = on_host and device.type == "cuda"
    return torch.empty((slots, slot_bytes), dtype=torch.uint8, device=where, pin_memory=pinned)
