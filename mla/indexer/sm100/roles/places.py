"""Slots of the boxes of tiles, looked up by a whole warp for several tiles at once (device code).

A look into a block table takes longer than a tile: lane l looks for box l % boxes of visit
l / boxes, and shuffles tell the others.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernelkit.plan import hw
from mla.indexer.scores_config import KEYS
from mla.indexer.scores_device import Run, slot_of
from mla.indexer.sm100.args import Scope
from mla.indexer.sm100.plan import ScoresPlan


@dataclass(frozen=True)
class BoxPlace:
    """Where a box begins; slot -1 where the run sees none of its keys."""

    slot: Int32
    row: Int32


def visits(plan: ScoresPlan) -> int:
    """Tiles that a warp looks up together."""
    return hw.WARP_THREADS // plan.config.boxes


@cute.jit
def tiles_of(run: Run) -> Int32:
    """With keys that a token of the run sees."""
    return (run.most + KEYS - 1) // KEYS


@cute.jit
def look_up(plan: ScoresPlan, scope: Scope, run: Run, tile: Int32) -> BoxPlace:
    """Of the lane's box. `tile` is of visit 0."""
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
