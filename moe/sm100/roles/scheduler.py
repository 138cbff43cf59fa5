"""Scheduler role: one warp enumerates the tiles of all experts, and publishes them to the other
roles.

Tiles are numbered expert by expert, row tiles first within an expert, so that neighbouring CTAs
read the same weights. Row counts are on the device. So each lane reads those of four experts at a
time, and a scan over the warp finds the expert of a tile number. Experts without rows are skipped
128 at a time. An expert's scale factors of x begin a new block of 128 rows, which needs another
scan, unless tiles have 128 rows. In a pair both CTAs do this.
"""

import dataclasses
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineState

from kernelkit.device.lanes import sum_below
from kernelkit.device.pipelines import Ring, in_leader, producer_state
from kernelkit.plan import hw
from moe.formats import SCALE_ROWS
from moe.sm100.args import Scope, Tile
from moe.sm100.plan import ROLES, TILE_STAGES, GroupedPlan

OF_LANE = 4  # experts of a lane
CHUNK = OF_LANE * hw.WARP_THREADS
TILE_FIELDS = len(dataclasses.fields(Tile))
QUARTER = SCALE_ROWS // 4  # rows whose scale factors fill a column of tensor memory


@dataclass(frozen=True)
class Experts:
    """The experts of a lane."""

    starts: tuple[Int32, ...]  # first rows of x of each, and the end of the last one
    tiles: Int32  # row tiles of all earlier experts of the chunk
    blocks: Int32  # blocks of scale factors of all earlier experts of the chunk


@dataclass(frozen=True)
class Expert:
    """An expert of a chunk."""

    number: Int32  # index in the chunk
    first: Int32  # its first row of x
    rows: Int32
    tiles: Int32  # as in `Experts`
    blocks: Int32  # as in `Experts`


