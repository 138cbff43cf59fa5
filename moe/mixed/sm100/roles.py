"""Roles of Blackwell's mixed product, in data-flow order, and their on-chip memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.pipeline import PipelineState
from cutlass.utils import blackwell_helpers as sm100

from kernelkit.device import tmem
from kernelkit.device.boxes import swizzled
from kernelkit.device.pipelines import Ring, consumer_state, cta_group, producer_state
from kernelkit.device.tmem import fragment_at, load_sums, store_a
from kernelkit.device.umma import accumulator, issue, shared
from kernelkit.device.warp_mma import CHUNK_BYTES, copy_chunk
from kernelkit.plan import hw
from moe.mixed.config import HALVES, unit_columns
from moe.mixed.fragments import DEPTH, WORDS
from moe.mixed.plan import CHUNK, TILE_STAGES
from moe.mixed.shared import dequantise, load
from moe.mixed.shared.args import X_TYPES, Scope
from moe.mixed.shared.load import NO_ROW, Loader
from moe.mixed.shared.output import meet, own_rows, put, take
from moe.mixed.sm100.plan import MixedPlan
from moe.sm100.args import Tile
from moe.sm100.roles.scheduler import take_tile


@dataclass(frozen=True)
class Buffers:
    """On-chip memory of the CTA."""

    tiles: cute.Tensor  # int32 [stage, word]
    x: cute.Pointer
    w: cute.Pointer
    out: cute.Pointer
    tmem: cute.Pointer


@dataclass(frozen=True)
class Pipes:
    """The edges of the plan as barriers."""

    tile_load: Ring
    tile_math: Ring
    tile_mma: Ring
    tile_epilogue: Ring
    w: Ring
    x: Ring
    a: Ring
    acc: Ring
    tile_gather: Ring | None = None


# ---- Load: one warp fetches x and weights, a stage of K of each at a time


class Load(Loader):
    """Producer of both rings. The tensor core releases stages of x, the math role those of weights,
    once they are bf16."""

    @cute.jit
    def fetch(
        self, scope: Scope, tile: Tile, step: Int32, state: PipelineState, size: Int32
    ) -> None:
        """Fill a stage of each ring; of x only if it is not gathered."""
        pipes = scope.pipes
        pipes.w.acquire(state)
        barrier = pipes.w.barrier(state.index)
        self.fetch_weights(scope, tile, step, state.index, barrier)
        if cutlass.const_expr(not self.plan.config.gather):
            pipes.x.acquire_bytes(state, size)
            barrier = pipes.x.barrier(state.index)
            self.fetch_rows(scope, tile, step, state.index, barrier)


# ---- Gather: as on Hopper, but row indices stay in registers
#
# The tensor core needs half as long for a stage: loading the token of each row from shared memory
# would take longer than the products.


class Gather(load.Gather):
    """Fills the ring of x."""

    @cute.jit
    def find_rows(self, scope: Scope, tile: Tile) -> cute.Tensor:
        """Read the tokens of the thread's rows, Int32 in registers; NO_ROW if there is no row."""
        turns = -(-self.own // self.at_once)
        tokens = cute.make_rmem_tensor(turns, Int32)
        for turn in cutlass.range_constexpr(turns):
            inside = turn * self.at_once + cute.arch.lane_idx() // self.lanes
            row, token = self.warp() * self.own + inside, Int32(NO_ROW)
            if (inside < self.own) & (row < tile.rows):
                token = scope.tensors.rows[tile.first + row] // scope.sizes.slots
            tokens[turn] = token
        return tokens

    @cute.jit
    def fetch(self, scope: Scope, tokens: cute.Tensor, step: Int32, stage: Int32) -> None:
        """Start to copy this warp's rows of a stage."""
        plan, x, lane = self.plan, scope.x, cute.arch.lane_idx()
        own_row, chunk = lane // self.lanes, lane % self.lanes
        size, width = plan.config.x_bits // 8, cute.size(x, mode=[1])
        first = scope.buffers.x.toint() + stage * (plan.units * plan.x_bytes)
        start = step * plan.units * DEPTH + chunk * (CHUNK_BYTES // size)
        for turn in cutlass.range_constexpr(cute.size(tokens)):
            inside, token = turn * self.at_once + own_row, tokens[turn]
            row = self.warp() * self.own + inside
            source = x[cutlass.max(token, 0), None].iterator.toint()
            place = first + swizzled(row * plan.line + chunk * CHUNK_BYTES, plan.line)
            if Boolean(inside < self.own):
                for unit in cutlass.range_constexpr(plan.units):
                    column = start + unit * DEPTH
                    valid = (token >= 0) & (column < width)
                    column = column if valid else Int32(0)
                    target = place + unit * plan.x_bytes
                    copy_chunk(target, source + Int64(column) * size, valid)


# ---- Math: warpgroups convert weights to bf16 in registers, and store them in tensor memory
#
# They only wait for weights and for free stages: the tensor core follows a few stages later.


class Math:
    """Fills the stages of weights in tensor memory."""

    def __init__(self, plan: MixedPlan) -> None:
        self.plan = plan
        self.role = plan.roles["math"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        plan, pipes, units = self.plan, scope.pipes, scope.sizes.units
        team = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // hw.WARPGROUP_WARPS
        own_turn, team = team // plan.config.teams, team % plan.config.teams
        turn = Int32(0)
        tiles, state = consumer_state(TILE_STAGES), consumer_state(plan.stages)
        room = producer_state(plan.a_stages)
        steps = (units + plan.units - 1) // plan.units
        going = Int32(1)
        while going > 0:
            tile = take_tile(scope, pipes.tile_math, tiles)
            tiles.advance()
            going = tile.valid
            if going > 0:
                for step in cutlass.range(steps, unroll=1):
                    if turn == own_turn:
                        pipes.w.wait(state)
                        words = self.make_words(scope, team, state.index, 0)
                        pipes.a.wait_free(room)
                        tmem.order_after_wait()
                        self.store(scope, team, room.index, 0, words)
                        for unit in cutlass.range_constexpr(1, plan.units):
                            if step * plan.units + unit < units:
                                words = self.make_words(scope, team, state.index, unit)
                                self.store(scope, team, room.index, unit, words)
                        pipes.w.release(state.index)
                        tmem.wait_stores()
                        tmem.order_before_signal()
                        pipes.a.signal(room.index)
                    turn = (turn + 1) % plan.turns
                    state.advance()
                    room.advance()

    @cute.jit
    def make_words(
        self, scope: Scope, team: Int32, stage: Int32, unit: cutlass.Constexpr[int]
    ) -> list[cute.Tensor]:
        """Convert a unit of K of the warpgroup's rows for tensor memory: one fragment for each 64
        rows."""
        result = []
        for place in dequantise.places(self.plan, scope, team, stage, unit):
            words = cute.make_rmem_tensor(4 * WORDS, Uint32)
            dequantise.make_words(self.plan.config, *place, words)
            result.append(words)
        return result

    @cute.jit
    def store(
        self,
        scope: Scope,
        team: Int32,
        stage: Int32,
        unit: cutlass.Constexpr[int],
        words: list[cute.Tensor],
    ) -> None:
        """Start to store a unit of K of the warpgroup's rows to a stage of tensor memory."""
        plan = self.plan
        for part in cutlass.range_constexpr(plan.config.parts):
            tall = team * plan.config.parts + part
            column = a_column(plan, stage, unit, tall // HALVES)
            store_a(words[part], fragment_at(scope.buffers.tmem, column, tall % HALVES))


def a_column(plan: MixedPlan, stage: Int32, unit: int, block: Int32) -> Int32:
    """Return the tensor-memory column of a unit of K of 128 rows of weights in a stage."""
    inside = (unit * plan.blocks + block) * unit_columns(plan.config)
    return plan.tmem["a"].begin + stage * plan.a_columns + inside


# ---- MMA: one warp issues the products of weights in tensor memory and rows of x
#
# Products are as wide as the tile, or half as wide if the expert has no more rows in it, and so on.
# Rows of x that are not multiplied are not fetched.

K = OperandMajorMode.K


class Mma:
    """Owns the tensor core."""

    def __init__(self, plan: MixedPlan) -> None:
        self.plan = plan
        self.role = plan.roles["mma"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        plan, pipes = self.plan, scope.pipes
        tiles, state = consumer_state(TILE_STAGES), consumer_state(plan.stages)
        weights, acc = consumer_state(plan.a_stages), producer_state(plan.acc_stages)
        steps = (scope.sizes.units + plan.units - 1) // plan.units
        going = Int32(1)
        while going > 0:
            tile = take_tile(scope, pipes.tile_mma, tiles)
            tiles.advance()
            going = tile.valid
            if going > 0:
                pipes.acc.wait_free(acc)
                for step in cutlass.range(steps, unroll=1):
                    pipes.x.wait(state)
                    pipes.a.wait(weights)
                    tmem.order_after_wait()
                    column = acc.index * plan.sum_columns
                    self.fitting(scope, tile.rows, 0, column, step, (state.index, weights.index))
                    pipes.x.release(state.index)
                    pipes.a.release(weights.index)
                    state.advance()
                    weights.advance()
                pipes.acc.signal(acc.index)
                acc.advance()

    @cute.jit
    def fitting(
        self,
        scope: Scope,
        rows: Int32,
        number: cutlass.Constexpr[int],
        column: Int32,
        step: Int32,
        stages: tuple[Int32, Int32],
    ) -> None:
        """Call `add` with the smallest width of the plan, from `number` on, that holds all rows."""
        widths = self.plan.widths
        if cutlass.const_expr(number + 1 == len(widths)):
            self.add(scope, widths[number], column, step, stages)
        elif rows > widths[number + 1]:
            self.add(scope, widths[number], column, step, stages)
        else:
            self.fitting(scope, rows, number + 1, column, step, stages)

    @cute.jit
    def add(
        self,
        scope: Scope,
        width: cutlass.Constexpr[int],
        column: Int32,
        step: Int32,
        stages: tuple[Int32, Int32],
    ) -> None:
        """Compute D (+)= A B over a stage of K. `stages`: stage of x, stage of the weights."""
        plan = self.plan
        for unit in cutlass.range_constexpr(plan.units):
            if cutlass.const_expr(unit == 0):
                self.add_unit(scope, width, column, unit, step > 0, stages)
            elif step * plan.units + unit < scope.sizes.units:
                self.add_unit(scope, width, column, unit, Boolean(True), stages)

    @cute.jit
    def add_unit(
        self,
        scope: Scope,
        width: cutlass.Constexpr[int],
        column: Int32,
        unit: cutlass.Constexpr[int],
        accumulate: Boolean,
        stages: tuple[Int32, Int32],
    ) -> None:
        """Compute D (+)= A B over a unit of K."""
        plan, buffers = self.plan, scope.buffers
        x = buffers.x + (stages[0] * plan.units + unit) * (plan.config.tile_rows * DEPTH)
        for block in cutlass.range_constexpr(plan.blocks):
            mma, tile = make_mma(plan, width), (hw.TMEM_LANES, width, DEPTH)
            # -> (MMA, MMA_M, MMA_N)
            d = accumulator(mma, tile, buffers.tmem, column + block * plan.config.tile_rows)
            # -> (MMA, MMA_M, MMA_K)
            a = weights_at(mma, tile, buffers.tmem, a_column(plan, stages[1], unit, block))
            layout = sm100.make_smem_layout_b(mma, tile, x.value_type, 1)
            # -> (MMA, MMA_N, MMA_K)
            b = mma.make_fragment_B(shared(x, layout))[None, None, None, 0]
            issue(mma, d, a, b, accumulate)


def weights_at(
    mma: cute.TiledMma, tile: tuple[int, int, int], base: cute.Pointer, column: Int32
) -> cute.Tensor:
    """128 rows of weights by a unit of K as the A operand, (MMA, 1, MMAs of the unit)."""
    element = mma.op.a_dtype
    layout = sm100.make_smem_layout_a(mma, tile, element, 1)
    one = mma.make_fragment_A(cute.make_tensor(base, layout.outer))[None, None, None, 0]
    return cute.make_tensor(cute.recast_ptr(base + column, dtype=element), one.layout)


def make_mma(plan: MixedPlan, width: int) -> cute.TiledMma:
    """Build the MMA. It is rebuilt at each use: passed through a loop it stops being a constant."""
    element, source = X_TYPES[plan.config.x], tcgen05.OperandSource.TMEM
    shape = hw.TMEM_LANES, width
    return sm100.make_trivial_tiled_mma(
        element, element, K, K, Float32, cta_group(plan.edges), shape, source
    )


# ---- Epilogue: a warpgroup computes rows of the output from sums in tensor memory, some at a time

TEAM = 0  # the only storing warpgroup


class Epilogue:
    """Empties the accumulators."""

    def __init__(self, plan: MixedPlan) -> None:
        self.plan = plan
        self.role = plan.roles["epilogue"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        pipes, plan = scope.pipes, self.plan
        tiles, acc = consumer_state(TILE_STAGES), consumer_state(plan.acc_stages)
        going = Int32(1)
        while going > 0:
            tile = take_tile(scope, pipes.tile_epilogue, tiles)
            tiles.advance()
            going = tile.valid
            if going > 0:
                pipes.acc.wait(acc)
                tmem.order_after_wait()
                self.store(scope, tile, acc.index)
                acc.advance()

    @cute.jit
    def store(self, scope: Scope, tile: Tile, stage: Int32) -> None:
        """Store a tile to global memory. The accumulators are released once their last rows have
        been read."""
        plan, config = self.plan, self.plan.config
        rows = min(CHUNK, config.tile_rows)
        chunks = config.tile_rows // rows
        own = own_rows(plan, scope, tile, TEAM)
        meet(TEAM)  # the previous tile's rows have been read
        for chunk in cutlass.range_constexpr(chunks):
            if chunk * rows < tile.rows:
                buffer = scope.buffers.out.toint() + chunk % 2 * plan.out_bytes
                for part in cutlass.range_constexpr(plan.parts):  # registers: one at a time
                    first = stage * plan.sum_columns + chunk * rows
                    sums = self.read(scope, first, part, rows)
                    if cutlass.const_expr(part + 1 == plan.parts):
                        if cutlass.const_expr(chunk + 1 == chunks):
                            self.release(scope, stage)
                        elif (chunk + 1) * rows >= tile.rows:
                            self.release(scope, stage)
                    put(plan, scope, TEAM, chunk, buffer, [sums], own, part)
                meet(TEAM)
                take(plan, scope, tile, TEAM, chunk, buffer)

    @cute.jit
    def release(self, scope: Scope, stage: Int32) -> None:
        """Release the accumulators of the tile."""
        tmem.order_before_signal()
        scope.pipes.acc.release(stage)

    @cute.jit
    def read(
        self,
        scope: Scope,
        first: Int32,
        part: cutlass.Constexpr[int],
        rows: cutlass.Constexpr[int],
    ) -> cute.Tensor:
        """Load a fragment of 64 rows of weights and `rows` rows of x. Column `first` of the first
        accumulator is the first row of x."""
        block, half = part // HALVES, part % HALVES
        column = first + block * self.plan.config.tile_rows
        return load_sums(fragment_at(scope.buffers.tmem, column, half), rows)
