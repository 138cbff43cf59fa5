"""Softmax role: four warps per query tile, a row per thread (in a CTA pair half a row): S -> P.

Per tile: read S, mask it in boundary tiles, publish the rescale factor of O, exponentiate, write P,
signal. The row sum comes after the signal, since the MMA warp does not need it.

P overwrites the tail of its S in TMEM, or lies in shared memory. Register n of a thread is column
half * lane_columns + n of its row, the order in which S is loaded. So the layouts of the two
products need not agree.

With K and V in e4m3, Q in bf16 is split into two terms in place in shared memory, a row a thread.
The softmax warps of a query tile do it at the beginning of a block: they have the registers, and
they need the row's power of two for its scores. In the ping-pong schedule the warps of the other
tile compute meanwhile. Four extra warps would leave softmax warps of two query tiles 152 registers,
too few for 128 scores.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.pipeline import PipelineState

from fmha.mods import parsed
from fmha.shared.args import IO_TYPES, Scalars, Scope, Work
from fmha.shared.fp8 import anew, largest_of, place_of, power_of, score_scale, two_terms
from fmha.shared.mods import change_scores, hide_scores
from fmha.shared.walk import count_rounds, first_key, locate, plan_walk
from fmha.sm100.layout import CHUNK
from fmha.sm100.plan import Plan
from fmha.sm100.roles.rows import (
    Lane,
    Row,
    from_other_half,
    own_row,
    publish,
    store_part,
    told_in_log2,
)
from kernelkit.device import tmem
from kernelkit.device.barriers import meet
from kernelkit.device.boxes import Box
from kernelkit.device.buffers import buffer_at
from kernelkit.device.control import once
from kernelkit.device.online_softmax import (
    ONE_HOT_LOG2,
    RowView,
    bounded_factor,
    bring_near,
    exponentiate,
    keep_branch,
    keep_columns,
    magnitude,
    may_be_far,
    negate,
    next_max,
    refer,
    row_total,
    shift_of,
    softcap_scores,
    top_score,
)
from kernelkit.device.pipelines import consumer_state, producer_state
from kernelkit.device.shared_words import load, store
from kernelkit.plan import hw

WORDS = hw.SMEM_UNIT_BYTES // 4


@cute.jit
def split_row(plan: Plan, of: Row, buffer: cute.Pointer) -> Float32:
    """The thread's row of sQ as two terms, the larger one first, for the tensor core; returns what
    its scores are to be multiplied by. Every thread of the query tile takes part."""
    layout, head_dim, row = plan.layout, plan.config.head_dim, anew(of.row)
    start = buffer.toint() + of.q_tile * layout.q_bytes
    words = cute.make_rmem_tensor(head_dim // 2, Uint32)
    line = layout.panel(layout.k_columns, plan.config.q_item_bytes) * plan.config.q_item_bytes
    for unit in cutlass.range_constexpr(head_dim // 2 // WORDS):
        found = load(start + place_of(line, layout.rows, row, unit), Uint32, WORDS)
        for word in cutlass.range_constexpr(WORDS):
            words[unit * WORDS + word] = found[word]
    if cutlass.const_expr(layout.q_rows < layout.rows):
        if row >= layout.q_rows:  # these rows hold arbitrary data
            words.fill(0)
    factor, power = power_of(largest_of(words))
    meet(plan.barriers, "q_read", of.q_tile)
    line = layout.panel(layout.k_columns)
    for unit in cutlass.range_constexpr(head_dim // hw.SMEM_UNIT_BYTES):
        begin = 2 * unit * WORDS
        low, high = (
            two_terms(tuple(words[first + word] for word in range(WORDS)), factor)
            for first in (begin, begin + WORDS)
        )
        place = start + place_of(line, layout.rows, row, unit)
        store(place, Uint32, (*low[:2], *high[:2]))
        store(place + layout.rows * head_dim, Uint32, (*low[2:], *high[2:]))
    cute.arch.fence_proxy("async.shared", space="cta")
    return power


@cute.jit
def store_p(
    plan: Plan,
    lane: Lane,
    stage: Int32,
    begin: cutlass.Constexpr,
    end: cutlass.Constexpr,
) -> None:
    """Round weights [begin, end) of the lane and store them where the P V of S stage `stage` reads
    them.

    TMEM: complete after tcgen05.wait::st. Shared memory: its only buffer must be free; the stores
    are fenced for the tensor core, which reads through the async proxy.
    """
    io = IO_TYPES[plan.config.keys_dtype]
    for column in cutlass.range_constexpr(begin, end, CHUNK):
        width = min(CHUNK, end - column)
        packed = cute.make_rmem_tensor(width * io.width // Float32.width, Float32)
        rounded = cute.recast_tensor(packed, io)
        rounded.store(tmem.columns_of(lane.scores, column, width).load().to(io))
        if cutlass.const_expr(plan.layout.p_in_smem):
            box = Box(plan.layout.rows, hw.SMEM_LINE_BYTES // plan.config.io_bytes, io)
            lane_columns = plan.layout.lane_columns
            store_part(
                box, lane.buffers.p, lane.row, rounded, column, lane_columns, plan.layout.tile_n
            )
        else:
            store_over_s(plan, lane, packed, stage, column)
    if cutlass.const_expr(plan.layout.p_in_smem):
        cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def store_over_s(
    plan: Plan, lane: Lane, packed: cute.Tensor, stage: Int32, column: cutlass.Constexpr
) -> None:
    """Start the store of weights from `column` on, two or more per TMEM column."""
    first, second = plan.tmem["P0"], plan.tmem["P1"]
    begin = first.begin + stage * (second.begin - first.begin)
    begin += column * plan.config.io_bytes // hw.TMEM_CELL_BYTES
    tile = tmem.tile_at(lane.buffers.tmem, begin, cute.size(packed))
    tmem.store_row(packed, tile, lane.row.lane)


@dataclass(frozen=True)
class Step:
    """State of one key tile of a row. The pipeline states are read only.

    is_first: whether it is the first tile of the block, so that there is no O to rescale.
    key: first key of the tile, None if the row sees all of it.
    first: first key of the tile for functions of positions, None without one.
    """

    s_state: PipelineState
    row_state: PipelineState
    o_state: PipelineState
    is_first: Boolean
    key: Int32 | None
    first: Int32 | None = None


class Softmax:
    """Role that turns S into P."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.role = plan.roles["softmax"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps. Boundary tiles come first, so two copies of the loop do."""
        plan, q_tiles = self.plan, self.plan.layout.q_tiles
        scores = cute.make_rmem_tensor(plan.layout.lane_columns, Float32)
        q_tile = self.own_q_tile()
        s_state = PipelineState(plan.layout.s_stages, Int32(0), q_tile, Int32(0))
        row_state, q_state = producer_state(1), consumer_state(1)
        o_state = producer_state(1)  # if P has one buffer, it is released like O
        for turn in cutlass.range(count_rounds(plan, scope.tensors.order), unroll=1):
            work = locate(plan, scope.tensors, turn)
            walk = plan_walk(plan, work, scope.scalars)
            row = own_row(plan, work, scope, q_tile)
            power = Float32(1.0)
            if cutlass.const_expr(plan.config.q_terms > 1):
                if walk.tiles > 0:
                    scope.pipes.q.wait(q_state, q_tile)
                    power = split_row(plan, row, scope.buffers.q)
                    scope.pipes.terms.signal(q_tile)
                    q_state.advance()
            scalars, negative = self.own_scalars(scope, work, row, power)
            tables = scope.tensors.tables if cutlass.const_expr(plan.config.has_mods) else None
            lane = Lane(row, scores, scalars, scope.buffers, scope.pipes, negative, tables)
            row_max, row_sum, shift = -Float32.inf, Float32(0.0), Float32(0.0)
            for step in cutlass.range(walk.masked, unroll=1):
                key, is_first = first_key(plan, walk, step), step == 0
                if not is_first:
                    row_state.advance()
                first = key if cutlass.const_expr(plan.config.has_mods) else None
                tile = Step(s_state, row_state, o_state, is_first, key, first)
                row_max, row_sum, shift = self.do_tile(lane, row_max, row_sum, shift, tile)
                for _ in cutlass.range_constexpr(q_tiles):
                    s_state.advance()
                o_state.advance()
            for step in cutlass.range(walk.masked, walk.tiles, unroll=1):
                is_first = step == 0
                if not is_first:
                    row_state.advance()
                first = None
                if cutlass.const_expr(plan.config.moves_all):
                    first = first_key(plan, walk, step)
                tile = Step(s_state, row_state, o_state, is_first, None, first)
                row_max, row_sum, shift = self.do_tile(lane, row_max, row_sum, shift, tile)
                for _ in cutlass.range_constexpr(q_tiles):
                    s_state.advance()
                o_state.advance()
            if cutlass.const_expr(plan.layout.halves == 2):
                if walk.tiles > 0:
                    row_sum += from_other_half(plan, lane, row_sum, Int32(2))
            if walk.tiles == 0:
                lane.pipes.row.wait_free(row_state, q_tile)
            if cutlass.const_expr(told_in_log2(plan)):
                row_max = row_max * scalars.scale_log2
            publish(lane, (row_sum, row_max))
            row_state.advance()

    @cute.jit
    def own_scalars(
        self, scope: Scope, work: Work, row: Row, power: Float32
    ) -> tuple[Scalars, Boolean | None]:
        """Return the numbers of the launch with the factor of this row's scores, and whether that
        factor is negative. power: of two, by which the row's terms are smaller than Q."""
        scalars, config = scope.scalars, self.plan.config
        factor = score_scale(scope.tensors.tables, work, row.head)
        negative = None
        if cutlass.const_expr(factor is not None and not config.scales_first):
            negative = factor < 0.0
        if cutlass.const_expr(config.q_terms > 1):
            factor = power if cutlass.const_expr(factor is None) else factor * power
        if cutlass.const_expr(factor is None):
            return scalars, None
        if cutlass.const_expr(config.scales_first):
            return replace(
                scalars, softcap_log2=bounded_factor(scalars.softcap_log2 * factor)
            ), None
        return replace(scalars, scale_log2=magnitude(scalars.scale_log2 * factor)), negative

    @cute.jit
    def clear_rows_left_over(self, smem: cute.Pointer) -> None:
        """Zero the rows of sQ that TMA never fills: tokens of a whole group of heads fill a tile
        up to less than a token. Before the barriers are published."""
        layout, config = self.plan.layout, self.plan.config
        left_over = layout.rows - layout.q_rows
        if cutlass.const_expr(left_over > 0):
            io, line = IO_TYPES[config.dtype], layout.panel(layout.k_columns)
            buffer = buffer_at(self.plan.smem, smem, "sQ", io)
            zeros = cute.make_rmem_tensor(line, io)
            zeros.fill(0.0)
            thread, _, _ = cute.arch.thread_idx()
            lines = layout.q_tiles * config.head_dim // line * left_over
            for number in cutlass.range(thread, lines, self.role.threads, unroll=1):
                row = number // left_over * layout.rows + layout.q_rows + number % left_over
                target = cute.make_tensor(buffer + row * line, cute.make_layout(line))
                cute.autovec_copy(zeros, target)
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def own_q_tile(self) -> Int32:
        """Return the number of the query tile that this warp works for."""
        q_tile = Int32(0)
        if cutlass.const_expr(self.role.teams > 1):
            q_tile = cute.arch.make_warp_uniform(
                cute.arch.thread_idx()[0] // self.role.team_threads
            )
        return q_tile

    @property
    def any_scores(self) -> bool:
        """Whether `refer` may be used: P has the exponents of fp32."""
        return self.plan.config.keys_dtype == "bf16" and not self.plan.config.softcap

    @cute.jit
    def do_tile(
        self, lane: Lane, row_max: Float32, row_sum: Float32, shift: Float32, step: Step
    ) -> tuple[Float32, Float32, Float32]:
        """Process a tile from S to a published P; return the new (row_max, row_sum, shift)."""
        if cutlass.const_expr(self.any_scores):
            return self.weigh_any(lane, row_max, row_sum, shift, step)
        if cutlass.const_expr(lane.negative is None):
            row_max, row_sum = self.weigh(lane, row_max, row_sum, step, False)
        else:
            if cute.arch.vote_any_sync(lane.negative):
                row_max, row_sum = self.weigh(lane, row_max, row_sum, step, True)
            else:
                row_max, row_sum = self.weigh(lane, row_max, row_sum, step, False)
        return row_max, row_sum, shift

    @cute.jit
    def weigh_any(
        self, lane: Lane, row_max: Float32, row_sum: Float32, shift: Float32, step: Step
    ) -> tuple[Float32, Float32, Float32]:
        """Process a tile like `do_tile`, with weights up to the range of fp32."""
        scale_log2 = lane.scalars.scale_log2
        top = self.find_top(lane, row_max, step, False)
        one_hot = cute.arch.rcp_approx(scale_log2) * ONE_HOT_LOG2
        row_max, acc_scale, scale, shift = refer(
            top, row_max, shift, scale_log2, one_hot, self.plan.config.lag_log2
        )
        self.publish_p(lane, acc_scale, scale, shift, step)
        return row_max, row_total(lane.scores, row_sum * acc_scale), shift

    @cute.jit
    def weigh(
        self,
        lane: Lane,
        row_max: Float32,
        row_sum: Float32,
        step: Step,
        negated: cutlass.Constexpr,
    ) -> tuple[Float32, Float32]:
        """Process a tile like `do_tile`, with a P of fewer exponents, or after a softcap.

        negated: whether a row of the warp has a negative factor.
        """
        config, scale_log2 = self.plan.config, lane.scalars.scale_log2
        top = self.find_top(lane, row_max, step, negated)
        may_far = may_be_far(top, scale_log2)  # first: its predicate takes 13 cycles
        row_max, acc_scale = next_max(top, row_max, scale_log2, config.lag_log2)
        if cutlass.const_expr(config.softcap):  # scores are at most 1, and their factor is small
            return row_max, self.weigh_rows(lane, row_max, row_sum, acc_scale, step, False)
        if cutlass.const_expr(negated):
            return row_max, self.weigh_rows(lane, row_max, row_sum, acc_scale, step, True)
        # Two copies of the code: at the end of a branch that changes the scores ptxas would move
        # all of them to other registers.
        if cute.arch.vote_any_sync(may_far):
            row_sum = self.weigh_rows(lane, row_max, row_sum, acc_scale, step, True)
        else:
            row_sum = self.weigh_rows(lane, row_max, row_sum, acc_scale, step, False)
        return row_max, row_sum

    @cute.jit
    def weigh_rows(
        self,
        lane: Lane,
        row_max: Float32,
        row_sum: Float32,
        acc_scale: Float32,
        step: Step,
        far: cutlass.Constexpr,
    ) -> Float32:
        """Compute and publish P for a given maximum; return the new row_sum.

        far: whether a row of the warp may be far.
        """
        scale_log2 = lane.scalars.scale_log2
        if cutlass.const_expr(far):
            bring_near(lane.scores, row_max, scale_log2)
        shift = shift_of(row_max, scale_log2, far) + self.plan.config.bias_log2
        self.publish_p(lane, acc_scale, scale_log2, shift, step)
        total, more = row_sum * acc_scale, Float32(0.0)
        if cutlass.const_expr(self.plan.config.softcap):
            return row_total(lane.scores, total)
        # Always true. Only a branch keeps ptxas from moving the sum before the signals of P in one
        # of the two copies, and only a loop-carried value keeps both parts of the sum inside it.
        for _ in cutlass.range(once(scale_log2 > 0.0), unroll=1):
            total = row_total(lane.scores, total, more)
            more = total
        return total

    @cute.jit
    def find_top(
        self, lane: Lane, row_max: Float32, step: Step, negated: cutlass.Constexpr
    ) -> Float32:
        """Read S and apply softcap, functions of positions and mask; return the row's largest score
        so far."""
        config = self.plan.config
        lane.pipes.s.wait(step.s_state)
        self.read_scores(lane, step.s_state.index)
        if cutlass.const_expr(negated):
            negate(lane.scores, lane.negative)
        if cutlass.const_expr(config.softcap):
            softcap_scores(lane.scores, lane.scalars.softcap_log2)
        if cutlass.const_expr(step.first is not None):
            self.apply_functions(lane, step.first, step.key is not None)
        if cutlass.const_expr(step.key is not None):
            self.mask(lane, step.key)
        top = top_score(lane.scores, row_max)
        if cutlass.const_expr(self.plan.layout.halves == 2):
            top = cutlass.max(top, from_other_half(self.plan, lane, top, step.o_state.phase))
        return top

    @cute.jit
    def publish_p(
        self, lane: Lane, acc_scale: Float32, scale_log2: Float32, shift: Float32, step: Step
    ) -> None:
        """Publish `acc_scale` to the correction; turn scores into weights, and these into a
        published P.

        scale_log2, shift: see `exponentiate`.
        """
        share, stage = self.plan.layout.exp2_share, step.s_state.index
        q_tile = lane.row.q_tile
        if not step.is_first:
            publish(lane, (acc_scale,))
        cute.arch.sync_warp()  # ptxas otherwise sinks the store under the exponentials
        exponentiate(lane.scores, scale_log2, shift, share)
        if cutlass.const_expr(self.plan.layout.p_in_smem):
            lane.pipes.o.wait(step.o_state, q_tile)  # the only buffer of P has been read
        early_columns = self.plan.layout.p_columns[0] // self.plan.layout.halves
        store_p(self.plan, lane, stage, 0, early_columns)
        tmem.wait_stores()
        tmem.order_before_signal()
        lane.pipes.p.signal(stage)
        if cutlass.const_expr(lane.pipes.p_tail is not None):
            store_p(self.plan, lane, stage, early_columns, self.plan.layout.tile_n)
            tmem.wait_stores()
            tmem.order_before_signal()
            lane.pipes.p_tail.signal(stage)
        # For the next `publish`. Placed here since the branch of a wait keeps ptxas from moving the
        # row sum before the signal, and the awaited warps have long arrived.
        lane.pipes.row.wait_free(step.row_state, q_tile)

    @cute.jit
    def read_scores(self, lane: Lane, stage: Int32) -> None:
        """Load this thread's part of S[stage] into its registers."""
        tmem.order_after_wait()
        columns = self.plan.tmem["S0"].columns
        begin = self.plan.tmem["S0"].begin + stage * columns
        for column in cutlass.range_constexpr(0, columns, CHUNK):
            width = min(CHUNK, columns - column)
            tile = tmem.tile_at(lane.buffers.tmem, begin + column, width)
            part = tmem.columns_of(lane.scores, column, width)
            tmem.load_row(tile, part, lane.row.lane)
        tmem.wait_loads()

    @cute.jit
    def apply_functions(self, lane: Lane, key: Int32, masked: cutlass.Constexpr) -> None:
        """Apply the score_mod and the mask_mod to the tile from `key` on.

        masked: whether the tile needs a mask; if not, a block mask may list it as seen.
        """
        config, spots = self.plan.config, (lane.row.spot,)
        first = key + lane.row.half * self.plan.layout.lane_columns
        view = RowView(1, 0, cute.size(lane.scores))
        if cutlass.const_expr(config.score_mod != ""):
            program, tables = parsed(config.score_mod), lane.tables.score_mod
            scale = lane.scalars.softcap_log2
            change_scores(program, lane.scores, spots, tables, first, scale, view)
        if cutlass.const_expr(config.hides_all or (config.hides_blocks and masked)):
            program, tables = parsed(config.mask_mod), lane.tables.mask_mod
            hide_scores(program, lane.scores, spots, tables, first, -Float32.inf, view)

    @cute.jit
    def mask(self, lane: Lane, key: Int32) -> None:
        """Set the scores of keys that the row does not see to -inf."""
        row, config = lane.row, self.plan.config
        first = key + row.half * self.plan.layout.lane_columns
        keep_columns(
            lane.scores,
            row.end - first,
            row.begin - first if cutlass.const_expr(config.left) else None,
            row.sink_end - first if cutlass.const_expr(config.sink_tokens) else None,
        )
        if cutlass.const_expr(config.tree):
            keep_branch(lane.scores, row.branch, first=first)
