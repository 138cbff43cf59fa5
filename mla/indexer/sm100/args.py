"""Bundles that travel between the kernel and its roles, boxes that TMA moves, and slots of the
boxes (device code).

A look into a block table takes longer than a tile. So a whole warp looks for several tiles at once:
lane l for box l % boxes of visit l / boxes, and shuffles pass the slots on.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8, Uint32

from kernelkit.device.boxes import Box, TmaTensor
from kernelkit.device.pipelines import Event, Ring
from kernelkit.plan import hw
from mla.indexer.params import ScoresParams
from mla.indexer.scores_config import KEYS
from mla.indexer.scores_device import Run, slot_of
from mla.indexer.sm100.plan import ROW_BYTES, ScoresPlan


@dataclass(frozen=True)
class Operands:
    """Operands read by TMA, modes (row or head, byte, 1, slot or token)."""

    keys: TmaTensor
    q: TmaTensor


@dataclass(frozen=True)
class Buffers:
    """On-chip memory of the CTA."""

    spans: cute.Tensor  # int32 (tokens + 1, 2)
    weights: cute.Tensor  # fp32 (columns of a product)
    q_scales: cute.Pointer  # words
    key_scales: cute.Pointer  # words
    q: cute.Pointer
    keys: cute.Pointer
    tmem: cute.Pointer


@dataclass(frozen=True)
class Pipes:
    """The edges of the plan as barriers."""

    q: Event
    keys: Ring
    scales: Ring
    acc: Ring


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


def key_box(plan: ScoresPlan) -> Box:
    """Keys of a page, in bytes."""
    return Box(plan.config.box, ROW_BYTES, Uint8)


def query_box(plan: ScoresPlan) -> Box:
    """A token, in bytes."""
    return Box(plan.config.heads, ROW_BYTES, Uint8)


@dataclass(frozen=True)
class BoxPlace:
    """First row of a box; slot is -1 if the run sees none of its keys."""

    slot: Int32
    row: Int32


def visits(plan: ScoresPlan) -> int:
    """Tiles that a warp looks up together."""
    return hw.WARP_THREADS // plan.config.boxes


@cute.jit
def tiles_of(run: Run) -> Int32:
    """Number of tiles with keys that a token of the run sees."""
    return (run.most + KEYS - 1) // KEYS


@cute.jit
def look_up(plan: ScoresPlan, scope: Scope, run: Run, tile: Int32) -> BoxPlace:
    """Return the place of the lane's box; `tile` is the tile of visit 0."""
    lane, boxes = cute.arch.lane_idx(), plan.config.boxes
    key = (tile + lane // boxes * scope.share.ctas) * KEYS + lane % boxes * plan.config.box
    rows = Uint32(scope.params.rows)
    block, slot = Uint32(key) // rows, Int32(-1)
    if key < run.most:
        slot = slot_of(scope.params, run.owner, Int32(block))
    return BoxPlace(slot, key - Int32(block * rows))


@cute.jit
def visits_left(plan: ScoresPlan, scope: Scope, run: Run, tile: Int32) -> Int32:
    """Tiles from `tile` on, of those that are looked up together."""
    left = (tiles_of(run) - tile + scope.share.ctas - 1) // scope.share.ctas
    return cutlass.min(left, Int32(visits(plan)))
