"""Device code that the roles share: bundles of arguments, TMA boxes, and the slots of the boxes.

Reading a block table takes longer than a tile. So a warp looks up the boxes of several tiles
together: lane l looks up box l % boxes of the tile of visit l / boxes, and shuffles pass the slots
on.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8, Uint32
from cutlass.cute.nvgpu import cpasync

from kernelkit.device.boxes import ROWS_FIRST, Box, TmaTensor, describe, reorder
from kernelkit.device.fake import fake_tensor
from kernelkit.device.pipelines import Event, Ring
from kernelkit.plan import hw
from mla.indexer.params import ScoresParams
from mla.indexer.scores_config import KEYS
from mla.indexer.scores_device import Run, slot_of
from mla.indexer.shared.plan import TiledPlan


@dataclass(frozen=True)
class Operands:
    """Operands read by TMA, modes (row or head, byte, 1, slot or token)."""

    keys: TmaTensor
    q: TmaTensor


@dataclass(frozen=True)
class Buffers:
    """On-chip memory of the CTA."""

    spans: cute.Tensor  # int32 (tokens + 1, 2)
    weights: cute.Tensor  # fp32 (columns of all products)
    key_scales: cute.Pointer  # words
    q: cute.Pointer
    keys: cute.Pointer
    # Blackwell
    q_scales: cute.Pointer | None = None  # words
    tmem: cute.Pointer | None = None


@dataclass(frozen=True)
class Pipes:
    """Barriers of the plan's edges."""

    q: Event
    keys: Ring
    scales: Ring
    acc: Ring | None = None  # Blackwell


@dataclass(frozen=True)
class Share:
    """Share of the work: the first token of the CTA, and key tiles cta, cta + ctas, ..."""

    first: Int32
    cta: Int32
    ctas: Int32


@dataclass(frozen=True)
class Scope:
    """State shared by all roles of a CTA."""

    operands: Operands
    params: ScoresParams
    buffers: Buffers
    pipes: Pipes
    share: Share


def fake_operand() -> Any:
    """Return a stand-in for keys or queries: [slots or tokens, rows or heads, 1, bytes]."""
    size = (cute.sym_int32() for _ in range(4))
    return fake_tensor(Uint8, *size, align=hw.TMA_ALIGN_BYTES)


def key_box(plan: TiledPlan) -> Box:
    """Return the box of keys of a page, in bytes."""
    return Box(plan.config.box, plan.row_bytes, Uint8)


def query_box(plan: TiledPlan) -> Box:
    """Return the box of one token's queries, in bytes."""
    return Box(plan.config.heads, plan.row_bytes, Uint8)


def operands_of(plan: TiledPlan, operands: tuple[cute.Tensor, ...]) -> Operands:
    """Return keys and queries, each [slots or tokens, rows or heads, 1, bytes], as TMA reads them;
    on the host."""
    fetch, boxes = cpasync.CopyBulkTensorTileG2SOp(), (key_box(plan), query_box(plan))
    return Operands(*(
        describe(fetch, reorder(tensor, ROWS_FIRST), box)
        for tensor, box in zip(operands, boxes, strict=True)
    ))  # fmt: skip


@dataclass(frozen=True)
class BoxPlace:
    """First row of a box; slot is -1 if the run sees none of its keys."""

    slot: Int32
    row: Int32


def visits(plan: TiledPlan) -> int:
    """Return the number of tiles that a warp looks up together."""
    return hw.WARP_THREADS // plan.config.boxes


@cute.jit
def tiles_of(run: Run) -> Int32:
    """Number of tiles with keys that a token of the run sees."""
    return (run.most + KEYS - 1) // KEYS


@cute.jit
def look_up(plan: TiledPlan, scope: Scope, run: Run, tile: Int32) -> BoxPlace:
    """Return the place of the lane's box; `tile` is the tile of visit 0."""
    lane, boxes = cute.arch.lane_idx(), plan.config.boxes
    key = (tile + lane // boxes * scope.share.ctas) * KEYS + lane % boxes * plan.config.box
    rows = Uint32(scope.params.rows)
    block, slot = Uint32(key) // rows, Int32(-1)
    if key < run.most:
        slot = slot_of(scope.params, run.owner, Int32(block))
    return BoxPlace(slot, key - Int32(block * rows))


@cute.jit
def visits_left(plan: TiledPlan, scope: Scope, run: Run, tile: Int32) -> Int32:
    """Return the number of tiles from `tile` on, at most as many as are looked up together."""
    left = (tiles_of(run) - tile + scope.share.ctas - 1) // scope.share.ctas
    return cutlass.min(left, Int32(visits(plan)))