class Scheduler:
    """Fills the tile queue."""

    def __init__(self, plan: GroupedPlan) -> None:
        self.plan = plan
        self.role = ROLES["scheduler"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Run the warp. After the last tile it publishes an invalid one."""
        sizes, ctas = scope.sizes, self.plan.config.ctas
        lane = cute.arch.lane_idx()
        state = producer_state(TILE_STAGES)
        number, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        number, step = number // ctas, step // ctas
        # Tiles and blocks of earlier chunks of experts, and of this chunk.
        chunk, tiles_before, blocks_before = Int32(-1), Int32(0), Int32(0)
        tiles, blocks = Int32(0), Int32(0)
        experts = Experts((Int32(0),) * (OF_LANE + 1), Int32(0), Int32(0))
        going = Int32(1)
        while going > 0:
            while (number >= (tiles_before + tiles) * sizes.n_tiles) & (
                (chunk + 1) * CHUNK < sizes.experts
            ):
                chunk += 1
                tiles_before += tiles
                blocks_before += blocks
                experts, tiles, blocks = self.look(scope, chunk * CHUNK, lane)
            inside = number - tiles_before * sizes.n_tiles
            going = Int32(1) if inside < tiles * sizes.n_tiles else Int32(0)
            # The last lane whose tiles begin at or before this one.
            begun = cute.arch.vote_ballot_sync(experts.tiles * sizes.n_tiles <= inside)
            owner = cutlass.max(cute.arch.popc(begun) - 1, 0)
            nearest = self.nearest(experts, lane, inside, sizes.n_tiles)
            owned = Expert(*(cute.arch.shuffle_sync(each, owner) for each in fields(nearest)))
            tile = self.tile_of(owned, inside, sizes.n_tiles, going, chunk * CHUNK, blocks_before)
            self.publish(scope, state, tile)
            state.advance()
            number += step

    @cute.jit
    def look(self, scope: Scope, first: Int32, lane: Int32) -> tuple[Experts, Int32, Int32]:
        """Return the lane's experts of the chunk that begins with `first`, and all tiles and blocks
        of the chunk. Experts past the last one have no rows."""
        mine, last = first + lane * OF_LANE, scope.sizes.experts
        starts = tuple(
            scope.tensors.offsets[cutlass.min(mine + number, last)] for number in range(OF_LANE + 1)
        )
        counts = [starts[number + 1] - starts[number] for number in range(OF_LANE)]
        tiles, all_tiles = summed([self.tiles_of(count) for count in counts], lane)
        if cutlass.const_expr(self.plan.config.tile_rows == SCALE_ROWS):
            return Experts(starts, tiles, tiles), all_tiles, all_tiles
        blocks, all_blocks = summed([blocks_of(count) for count in counts], lane)
        return Experts(starts, tiles, blocks), all_tiles, all_blocks

    def tiles_of(self, rows: Int32) -> Int32:
        """Row tiles that hold so many rows."""
        return -(-rows // self.plan.config.tile_rows)

    @cute.jit
    def nearest(self, experts: Experts, lane: Int32, inside: Int32, n_tiles: Int32) -> Expert:
        """Return the last of the lane's experts whose tiles begin at or before tile `inside`."""
        starts, tiles, blocks = experts.starts, experts.tiles, experts.blocks
        found = Expert(lane * OF_LANE, starts[0], starts[1] - starts[0], tiles, blocks)
        for number in cutlass.range_constexpr(1, OF_LANE):
            before = starts[number] - starts[number - 1]
            tiles += self.tiles_of(before)
            blocks += blocks_of(before)
            rows = starts[number + 1] - starts[number]
            other = Expert(lane * OF_LANE + number, starts[number], rows, tiles, blocks)
            begun = tiles * n_tiles <= inside
            found = Expert(
                *(
                    new if begun else old
                    for new, old in zip(fields(other), fields(found), strict=True)
                )
            )
        return found

    @cute.jit
    def tile_of(
        self,
        owned: Expert,
        inside: Int32,
        n_tiles: Int32,
        valid: Int32,
        chunk: Int32,
        blocks_before: Int32,
    ) -> Tile:
        """Return a tile of an expert.

        Args:
            owned: the expert.
            inside: number of the tile in the chunk.
            n_tiles: column tiles of the expert's matrix.
            valid: whether there is such a tile.
            chunk: first expert of the chunk.
            blocks_before: blocks of scale factors before the chunk.
        """
        local = inside - owned.tiles * n_tiles
        count = cutlass.max(self.tiles_of(owned.rows), 1)
        row = local % count * self.plan.config.tile_rows
        return Tile(
            valid,
            chunk + owned.number,
            owned.first + row,
            owned.rows - row,
            blocks_before + owned.blocks + row // SCALE_ROWS,
            row % SCALE_ROWS // QUARTER,
            local // count,
        )

    @cute.jit
    def publish(self, scope: Scope, state: PipelineState, tile: Tile) -> None:
        """Publish a tile to the roles of this CTA, once each of them has released the slot."""
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
def summed(counts: list[Int32], lane: Int32) -> tuple[Int32, Int32]:
    """Return the sum of the counts of all lower lanes, and the sum over all lanes."""
    own = counts[0]
    for count in counts[1:]:
        own += count
    lower = sum_below(own, lane)
    return lower, cute.arch.shuffle_sync(lower + own, hw.WARP_THREADS - 1)


@cute.jit
def write_tile(scope: Scope, stage: Int32, tile: Tile) -> None:
    """Write a slot of the tile queue."""
    for word, value in enumerate(fields(tile)):
        scope.buffers.tiles[stage, word] = value


def take_tile(scope: Scope, ring: Ring, tiles: PipelineState) -> Tile:
    """Wait for a tile of the queue, read it, and release its slot. The caller has to advance
    `tiles` in its loop, so that the DSL carries the state."""
    ring.wait(tiles)
    tile = read_tile(scope, tiles.index)
    ring.release(tiles.index)
    return tile


@cute.jit
def read_tile(scope: Scope, stage: Int32) -> Tile:
    """Read a slot of the tile queue."""
    return Tile(*(scope.buffers.tiles[stage, word] for word in range(TILE_FIELDS)))


def rank_in_tile(plan: GroupedPlan) -> Int32:
    """Return the rank of this CTA among those that share a tile."""
    if plan.config.ctas == 1:
        return Int32(0)
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())


def blocks_of(rows: Int32) -> Int32:
    """Blocks of scale factors that so many rows have."""
    return -(-rows // SCALE_ROWS)


def fields(bundle: object) -> list:
    """Return the field values of a frozen dataclass."""
    return list(vars(bundle).values())
