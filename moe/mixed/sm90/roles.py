"""Roles of Hopper's mixed product, in data-flow order, and their on-chip memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.pipeline import PipelineState
from cutlass.utils import hopper_helpers as sm90

from kernelkit.device.pipelines import Ring, consumer_state
from kernelkit.device.shared_words import store as store_words
from kernelkit.device.umma import shared
from kernelkit.plan import hw
from moe.mixed.config import ROWS
from moe.mixed.fragments import DEPTH, THREADS
from moe.mixed.plan import CHUNK, PAIR, TILE_STAGES
from moe.mixed.shared import dequantise
from moe.mixed.shared.args import X_TYPES, Scope
from moe.mixed.shared.load import Loader
from moe.mixed.shared.output import OwnRows, meet, own_rows, put, take
from moe.mixed.sm90.exchange import exchange, finishes, leave
from moe.mixed.sm90.plan import MixedPlan
from moe.sm100.args import Tile
from moe.sm100.roles.scheduler import take_tile


@dataclass(frozen=True)
class Buffers:
    """On-chip memory of the CTA."""

    tiles: cute.Tensor  # int32 [stage, word]
    x: cute.Pointer
    w: cute.Pointer
    out: cute.Pointer
    table: cute.Tensor | None = None  # int32, tokens of the rows of a tile
    scales: cute.Pointer | None = None  # fp32, of those rows, of each warpgroup
    mail: cute.Pointer | None = None  # fp32, sums of other CTAs, see `exchange`
    mail_barriers: cute.Pointer | None = None  # two of each warpgroup


@dataclass(frozen=True)
class Pipes:
    """The edges of the plan as barriers."""

    tile_load: Ring
    tile_math: Ring
    ab: Ring
    tile_gather: Ring | None = None
    x: Ring | None = None


# ---- Load: one warp fetches x and weights, a stage of K of both at a time


class Load(Loader):
    """Fills the ring."""

    @property
    def others(self) -> int:
        """Bytes of weights of a stage, which use the same barrier."""
        return self.plan.w_bytes

    @cute.jit
    def fetch(
        self, scope: Scope, tile: Tile, step: Int32, state: PipelineState, size: Int32
    ) -> None:
        """Fill a stage with x and weights."""
        ring = scope.pipes.ab
        ring.acquire_bytes(state, size)
        barrier = ring.barrier(state.index)
        self.fetch_weights(scope, tile, step, state.index, barrier)
        self.fetch_rows(scope, tile, step, state.index, barrier)


# ---- Outputs of a warpgroup: load scales of rows, store sums


@cute.jit
def store(
    plan: cutlass.Constexpr[MixedPlan],
    scope: Scope,
    tile: Tile,
    team: Int32,
    sums: list[cute.Tensor],
    own: OwnRows | None,
) -> None:
    """Store a warpgroup's columns of a tile to global memory. own: None if it is not yet loaded."""
    config = plan.config
    rows = min(CHUNK, config.tile_rows)
    if cutlass.const_expr(own is None):
        own = own_rows(plan, scope, tile, team)
    meet(team)  # the previous tile's rows are read, this one's scales loaded
    for chunk in cutlass.range_constexpr(config.tile_rows // rows):
        if chunk * rows < tile.rows:
            buffer = scope.buffers.out.toint() + (team * 2 + chunk % 2) * plan.out_bytes
            kept = cute.make_layout(4 * (rows // 8))
            mine = [
                cute.make_tensor(each.iterator + chunk * cute.size(kept), kept) for each in sums
            ]
            put(plan, scope, team, chunk, buffer, mine, own)
            meet(team)
            take(plan, scope, tile, team, chunk, buffer)


@cute.jit
def fetch_scales(plan: cutlass.Constexpr[MixedPlan], scope: Scope, tile: Tile, team: Int32) -> None:
    """Load the scales of a tile's rows to shared memory, if each row has one. They are 0 past the
    last row, which shares registers with an earlier one. The warpgroup has read the previous tile's
    scales: it has synchronised since."""
    if cutlass.const_expr(plan.config.row_scale):
        tensors = scope.tensors
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % THREADS
        for first in cutlass.range_constexpr(0, plan.config.tile_rows, THREADS):
            place = first + thread
            if place < plan.config.tile_rows:
                scale = Float32(0.0)
                if place < tile.rows:
                    row = tile.first + place
                    if cutlass.const_expr(plan.config.gather):
                        row = tensors.rows[row] // scope.sizes.slots
                    scale = tensors.x_scale[row]
                scales = team * plan.config.tile_rows + place
                store_words(scope.buffers.scales.toint() + 4 * scales, Float32, (scale,))
        cute.arch.sync_warp()  # one lane of the warp frees stages of the ring from here on


# ---- Math: each warpgroup converts its rows of the weights and multiplies them by x
#
# While the tensor core works on one unit of K, whose weights it reads in registers, the next unit
# is converted in others. Products are half as wide if the expert has no more rows in the tile, as
# far as registers allow. Warpgroups wait only for the ring, so that one may store its outputs while
# others multiply.

K = OperandMajorMode.K
ATOMS = {  # by the bytes of a line
    128: warpgroup.SmemLayoutAtomKind.K_SW128,
    64: warpgroup.SmemLayoutAtomKind.K_SW64,
}


def make_mma(plan: MixedPlan, width: int) -> cute.TiledMma:
    """64 rows of weights from registers, `width` rows of x K-major from shared memory."""
    element, source = X_TYPES[plan.config.x], warpgroup.OperandSource.RMEM
    return sm90.make_trivial_tiled_mma(
        element, element, K, K, Float32, (1, 1, 1), (ROWS, width), source
    )


def x_operand(plan: MixedPlan, width: int, pointer: cute.Pointer) -> cute.Tensor:
    """The first rows of the ring of x as the B operand, (MMA, 1, MMAs of a unit, unit)."""
    atom = warpgroup.make_smem_layout_atom(ATOMS[plan.line], X_TYPES[plan.config.x])
    shape = (plan.config.tile_rows, DEPTH, plan.units * plan.stages)
    ring = shared(pointer, cute.tile_to_shape(atom, shape, (0, 1, 2)))
    if width != plan.config.tile_rows:
        ring = cute.local_tile(ring, (width, DEPTH), (0, 0, None))
    mma = make_mma(plan, width)
    return mma.make_fragment_B(mma.get_slice(0).partition_B(ring))


class Math:
    """Computes D = W x^T, and the output."""

    def __init__(self, plan: MixedPlan) -> None:
        self.plan = plan
        self.role = plan.roles["math"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        plan, pipes = self.plan, scope.pipes
        team = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // hw.WARPGROUP_WARPS
        tiles, state = consumer_state(TILE_STAGES), consumer_state(plan.stages)
        parts = plan.config.parts
        shape = make_mma(plan, plan.config.tile_rows).partition_shape_C(
            (ROWS, plan.config.tile_rows)
        )
        sums = [cute.make_rmem_tensor(shape, Float32) for _ in range(parts)]
        going, turn = Int32(1), Int32(0)
        while going > 0:
            tile = take_tile(scope, pipes.tile_math, tiles)
            tiles.advance()
            going = tile.valid
            if going > 0:
                fetch_scales(plan, scope, tile, team)
                own = None
                if cutlass.const_expr(plan.is_early):
                    own = own_rows(plan, scope, tile, team)
                for part in cutlass.range_constexpr(parts):
                    sums[part].fill(0.0)
                state = self.fitting(scope, team, tile.rows, 0, sums, state)
                if cutlass.const_expr(plan.config.split == 1):
                    store(plan, scope, tile, team, sums, own)
                else:
                    exchange(plan, scope, team, tile.rows, turn, sums)
                    turn += 1
                    if finishes(plan, scope, team):
                        store(plan, scope, tile, team, sums, own)
        if cutlass.const_expr(plan.config.split > 1):
            leave(plan, scope, team, turn)

    @cute.jit
    def fitting(
        self,
        scope: Scope,
        team: Int32,
        rows: Int32,
        number: cutlass.Constexpr[int],
        sums: list[cute.Tensor],
        state: PipelineState,
    ) -> PipelineState:
        """Call `multiply` with the smallest of the plan's widths, from `number` on, that holds all
        rows."""
        widths = self.plan.widths
        if cutlass.const_expr(number + 1 == len(widths)):
            return self.multiply(scope, team, widths[number], sums, state)
        if rows > widths[number + 1]:
            state = self.multiply(scope, team, widths[number], sums, state)
        else:
            state = self.fitting(scope, team, rows, number + 1, sums, state)
        return state

    @cute.jit
    def multiply(
        self,
        scope: Scope,
        team: Int32,
        width: cutlass.Constexpr[int],
        sums: list[cute.Tensor],
        state: PipelineState,
    ) -> PipelineState:
        """Multiply all of the CTA's K; return the state after it."""
        plan, units = self.plan, scope.share.units
        mma = make_mma(plan, width)
        kept = cute.make_layout(mma.partition_shape_C((ROWS, width)))
        sums = [cute.make_tensor(each.iterator, kept) for each in sums]
        shape = mma.partition_shape_A((ROWS, DEPTH))
        weights = [
            [cute.make_rmem_tensor(shape, X_TYPES[plan.config.x]) for _ in range(plan.config.parts)]
            for _ in range(PAIR)
        ]
        x = x_operand(plan, width, scope.buffers.x)
        held = [state.index, state.index]  # stages of the two previous units
        for step in cutlass.range(units // PAIR, unroll=1):
            # Wait for both units first: a wait between a product in flight and the registers of the
            # next one's weights is a branch, and ptxas would serialise the products (C7513).
            stages = []
            for unit in cutlass.range_constexpr(PAIR):
                if cutlass.const_expr(unit % plan.units == 0):
                    self.wait(scope, state)
                    stages.append(state.index)
                    state.advance()
            for unit in cutlass.range_constexpr(PAIR):
                stage, inside = stages[unit // plan.units], unit % plan.units
                warpgroup.wait_group(PAIR - 1)
                if cutlass.const_expr(inside == plan.units - 1):
                    self.release(scope, held[unit], step > 0)
                    held[unit] = stage
                self.make_weights(scope, team, stage, inside, weights[unit])
                place = stage * plan.units + inside
                self.issue(width, sums, weights[unit], x[None, None, None, place])
        warpgroup.wait_group(0)
        for unit in cutlass.range_constexpr(plan.units - 1, PAIR):
            self.release(scope, held[unit], units >= PAIR)
        if units % PAIR > 0:
            self.wait(scope, state)
            self.make_weights(scope, team, state.index, 0, weights[0])
            place = state.index * plan.units
            self.issue(width, sums, weights[0], x[None, None, None, place])
            warpgroup.wait_group(0)
            self.release(scope, state.index, Boolean(True))
            state.advance()
        return state

    @cute.jit
    def wait(self, scope: Scope, state: PipelineState) -> None:
        """Wait until the stage of `state` is full."""
        scope.pipes.ab.wait(state)
        if cutlass.const_expr(self.plan.config.gather):
            scope.pipes.x.wait(state)

    @cute.jit
    def release(self, scope: Scope, stage: Int32, condition: Boolean) -> None:
        """Release a stage by this warp, if the condition holds."""
        scope.pipes.ab.release_where(stage, condition)
        if cutlass.const_expr(self.plan.config.gather):
            scope.pipes.x.release_where(stage, condition)

    @cute.jit
    def issue(
        self,
        width: cutlass.Constexpr[int],
        sums: list[cute.Tensor],
        weights: list[cute.Tensor],
        x: cute.Tensor,
    ) -> None:
        """Issue the products of a unit of K as one group. x: (MMA, 1, MMAs of a unit)."""
        warpgroup.fence()
        for block in cutlass.range_constexpr(DEPTH // self.plan.config.step):
            for part in cutlass.range_constexpr(self.plan.config.parts):
                mma = make_mma(self.plan, width)
                mma.set(warpgroup.Field.ACCUMULATE, True)
                a, b = weights[part][None, None, block], x[None, None, block]
                cute.gemm(mma, sums[part], a, b, sums[part])
        warpgroup.commit_group()

    @cute.jit
    def make_weights(
        self,
        scope: Scope,
        team: Int32,
        stage: Int32,
        unit: cutlass.Constexpr,
        weights: list[cute.Tensor],
    ) -> None:
        """Convert a unit of the warpgroup's rows for the product."""
        for part, place in enumerate(dequantise.places(self.plan, scope, team, stage, unit)):
            words = cute.recast_tensor(weights[part], Uint32)
            if cutlass.const_expr(self.plan.config.x == "e4m3"):
                dequantise.make_words_fp8(*place, words)
            else:
                dequantise.make_words(self.plan.config, *place, words)
