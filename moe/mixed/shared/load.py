"""Loads to shared memory: x by TMA or gathered row by row, weights as they are stored."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.pipeline import PipelineState

from kernelkit.device.boxes import Box, BoxPosition, copy_in, swizzled
from kernelkit.device.pipelines import consumer_state, producer_state
from kernelkit.device.warp_mma import CHUNK_BYTES, copy_chunk
from kernelkit.plan import hw
from moe.mixed.fragments import DEPTH
from moe.mixed.plan import TILE_STAGES, ProductPlan
from moe.mixed.shared.args import X_TYPES, Scope
from moe.sm100.args import Tile
from moe.sm100.roles.scheduler import take_tile


def x_box(plan: ProductPlan) -> Box:
    """Return the TMA box of x: one unit of K of the smallest number of rows that is multiplied."""
    return Box(plan.widths[-1], DEPTH, X_TYPES[plan.config.x])


class Loader:
    """Producer of the rings. Rows past the last one, and K past its end, arrive as zeros of x; they
    are multiplied by the preceding weights."""

    def __init__(self, plan: ProductPlan) -> None:
        self.plan = plan
        self.role = plan.roles["load"]

    @property
    def others(self) -> int:
        """Further bytes that the barrier of x counts."""
        return 0

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        plan = self.plan
        tiles, state = consumer_state(TILE_STAGES), producer_state(plan.stages)
        steps = (scope.share.units + plan.units - 1) // plan.units
        going = Int32(1)
        while going > 0:
            tile = take_tile(scope, scope.pipes.tile_load, tiles)
            tiles.advance()
            going = tile.valid
            if going > 0:
                size = self.stage_bytes(tile.rows)
                for step in cutlass.range(steps, unroll=1):
                    self.fetch(scope, tile, step, state, size)
                    state.advance()

    def fetch(
        self, scope: Scope, tile: Tile, step: Int32, state: PipelineState, size: Int32
    ) -> None:
        """Fill a stage. size: bytes that the barrier of x counts."""
        raise NotImplementedError

    @cute.jit
    def stage_bytes(self, rows: Int32) -> Int32:
        """Return the bytes that the barrier of x counts for a stage of a tile with `rows` rows."""
        plan = self.plan
        size = Int32(self.others)
        for number in cutlass.range_constexpr(self.boxes):
            if self.is_needed(number, rows):
                size += plan.units * plan.widths[-1] * plan.line
        return size

    @property
    def boxes(self) -> int:
        """Number of boxes of a tile's rows that TMA fetches."""
        return 0 if self.plan.config.gather else self.plan.config.tile_rows // self.plan.widths[-1]

    def is_needed(self, number: int, rows: Int32) -> Boolean:
        """Return whether box `number` has rows that are multiplied: widths are doubled."""
        behind = self.plan.widths[-1] << number.bit_length() - 1 if number else 0
        return rows > behind

    @cute.jit
    def fetch_weights(
        self, scope: Scope, tile: Tile, step: Int32, stage: Int32, barrier: cute.Pointer
    ) -> None:
        """Fetch the weights of one stage of a tile."""
        plan, sizes, size = self.plan, scope.sizes, self.plan.unit_bytes
        every = scope.tensors.weights[tile.expert, None].iterator.toint()
        first = scope.share.first + step * plan.units
        for part in cutlass.range_constexpr(plan.tall):
            row = cutlass.min(tile.n * plan.tall + part, sizes.tall - 1)
            source = every + Int64(row * sizes.units + first) * size
            place = (stage * plan.tall + part) * plan.units
            target = scope.buffers.w.toint() + place * size
            if first + plan.units <= sizes.units:
                with cute.arch.elect_one():
                    copy_bytes(source, target, Int32(plan.units * size), barrier)
            else:
                for unit in cutlass.range_constexpr(plan.units):
                    own = Int64(cutlass.min(Int32(unit), sizes.units - 1 - first))
                    with cute.arch.elect_one():
                        copy_bytes(source + own * size, target + unit * size, Int32(size), barrier)

    @cute.jit
    def fetch_rows(
        self, scope: Scope, tile: Tile, step: Int32, stage: Int32, barrier: cute.Pointer
    ) -> None:
        """Rows of x of one stage, where they are not gathered."""
        plan, box = self.plan, x_box(self.plan)
        for number in cutlass.range_constexpr(self.boxes):
            if self.is_needed(number, tile.rows):
                for unit in cutlass.range_constexpr(plan.units):
                    row = tile.first + number * box.rows
                    column = scope.share.first + step * plan.units + unit
                    position = BoxPosition(row, column * DEPTH, 0, 0)
                    target = (stage * plan.units + unit) * self.boxes + number
                    copy_in(scope.x, box, position, box.at(scope.buffers.x, target), barrier)


