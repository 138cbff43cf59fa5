"""Scheduler role: one warp walks over the tiles of all experts and tells them to the others.

Tiles are numbered expert by expert, inside an expert row tiles first: neighbouring CTAs then read
the same weights. How many rows an expert has stands on the device, so lane l looks at expert
32 c + l and a scan over the warp finds whose tile a number is. An expert's scale factors of x begin
at a fresh block of 128 rows: another scan, unless tiles are as long. In a pair both CTAs walk.
"""

import dataclasses
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineState

from kernelkit import hw
from kernelkit.lanes import sum_below
from kernelkit.pipelines import in_leader, producer_state
from moe.formats import SCALE_ROWS
from moe.sm100.args import Scope, Tile
from moe.sm100.plan import ROLES, TILE_STAGES, GroupedPlan

TILE_FIELDS = len(dataclasses.fields(Tile))
QUARTER = SCALE_ROWS // 4  # rows whose scale factors are a column of tensor memory


@dataclass(frozen=True)
class Experts:
    """32 of them, one a lane. first, rows: of x; tiles, blocks: row tiles and blocks of scale
    factors of this expert and all before it in the chunk."""

    first: Int32
    rows: Int32
    tiles: Int32
    blocks: Int32


class Scheduler:
    """Fills the tile queue."""

    def __init__(self, plan: GroupedPlan) -> None:
        self.plan = plan
        self.role = ROLES["scheduler"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp; behind the last tile comes one that is not valid."""
        sizes, ctas = scope.sizes, self.plan.config.ctas
        lane = cute.arch.lane_idx()
        state = producer_state(TILE_STAGES)
        number, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        number, step = number // ctas, step // ctas
        # Of the chunks of experts before this one, and of this one.
        chunk, tiles_before, blocks_before = Int32(-1), Int32(0), Int32(0)
        tiles, blocks = Int32(0), Int32(0)
        experts = Experts(Int32(0), Int32(0), Int32(0), Int32(0))
        going = Int32(1)
        while going > 0:
            while (number >= (tiles_before + tiles) * sizes.n_tiles) & (
                (chunk + 1) * hw.WARP_THREADS < sizes.experts
            ):
                chunk += 1
                tiles_before += tiles
                blocks_before += blocks
                experts = self.look(scope, chunk * hw.WARP_THREADS + lane)
                tiles = cute.arch.shuffle_sync(experts.tiles, hw.WARP_THREADS - 1)
                blocks = cute.arch.shuffle_sync(experts.blocks, hw.WARP_THREADS - 1)
            inside = number - tiles_before * sizes.n_tiles
            going = Int32(1) if inside < tiles * sizes.n_tiles else Int32(0)
            behind = cute.arch.vote_ballot_sync(experts.tiles * sizes.n_tiles <= inside)
            owner = cutlass.min(cute.arch.popc(behind), hw.WARP_THREADS - 1)
            owned = Experts(*(cute.arch.shuffle_sync(each, owner) for each in fields(experts)))
            expert = chunk * hw.WARP_THREADS + owner
            tile = self.tile_of(owned, inside, sizes.n_tiles, going, expert, blocks_before)
            self.publish(scope, state, tile)
            state.advance()
            number += step

    @cute.jit
    def look(self, scope: Scope, expert: Int32) -> Experts:
        """One a lane; behind the last one they have no rows."""
        lane = cute.arch.lane_idx()
        first, rows = Int32(0), Int32(0)
        if expert < scope.sizes.experts:
            first = scope.tensors.offsets[expert]
            rows = scope.tensors.offsets[expert + 1] - first
        tiles = self.tiles_of(rows)
        tiles += sum_below(tiles, lane)
        blocks = tiles
        if cutlass.const_expr(self.plan.config.tile_rows != SCALE_ROWS):
            blocks = blocks_of(rows)
            blocks += sum_below(blocks, lane)
        return Experts(first, rows, tiles, blocks)

    def tiles_of(self, rows: Int32) -> Int32:
        """Row tiles that hold so many rows."""
        return -(-rows // self.plan.config.tile_rows)

    @cute.jit
    def tile_of(
        self,
        owned: Experts,
        inside: Int32,
        n_tiles: Int32,
        valid: Int32,
        expert: Int32,
        blocks_before: Int32,
    ) -> Tile:
        """Of an expert. inside: its number in the chunk. valid: whether there is such a tile.
        blocks_before: blocks of scale factors before the chunk."""
        own_tiles = self.tiles_of(owned.rows)
        local = inside - (owned.tiles - own_tiles) * n_tiles
        count = cutlass.max(own_tiles, 1)
        row = local % count * self.plan.config.tile_rows
        return Tile(
            valid,
            expert,
            owned.first + row,
            owned.rows - row,
            blocks_before + owned.blocks - blocks_of(owned.rows) + row // SCALE_ROWS,
            row % SCALE_ROWS // QUARTER,
            local // count,
        )

    @cute.jit
    def publish(self, scope: Scope, state: PipelineState, tile: Tile) -> None:
        """To the roles of this CTA, once each has read what stood there."""
        pipes = scope.pipes
        pipes.tile_load.wait_free(state)
        pipes.tile_epilogue.wait_free(state)
        if cutlass.const_expr(self.plan.config.ctas == 1):
            pipes.tile_mma.wait_free(state)
        elif in_leader():
            pipes.tile_mma.wait_free(state)
        if cute.arch.lane_idx() == 0:
            write_tile(scope, state.index, tile)
        pipes.tile_load.signal(state.index)
        pipes.tile_epilogue.signal(state.index)
        if cutlass.const_expr(self.plan.config.ctas == 1):
            pipes.tile_mma.signal(state.index)
        elif in_leader():
            pipes.tile_mma.signal(state.index)


@cute.jit
def write_tile(scope: Scope, stage: Int32, tile: Tile) -> None:
    """Write a slot of the tile queue."""
    for word, value in enumerate(fields(tile)):
        scope.buffers.tiles[stage, word] = value


@cute.jit
def read_tile(scope: Scope, stage: Int32) -> Tile:
    """Read a slot of the tile queue."""
    return Tile(*(scope.buffers.tiles[stage, word] for word in range(TILE_FIELDS)))


def rank_in_tile(plan: GroupedPlan) -> Int32:
    """Of this CTA among those that share a tile."""
    if plan.config.ctas == 1:
        return Int32(0)
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())


def blocks_of(rows: Int32) -> Int32:
    """Blocks of scale factors that so many rows have."""
    return -(-rows // SCALE_ROWS)


def fields(bundle: object) -> list:
    """Of a frozen dataclass."""
    return list(vars(bundle).values())
