"""Scheduler role: one warp walks over the tiles of all experts and tells them to the others.

Tiles are numbered expert by expert, inside an expert row blocks first: neighbouring CTAs then read
the same weights. How many rows an expert has stands on the device, so lane l looks at expert
32 c + l and a scan over the warp finds whose tile a number is. An expert's scale factors of A begin
at a fresh block of 128 rows, so the row blocks before a tile are the block of its scale factors.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernelkit import hw
from kernelkit.pipelines import filling
from moe.device.warp import sum_below
from moe.sm100.args import Scope, Tile
from moe.sm100.plan import ROLES, TILE_M, TILE_STAGES, GroupedPlan


class Scheduler:
    """Fills the tile queue."""

    def __init__(self, plan: GroupedPlan) -> None:
        self.plan = plan
        self.role = ROLES["scheduler"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp; behind the last tile comes one that is not valid."""
        sizes, pipes = scope.sizes, scope.pipes
        lane = cute.arch.lane_idx()
        state = filling(TILE_STAGES)
        number, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        chunk, before = Int32(0), Int32(0)  # experts 32 chunk .., row blocks before them
        first, rows = self.expert_rows(scope, lane)
        blocks = -(-rows // TILE_M)
        last = sum_below(blocks, lane) + blocks
        in_chunk = cute.arch.shuffle_sync(last, hw.WARP_THREADS - 1)
        going = Int32(1)
        while going > 0:
            more = (number >= (before + in_chunk) * sizes.n_tiles) & (
                (chunk + 1) * hw.WARP_THREADS < sizes.experts
            )
            while more:
                before += in_chunk
                chunk += 1
                first, rows = self.expert_rows(scope, chunk * hw.WARP_THREADS + lane)
                blocks = -(-rows // TILE_M)
                last = sum_below(blocks, lane) + blocks
                in_chunk = cute.arch.shuffle_sync(last, hw.WARP_THREADS - 1)
                more = (number >= (before + in_chunk) * sizes.n_tiles) & (
                    (chunk + 1) * hw.WARP_THREADS < sizes.experts
                )
            inside = number - before * sizes.n_tiles
            going = Int32(1) if inside < in_chunk * sizes.n_tiles else Int32(0)
            behind = cute.arch.vote_ballot_sync(last * sizes.n_tiles <= inside)
            owner = cutlass.min(cute.arch.popc(behind), hw.WARP_THREADS - 1)
            own_last = cute.arch.shuffle_sync(last, owner)
            own_blocks = cute.arch.shuffle_sync(blocks, owner)
            own_first = cute.arch.shuffle_sync(first, owner)
            own_rows = cute.arch.shuffle_sync(rows, owner)
            local = inside - (own_last - own_blocks) * sizes.n_tiles
            count = cutlass.max(own_blocks, 1)
            block = local % count
            tile = Tile(
                going,
                chunk * hw.WARP_THREADS + owner,
                own_first + block * TILE_M,
                cutlass.min(own_rows - block * TILE_M, TILE_M),
                before + own_last - own_blocks + block,
                local // count,
            )
            pipes.tile_load.wait_free(state)
            pipes.tile_mma.wait_free(state)
            pipes.tile_epilogue.wait_free(state)
            if lane == 0:
                tell(scope, state.index, tile)
            pipes.tile_load.signal(state.index)
            pipes.tile_mma.signal(state.index)
            pipes.tile_epilogue.signal(state.index)
            state.advance()
            number += step

    @cute.jit
    def expert_rows(self, scope: Scope, expert: Int32) -> tuple:
        """(its first row, how many), none behind the last expert."""
        first, rows = Int32(0), Int32(0)
        if expert < scope.sizes.experts:
            first = scope.tensors.offsets[expert]
            rows = scope.tensors.offsets[expert + 1] - first
        return first, rows


@cute.jit
def tell(scope: Scope, stage: Int32, tile: Tile) -> None:
    """Write a slot of the tile queue."""
    slot = scope.buffers.tiles
    slot[stage, 0] = tile.valid
    slot[stage, 1] = tile.expert
    slot[stage, 2] = tile.first
    slot[stage, 3] = tile.rows
    slot[stage, 4] = tile.block
    slot[stage, 5] = tile.n


@cute.jit
def told(scope: Scope, stage: Int32) -> Tile:
    """Read it."""
    slot = scope.buffers.tiles
    return Tile(*(slot[stage, word] for word in range(6)))