@cute.jit
def copy_bytes(source: Int64, target: Int32, size: Int32, barrier: cute.Pointer) -> None:
    """Start to copy neighbouring bytes of global memory, whole 16 of them, to shared memory. One
    thread calls this."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, size, Int32(barrier.toint())],
    )


# ---- Gather role: some warps fetch the rows of x by token, swizzled as TMA would
#
# A warp has a part of the rows of a tile. Eight or four lanes fetch a row of a unit of K. `ahead`
# stages are in flight: a warp signals the stage that it began that many stages ago.


NO_ROW = -1


class Gather:
    """Producer of the ring of gathered x. Missing rows, and K past its end, are zeros."""

    def __init__(self, plan: ProductPlan) -> None:
        self.plan = plan
        self.role = plan.roles["gather"]
        self.own = -(-plan.config.tile_rows // self.role.warps)  # rows of a warp
        self.lanes = plan.line // CHUNK_BYTES  # lanes that fetch a row
        self.at_once = hw.WARP_THREADS // self.lanes  # rows of a warp at a time

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        pipes, plan = scope.pipes, self.plan
        tiles, state = consumer_state(TILE_STAGES), producer_state(plan.stages)
        steps = (scope.share.units + plan.units - 1) // plan.units
        begun, flying = Int32(0), Int32(0)
        going = Int32(1)
        while going > 0:
            tile = take_tile(scope, pipes.tile_gather, tiles)
            tiles.advance()
            going = tile.valid
            if going > 0:
                sources = self.find_rows(scope, tile)
                for step in cutlass.range(steps, unroll=1):
                    pipes.x.wait_free(state)
                    self.fetch(scope, sources, step, state.index)
                    cute.arch.cp_async_commit_group()
                    begun += 1
                    flying += 1
                    if flying > plan.ahead:
                        self.wait(plan.ahead)
                        self.tell(scope, begun - flying)
                        flying -= 1
                    state.advance()
            # With so few steps, the queue has too few tiles to delay signals to the next tiles.
            if (going == 0) | (steps * TILE_STAGES < plan.ahead):
                self.land(scope, begun, flying)
                flying = Int32(0)

    @cute.jit
    def land(self, scope: Scope, begun: Int32, flying: Int32) -> None:
        """Wait for all stages in flight, and signal them."""
        self.wait(0)
        for behind in cutlass.range_constexpr(self.plan.ahead, 0, -1):
            if flying >= behind:
                self.tell(scope, begun - behind)

    @cute.jit
    def wait(self, flying: cutlass.Constexpr[int]) -> None:
        """Wait until at most `flying` stages are in flight. The others are then visible to the
        tensor core, too."""
        cute.arch.cp_async_wait_group(flying)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def tell(self, scope: Scope, filling: Int32) -> None:
        """Signal that the stage of this filling of the ring is full."""
        scope.pipes.x.signal(filling % self.plan.stages)

    @cute.jit
    def find_rows(self, scope: Scope, tile: Tile) -> None:
        """Write the tokens of this warp's rows to its part of the table."""
        lane, warp, table = cute.arch.lane_idx(), self.warp(), scope.buffers.table
        cute.arch.sync_warp()
        for first in cutlass.range_constexpr(0, self.own, hw.WARP_THREADS):
            place = first + lane
            row = warp * self.own + place
            token = Int32(NO_ROW)
            if row < tile.rows:
                token = scope.tensors.rows[tile.first + row] // scope.sizes.slots
            if place < self.own:
                table[row] = token
        cute.arch.sync_warp()

    @cute.jit
    def fetch(self, scope: Scope, _sources: None, step: Int32, stage: Int32) -> None:
        """Start to copy this warp's rows of a stage, whose tokens are in the table."""
        lane, plan, x = cute.arch.lane_idx(), self.plan, scope.x
        table = scope.buffers.table
        own_row, chunk = lane // self.lanes, lane % self.lanes
        size = plan.config.x_bits // 8
        width = cute.size(x, mode=[1])
        first = scope.buffers.x.toint() + stage * (plan.units * plan.x_bytes)
        column = (scope.share.first + step * plan.units) * DEPTH + chunk * (CHUNK_BYTES // size)
        columns = [column + unit * DEPTH for unit in range(plan.units)]
        for begin in cutlass.range_constexpr(0, self.own, self.at_once):
            row = self.warp() * self.own + begin + own_row
            exists = Boolean(begin + own_row < self.own)
            token = table[row] if exists else Int32(NO_ROW)
            source = x[cutlass.max(token, 0), None].iterator.toint()
            place = first + swizzled(row * plan.line + chunk * CHUNK_BYTES, plan.line)
            if exists:
                for unit in cutlass.range_constexpr(plan.units):
                    valid = (token >= 0) & (columns[unit] < width)
                    column = columns[unit] if valid else Int32(0)
                    target = place + unit * plan.x_bytes
                    copy_chunk(target, source + Int64(column) * size, valid)

    def warp(self) -> Int32:
        """Number of this warp in the role."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) - self.role.first_warp
