"""Math role: products of keys and queries, ReLU, weights, the sum over heads, and the output.

A warp has 16 rows of an accumulator. Element e = c + 2 h + 4 j of a thread is column
8 j + 2 (lane % 4) + c of row lane / 4 + 8 h. A row is a key, so a thread adds up a quarter of the
heads of two keys. The four lanes of a quad then add their sums: lanes 0 and 1 get key h = 0, lanes
2 and 3 key h = 1; of several tokens, odd lanes get the odd ones.

If a tile takes several products, the next one is in flight while a product becomes scores. At the
end of a loop's body none is: ptxas serialises all products if one is in flight there. So the body
has several tiles.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.pipeline import PipelineState
from cutlass.utils import hopper_helpers as sm90

from fmha.sm90.products import issue, panels_of
from kernelkit.device.pipelines import consumer_state, consumer_state_at
from kernelkit.device.umma import shared
from kernelkit.device.words import fused, vector_at
from kernelkit.plan import hw
from mla.indexer.formats import WIDTH
from mla.indexer.scores_config import KEYS
from mla.indexer.scores_device import Run, relu, run_from
from mla.indexer.shared.args import Scope, tiles_of
from mla.indexer.sm90.plan import HALVES, ROLES, TEAMS, M, Plan90

K = OperandMajorMode.K
ROWS = 2  # of an accumulator in a thread
OUT_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Lane:
    """Position of a thread.

    team: its warpgroup.
    key: the key of a product whose scores it stores.
    pair: its number among four lanes.
    """

    team: Int32
    key: Int32
    pair: Int32


@dataclass(frozen=True)
class Group:
    """A thread's part of a group of tokens.

    number: of the group in the CTA.
    weights: fp32, of the thread's columns.
    limits: int32, keys that each of its tokens sees; 0 if the token is not in the run, or if
        another lane stores its scores.
    first: address of the score of key 0 for the first of its tokens.
    """

    number: Int32
    weights: cute.Tensor
    limits: cute.Tensor
    first: Int64


@dataclass(frozen=True)
class Unit:
    """A product of a tile: half of its keys, and a group of tokens.

    number: of the half among those of the warpgroup.
    """

    number: int
    half: Int32
    group: Group


class Math:
    """Device code of the warpgroups that multiply."""

    def __init__(self, plan: Plan90) -> None:
        self.plan = plan
        self.role = ROLES["math"]
        # Tokens whose scores a thread stores.
        self.tokens = max(1, plan.config.group_tokens // 2)

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Run the role."""
        config, lane = self.plan.config, own_lane()
        scope.pipes.q.wait(consumer_state(1))
        begin, filled = Int32(0), Int32(0)
        while begin < config.tokens:
            run = run_from(scope.buffers.spans, begin)
            begin = run.end
            self.score(scope, run, lane, filled)
            filled += count_of(scope, run)

    @cute.jit
    def score(self, scope: Scope, run: Run, lane: Lane, filled: Int32) -> None:
        """Compute the scores of a run. filled: how many stages were filled for the runs before."""
        if cutlass.const_expr(self.plan.config.groups == 1):
            self.sweep_half(scope, run, lane, filled)
        else:
            first, second = self.sees(run, lane.team), self.sees(run, lane.team + TEAMS)
            if first & second:
                self.sweep(scope, run, lane, (lane.team, lane.team + TEAMS), filled)
            elif first | second:
                group = lane.team if first else lane.team + TEAMS
                self.sweep(scope, run, lane, (group,), filled)
            else:
                self.skip(scope, run, filled)

    def sees(self, run: Run, group: Int32) -> Boolean:
        """Return whether the run has tokens of a group."""
        size = self.plan.config.group_tokens
        return (run.begin < (group + 1) * size) & (run.end > group * size)

    @cute.jit
    def skip(self, scope: Scope, run: Run, filled: Int32) -> None:
        """Release the stages of a run of which the warpgroup has no token."""
        pipes = scope.pipes
        state = consumer_state_at(self.plan.stages, filled)
        for _ in cutlass.range(count_of(scope, run), unroll=1):
            pipes.keys.wait(state)
            pipes.keys.release(state.index)
            pipes.scales.wait(state)
            pipes.scales.release(state.index)
            state.advance()

    @cute.jit
    def sweep_half(self, scope: Scope, run: Run, lane: Lane, filled: Int32) -> None:
        """Compute the scores of the warpgroup's half of the CTA's tiles, for the only group."""
        units = [Unit(0, lane.team, self.group_of(scope, run, lane, Int32(0)))]
        products, share = [accumulator(self.plan)], scope.share
        state = consumer_state_at(self.plan.stages, filled)
        for tile in cutlass.range(share.cta, tiles_of(run), share.ctas, unroll=1):
            scope.pipes.keys.wait(state)
            self.issue(scope, units[0], products[0], state.index)
            self.tile(scope, lane, tile, units, products, (state,))
            state.advance()

    @cute.jit
    def sweep(
        self,
        scope: Scope,
        run: Run,
        lane: Lane,
        numbers: tuple[Int32, ...],
        filled: Int32,
    ) -> None:
        """Compute the scores of the CTA's tiles for the tokens of one group, or of two.

        numbers: of the groups.
        """
        plan, share, count = self.plan, scope.share, count_of(scope, run)
        groups = [self.group_of(scope, run, lane, number) for number in numbers]
        units = [Unit(half, Int32(half), group) for half in range(HALVES) for group in groups]
        products = [accumulator(plan) for _ in range(2)]
        at_once, tile = plan.config.at_once, share.cta
        for _ in cutlass.range(count // at_once, unroll=1):
            self.tiles(scope, lane, tile, units, products, filled)
            tile += at_once * share.ctas
            filled += at_once
        if cutlass.const_expr(at_once > 1):
            for _ in cutlass.range(count % at_once, unroll=1):
                self.tiles(scope, lane, tile, units, products, filled, at_once=1)
                tile += share.ctas
                filled += 1

    @cute.jit
    def tiles(
        self,
        scope: Scope,
        lane: Lane,
        tile: Int32,
        units: list[Unit],
        products: list[cute.Tensor],
        filled: Int32,
        *,
        at_once: cutlass.Constexpr[int] = 0,
    ) -> None:
        """Compute the scores of `at_once` tiles, of as many as the config says by default."""
        count = at_once or self.plan.config.at_once
        states = [consumer_state_at(self.plan.stages, filled + index) for index in range(count)]
        scope.pipes.keys.wait(states[0])
        self.issue(scope, units[0], products[0], states[0].index)
        for index in cutlass.range_constexpr(count):
            own = tile + index * scope.share.ctas
            self.tile(scope, lane, own, units, products, tuple(states[index : index + 2]))

    @cute.jit
    def tile(
        self,
        scope: Scope,
        lane: Lane,
        tile: Int32,
        units: list[Unit],
        products: list[cute.Tensor],
        states: tuple[PipelineState, ...],
    ) -> None:
        """Compute the scores of a tile, whose first product has been issued; release its stage.

        states: of its stage, and of the next one if its first product is to be issued, too.
        """
        keys, stage = scope.pipes.keys, states[0].index
        scales = self.key_scales(scope, lane, units, states[0])
        for index in cutlass.range_constexpr(len(units)):
            other = products[(index + 1) % len(products)]
            if cutlass.const_expr(index + 1 < len(units)):
                self.issue(scope, units[index + 1], other, stage)
                warpgroup.wait_group(1)
            elif cutlass.const_expr(len(states) > 1):
                keys.wait(states[1])
                self.issue(scope, units[0], other, states[1].index)
                warpgroup.wait_group(1)
            else:
                warpgroup.wait_group(0)
            if cutlass.const_expr(index + 1 == len(units)):
                keys.release(stage)
            unit = units[index]
            sums = self.sums(products[index % len(products)], unit.group, lane)
            key = tile * KEYS + unit.half * M + lane.key
            self.store(scope, sums, unit.group, key, scales[unit.number])

    @cute.jit
    def issue(self, scope: Scope, unit: Unit, product: cute.Tensor, stage: Int32) -> None:
        """Issue a product of the tile in a stage."""
        plan = self.plan
        k = keys_operand(plan, scope)[None, None, None, stage * HALVES + unit.half]
        q = queries_operand(plan, scope)[None, None, None, unit.group.number]
        issue(make_mma(plan), product, (k,), q, False)

    @cute.jit
    def key_scales(
        self, scope: Scope, lane: Lane, units: list[Unit], state: PipelineState
    ) -> list[Float32]:
        """Return the scales of the thread's key in each half of a tile; release their stage."""
        scope.pipes.scales.wait(state)
        pointer = cute.recast_ptr(scope.buffers.key_scales, dtype=Float32)
        held = cute.make_tensor(pointer, cute.make_layout(self.plan.stages * KEYS))
        halves = {unit.number: unit.half for unit in units}
        scales = [held[state.index * KEYS + half * M + lane.key] for half in halves.values()]
        cute.arch.sync_warp()  # all lanes have read theirs
        scope.pipes.scales.release(state.index)
        return scales

    @cute.jit
    def group_of(self, scope: Scope, run: Run, lane: Lane, number: Int32) -> Group:
        """Return the thread's part of a group, of whose tokens only those of the run count."""
        config, buffers, params = self.plan.config, scope.buffers, scope.params
        weights = cute.make_rmem_tensor(config.n // 4, Float32)
        for pair in cutlass.range_constexpr(config.n // 8):
            column = number * config.n + pair * 8 + lane.pair * 2
            near = (buffers.weights.iterator + column).align(8)
            source = cute.make_tensor(near, cute.make_layout(2))
            cute.autovec_copy(source, cute.local_tile(weights, (2,), (pair,)))
        token, stores = number * config.group_tokens, lane.pair % 2 == 0
        if cutlass.const_expr(config.group_tokens > 1):
            token, stores = token + lane.pair % 2, Boolean(True)
        limits = cute.make_rmem_tensor(self.tokens, Int32)
        for index in cutlass.range_constexpr(self.tokens):
            own = token + 2 * index
            counts = (own >= run.begin) & (own < run.end) & stores
            limits[index] = buffers.spans[own, 1] if counts else Int32(0)
        row = Int64(scope.share.first + token)
        return Group(number, weights, limits, kept(params.out + row * params.out_stride))

    @cute.jit
    def sums(self, product: cute.Tensor, group: Group, lane: Lane) -> cute.Tensor:
        """Return the sums over heads for the thread's key and each of its tokens."""
        config = self.plan.config
        parts = cute.make_rmem_tensor((ROWS, config.group_tokens), Float32)
        parts.fill(0.0)
        for pair in cutlass.range_constexpr(config.n // 8):
            token = pair * 8 // config.heads
            for column in cutlass.range_constexpr(2):
                for row in cutlass.range_constexpr(ROWS):
                    value = relu(product[4 * pair + 2 * row + column])
                    weight = group.weights[2 * pair + column]
                    parts[row, token] = fused(weight, value, parts[row, token])
        return self.sums_of_quad(parts, lane)

    @cute.jit
    def sums_of_quad(self, parts: cute.Tensor, lane: Lane) -> cute.Tensor:
        """Sum over the four lanes of a quad, and distribute the results among them."""
        upper, odd = lane.pair >= 2, lane.pair % 2 == 1
        tokens = self.plan.config.group_tokens
        near = cute.make_rmem_tensor(tokens, Float32)
        for token in cutlass.range_constexpr(tokens):
            own = parts[1, token] if upper else parts[0, token]
            sent = parts[0, token] if upper else parts[1, token]
            near[token] = own + cute.arch.shuffle_sync_bfly(sent, offset=2)
        found = cute.make_rmem_tensor(self.tokens, Float32)
        for index in cutlass.range_constexpr(self.tokens):
            own, sent = near[0], near[0]
            if cutlass.const_expr(tokens > 1):
                first, second = near[2 * index], near[2 * index + 1]
                own, sent = (second, first) if odd else (first, second)
            found[index] = own + cute.arch.shuffle_sync_bfly(sent, offset=1)
        return found

    @cute.jit
    def store(
        self, scope: Scope, sums: cute.Tensor, group: Group, key: Int32, scale: Float32
    ) -> None:
        """Store the scores of a key for the thread's tokens that see it."""
        place = group.first + Int64(key) * OUT_BYTES[self.plan.config.out]
        for index in cutlass.range_constexpr(self.tokens):
            value = sums[index] * scale
            if key < group.limits[index]:
                if cutlass.const_expr(self.plan.config.out == "bf16"):
                    vector_at(place, BFloat16, 1)[0] = value.to(BFloat16)
                else:
                    vector_at(place, Float32, 1)[0] = value
            place += 2 * scope.params.out_stride
        # Without it ptxas moves the arithmetic of this product behind the wait for the next one.
        cute.arch.sync_warp()


@cute.jit
def kept(address: Int64) -> Int64:
    """Return the address; the compiler keeps it in registers and does not compute it anew."""
    return cute.arch.inline_ptx(
        "mov.b64 {$w0}, {$r0};", write_only_types=[Int64], read_only_args=[address]
    )


@cute.jit
def count_of(scope: Scope, run: Run) -> Int32:
    """Return the number of tiles of a run that the CTA has."""
    share = scope.share
    count = (tiles_of(run) - share.cta + share.ctas - 1) // share.ctas
    return cutlass.max(count, Int32(0))


@cute.jit
def own_lane() -> Lane:
    """Return the position of the calling thread."""
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    pair = lane % 4
    key = warp % hw.WARPGROUP_WARPS * 16 + pair // 2 * 8 + lane // 4
    return Lane(warp // hw.WARPGROUP_WARPS, key, pair)


def make_mma(plan: Plan90) -> cute.TiledMma:
    """Build the tiled MMA.

    Each user builds it anew, because it stops being a constant when a loop carries it.
    """
    tile = (M, plan.config.n)
    return sm90.make_trivial_tiled_mma(Float8E4M3FN, Float8E4M3FN, K, K, Float32, (1, 1, 1), tile)


def accumulator(plan: Plan90) -> cute.Tensor:
    """Return a thread's fp32 registers for its part of a product."""
    return cute.make_rmem_tensor(make_mma(plan).partition_shape_C((M, plan.config.n)), Float32)


def keys_operand(plan: Plan90, scope: Scope) -> cute.Tensor:
    """Return halves of tiles in the ring as the A operand, (MMA, 1, 4, half of a stage)."""
    layout = panels_of("e4m3", K, M, WIDTH, WIDTH, plan.stages * HALVES)
    mma = make_mma(plan)
    return mma.make_fragment_A(mma.get_slice(0).partition_A(shared(scope.buffers.keys, layout)))


def queries_operand(plan: Plan90, scope: Scope) -> cute.Tensor:
    """Return the queries as the B operand, (MMA, 1, 4, group)."""
    layout = panels_of("e4m3", K, plan.config.n, WIDTH, WIDTH, plan.config.groups)
    mma = make_mma(plan)
    return mma.make_fragment_B(mma.get_slice(0).partition_B(shared(scope.buffers.q, layout)))
