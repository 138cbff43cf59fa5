"""Math role: two warpgroups, each with half of the columns of O, take tiles alternately.

The team of a tile computes S and P of it, and publishes P with the maxima that it refers to. Then
both teams add P V for their columns. The other team adopts the published maxima, so both process
the tiles in one order. Team 0 finishes the product of the other's P before S of its next tile, and
releases its half; team 1 issues S first, as P of the tile before comes while S is computed.

A maximum is replaced only when it has grown by more than LAG_LOG2, since O must then be rescaled.

Keys in fp16 may be in units, see `halves.py`. A weight of V is then the weight of the key times its
unit, so the logarithm of the unit joins the logit. Sums are of weights without units.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp, warpgroup

from kernelkit.device.barriers import meet
from kernelkit.device.online_softmax import finite
from kernelkit.device.pipelines import Ring
from kernelkit.device.shared_words import load
from kernelkit.device.warp_mma import pack
from kernelkit.plan import hw
from mla.attention.shared.collect import key_scale
from mla.attention.shared.intake import PANEL, PANELS
from mla.attention.sm90.args import Lane, Reference, Scope
from mla.attention.sm90.finish import (
    MAXIMA,
    finish_together,
    mailbox_of,
    published,
    store_rows,
    sums_of_both,
    sums_of_team,
)
from mla.attention.sm90.halves import inverse_of_unit
from mla.attention.sm90.load import load_q
from mla.attention.sm90.plan import BUFFERS, KEYS, TEAMS, UNIT_BYTES, Plan90
from mla.attention.sm90.products import (
    buffer_start,
    issue_scores,
    issue_values,
    issue_wide_scores,
    k_operand,
    number_type,
    o_registers,
    p_operand,
    p_registers,
    p_tile,
    q_operand,
    qk_mma,
    score_registers,
    v_operand,
)
from mla.attention.sm90.query import factors_of_rows, halve_rows
from mla.attention.sm90.walk import after, full_state, lane_of, steps_of, unit_of

LAG_LOG2 = 8.0
LIFT_LOG2 = 7.0  # weights in fp16 are lifted: below 2^-24 they are 0, above 2^16 infinite
EVERY_BIT = 0xFFFFFFFF


@dataclass(frozen=True)
class Tile:
    """Operands of a team, and a thread's registers for them."""

    scores: cute.Tensor  # fp32, (64, 64)
    p: cute.Tensor  # P of the own tile as the A operand
    o: cute.Tensor  # fp32, (64, team_columns)
    reference: Reference
    factors: cute.Tensor  # fp32 (2,) of both rows: from S to q.k, or to a logit in log2 units
    scale_log2: Float32  # from q.k to a logit in log2 units
    q: cute.Tensor
    k: cute.Tensor  # the team's buffer
    values: tuple[cute.Tensor, ...]  # the team's columns of V in each buffer
    other_p: cute.Tensor  # P of the other's tiles


class Math:
    """Role that computes S, P and O, and stores O."""

    def __init__(self, plan: Plan90) -> None:
        self.plan = plan
        self.role = plan.roles["math"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps; each team is traced separately."""
        team = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // hw.WARPGROUP_WARPS
        for own in cutlass.range_constexpr(TEAMS):
            if team == own:
                self.run_team(scope, own)

    @cute.jit
    def run_team(self, scope: Scope, team: cutlass.Constexpr) -> None:
        """Whole life of warpgroup `team`."""
        plan, past, tile = self.plan, scope.past, self.make_tile(scope, team)
        if cutlass.const_expr(plan.config.ways.resident == 0):
            self.compute(scope, tile, team, Int32(0))
        else:
            for step in cutlass.range(steps_of(plan, scope.given), unroll=1):
                unit = unit_of(plan, scope, step, past)
                self.compute(unit, tile, team, step)
                past = after(past, unit.work.count)
        if cutlass.const_expr(plan.config.cluster > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def compute(self, scope: Scope, tile: Tile, team: cutlass.Constexpr, step: Int32) -> None:
        """Compute O of this CTA's unit number `step`, and store it."""
        lane, count = lane_of(self.plan, scope.work, team), scope.work.count
        tile.o.fill(0.0)
        tile.reference.row_max.fill(-Float32.inf)
        tile.reference.row_sum.fill(0.0)
        if mailbox_of(self.plan, scope).senders > 0:  # then Q comes, even to a CTA without keys
            cute.arch.mbarrier_wait(scope.buffers.q_full, scope.past.units % 2)
        if count > 0:
            self.scale_rows(scope, lane, tile)
            if cutlass.const_expr(team == 0):
                self.take_tiles_left(scope, lane, tile, count)
            else:
                self.take_tiles_right(scope, lane, tile, count)
        sums = sums_of_team(tile.reference)
        if cutlass.const_expr(self.plan.reduces):
            finish_together(self.plan, scope, lane, tile.o, tile.reference, sums)
        else:
            sums = sums_of_both(self.plan, scope, lane, sums, step)
            if cutlass.const_expr(self.plan.config.ways.resident > 0):
                self.request_q(scope, step + 1)  # both teams have read Q
            store_rows(self.plan, scope, lane, tile.o, tile.reference, sums)

    @cute.jit
    def scale_rows(self, scope: Scope, lane: Lane, tile: Tile) -> None:
        """Set the factors of the rows; Q becomes fp16 if tiles are."""
        tile.factors.fill(1.0)
        if cutlass.const_expr(self.plan.halves):
            halve_rows(self.plan, scope)
            for half, factor in enumerate(factors_of_rows(scope, lane)):
                tile.factors[half] = factor
        if cutlass.const_expr(not self.plan.mixes):
            for half in cutlass.range_constexpr(2):
                tile.factors[half] = tile.factors[half] * tile.scale_log2

    @cute.jit
    def request_q(self, scope: Scope, step: Int32) -> None:
        """Load Q of a later unit, if there is one, from the first warp."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            if step < steps_of(self.plan, scope.given):
                unit = unit_of(self.plan, scope, step, scope.past)
                if unit.work.count > 0:
                    load_q(self.plan, unit)

    @cute.jit
    def make_tile(self, scope: Scope, team: cutlass.Constexpr) -> Tile:
        """Make the operands and registers of a team."""
        k = scope.buffers.k
        reference = Reference(*(cute.make_rmem_tensor(2, Float32) for _ in range(2)))
        return Tile(
            score_registers(self.plan),
            p_registers(self.plan),
            o_registers(self.plan),
            reference,
            cute.make_rmem_tensor(2, Float32),
            scope.given.scale_log2 * key_scale(self.plan.config, scope.given),
            q_operand(self.plan, scope.buffers.q),
            k_operand(self.plan, k, team),
            tuple(
                v_operand(self.plan, k, buffer, team, scope.work.slice) for buffer in range(BUFFERS)
            ),
            p_operand(self.plan, k, 1 - team),
        )

    @cute.jit
    def take_tiles_left(self, scope: Scope, lane: Lane, tile: Tile, count: Int32) -> None:
        """Process all tiles as team 0, whose own ones are 0, 2, 4, ..."""
        pipes = scope.pipes
        for number in cutlass.range(0, count, 2, unroll=1):
            if number > 0:
                self.add_other(scope, lane, tile, number - 1)
                # Not behind the wait for the next tile: team 1 waits for this piece.
                self.end_other(scope, pipes.left, 1)
            self.issue_own_scores(scope, lane, tile, number)
            self.add_wide(scope, lane, tile)
            warpgroup.wait_group(0)
            self.weigh(scope, lane, tile, number)
            issue_values(self.plan, tile.o, tile.p, tile.values[0], False)
            warpgroup.wait_group(0)
            release(self.plan, scope, pipes.left, 0)
        if count % 2 == 0:
            self.add_other(scope, lane, tile, count - 1)
            self.end_other(scope, pipes.left, 1, True)

    @cute.jit
    def take_tiles_right(self, scope: Scope, lane: Lane, tile: Tile, count: Int32) -> None:
        """Process all tiles as team 1, whose own ones are 1, 3, 5, ..."""
        pipes = scope.pipes
        for number in cutlass.range(1, count, 2, unroll=1):
            self.issue_own_scores(scope, lane, tile, number)
            self.add_wide(scope, lane, tile)
            self.add_other(scope, lane, tile, number - 1)
            warpgroup.wait_group(1)
            self.weigh(scope, lane, tile, number)
            issue_values(self.plan, tile.o, tile.p, tile.values[1], False)
            warpgroup.wait_group(0)
            release(self.plan, scope, pipes.right, 1)
        if count % 2 == 1:
            self.add_other(scope, lane, tile, count - 1)
            self.end_other(scope, pipes.right, 0, True)

    @cute.jit
    def issue_own_scores(self, scope: Scope, lane: Lane, tile: Tile, number: Int32) -> None:
        """Issue S of the team's tile `number`, as two groups, each once its half is there.

        The half that is released first, and so arrives first, is the team's own.
        """
        plan, team, pipes = self.plan, lane.team, scope.pipes
        state = full_state(scope, number)
        for turn in cutlass.range_constexpr(2):
            right = (turn == 1) if cutlass.const_expr(team == 0) else (turn == 0)
            ring = pipes.right if cutlass.const_expr(right) else pipes.left
            ring.wait(state)
            if cutlass.const_expr(plan.unordered):
                cute.arch.fence_proxy("async.shared", space="cta")
            panels = plan.piece_panels(team, right)
            if cutlass.const_expr(plan.mixes):
                panels = tuple(panel for panel in panels if panel < plan.half_panels)
            issue_scores(plan, tile.scores, tile.q, tile.k, panels, turn > 0)

    @cute.jit
    def add_other(self, scope: Scope, lane: Lane, tile: Tile, number: Int32) -> None:
        """Wait for P of the other team's tile `number`, adopt its maxima, issue its P V."""
        team = lane.team
        other = 1 - team
        scope.pipes.p.wait(full_state(scope, number))
        maxima = published(scope, MAXIMA)
        tops = (maxima[lane.row, other], maxima[lane.row + 8, other])
        self.adopt(tile, tops)
        issue_values(self.plan, tile.o, tile.other_p, tile.values[other], True)

    @cute.jit
    def end_other(
        self,
        scope: Scope,
        ring: Ring,
        buffer: cutlass.Constexpr,
        last: cutlass.Constexpr = False,
    ) -> None:
        """Wait for the product of the other team's P, and release its piece.

        last: whether it is the last tile of a unit, whose release nobody may wait for.
        """
        warpgroup.wait_group(0)
        if cutlass.const_expr(self.plan.refills or not last):
            cute.arch.sync_warp()  # all lanes have read the maxima; own tiles have `publish`
            release(self.plan, scope, ring, buffer)

    @cute.jit
    def adopt(self, tile: Tile, tops: tuple[Float32, Float32]) -> None:
        """Make `tops` the reference of both rows, and rescale O and the sums by it."""
        reference, factors = tile.reference, []
        for half in cutlass.range_constexpr(2):
            top = tops[half]
            factor = cute.math.exp2(reference.row_max[half] - finite(top), fastmath=True)
            factor = Float32(1.0) if reference.row_max[half] == top else factor
            reference.row_max[half] = top
            reference.row_sum[half] = reference.row_sum[half] * factor
            factors.append(factor)
        if cute.arch.vote_any_sync(factors[0] != 1.0 or factors[1] != 1.0):
            for element in cutlass.range_constexpr(cute.size(tile.o)):
                tile.o[element] = tile.o[element] * factors[element // 2 % 2]

    @cute.jit
    def weigh(self, scope: Scope, lane: Lane, tile: Tile, number: Int32) -> None:
        """Compute P from S of the team's tile, and publish it with the maxima.

        O is rescaled here, so its products have to be done; team 1 waits here for that of the tile
        before, and releases its half. The other team waits for P, so P is published first: dense
        attention takes 4 % less time, see notes/mla.md.
        """
        scores, team = tile.scores, lane.team
        self.scale(scope, lane, tile)
        self.hide(scope, lane, tile, number)
        tops = []
        for half in cutlass.range_constexpr(2):
            top = largest(scores, half) - (LIFT_LOG2 if self.plan.halves else 0.0)
            old = tile.reference.row_max[half]
            tops.append(top if top > old + LAG_LOG2 else old)
        sums = self.exponentiate(scope, lane, scores, (finite(tops[0]), finite(tops[1])))
        words, kind = cute.recast_tensor(tile.p, Uint32), "fp16" if self.plan.halves else "bf16"
        for word in cutlass.range_constexpr(cute.size(words)):
            words[word] = pack(scores[2 * word], scores[2 * word + 1], kind)
        if cutlass.const_expr(self.plan.meets_for_p):
            meet(self.plan.barriers, "team", Int32(team))  # all warps have read the ninth panel
        self.publish(scope, lane, tile, tops)
        if cutlass.const_expr(team == 1):
            warpgroup.wait_group(0)
            release(self.plan, scope, scope.pipes.right, 0)
        self.adopt(tile, (tops[0], tops[1]))
        for half in cutlass.range_constexpr(2):
            tile.reference.row_sum[half] = tile.reference.row_sum[half] + sums[half]

    @cute.jit
    def add_wide(self, scope: Scope, lane: Lane, tile: Tile) -> None:
        """Issue the product of the last panel, which is bf16, if the others are fp16. S has to be
        q.k for that.
        """
        if cutlass.const_expr(self.plan.mixes):
            warpgroup.wait_group(0)
            scores, factors = tile.scores, tile.factors
            for quad in cutlass.range_constexpr(0, cute.size(scores), 4):
                first, _, second, _ = self.units_of(scope, lane, quad)
                for half in cutlass.range_constexpr(2):
                    low, high = quad + 2 * half, quad + 2 * half + 1
                    scores[low] = scores[low] * factors[half] * first
                    scores[high] = scores[high] * factors[half] * second
            issue_wide_scores(self.plan, scores, scope.buffers, lane.team)

    @cute.jit
    def scale(self, scope: Scope, lane: Lane, tile: Tile) -> None:
        """Make S logits in log2 units. With units they are those of weights of V in units: a key's
        weight times its unit.
        """
        scores, factors = tile.scores, tile.factors
        if cutlass.const_expr(not self.plan.has_units):
            for element in cutlass.range_constexpr(cute.size(scores)):
                scores[element] = scores[element] * factors[element // 2 % 2]
        else:
            for quad in cutlass.range_constexpr(0, cute.size(scores), 4):
                first, log, second, other = self.units_of(scope, lane, quad)
                for half in cutlass.range_constexpr(2):
                    low, high = quad + 2 * half, quad + 2 * half + 1
                    if cutlass.const_expr(self.plan.mixes):
                        first, second = tile.scale_log2, tile.scale_log2
                    else:
                        scores[low] = scores[low] * factors[half]
                        scores[high] = scores[high] * factors[half]
                    scores[low] = scores[low] * first + log
                    scores[high] = scores[high] * second + other

    @cute.jit
    def units_of(self, scope: Scope, lane: Lane, quad: cutlass.Constexpr) -> tuple[Float32, ...]:
        """Return the units of both keys of four scores, each with its log2."""
        key = lane.team * KEYS + quad * 2 + lane.column
        return load(scope.buffers.units + key * UNIT_BYTES, Float32, 4)

    @cute.jit
    def exponentiate(
        self, scope: Scope, lane: Lane, scores: cute.Tensor, bases: tuple[Float32, Float32]
    ) -> tuple[Float32, Float32]:
        """Replace the logits of both rows by weights; return the sums of this thread's, which are
        without units.
        """
        sums = [[Float32(0.0), Float32(0.0)] for _ in range(2)]
        for quad in cutlass.range_constexpr(0, cute.size(scores), 4):
            inverses = (Float32(1.0), Float32(1.0))
            if cutlass.const_expr(self.plan.has_units):
                first, _, second, _ = self.units_of(scope, lane, quad)
                inverses = (inverse_of_unit(first), inverse_of_unit(second))
            for half in cutlass.range_constexpr(2):
                for k in cutlass.range_constexpr(2):
                    element = quad + 2 * half + k
                    weight = cute.math.exp2(scores[element] - bases[half], fastmath=True)
                    scores[element] = weight
                    if cutlass.const_expr(self.plan.has_units):
                        weight = weight * inverses[k]
                    sums[half][k] = sums[half][k] + weight
        return sums[0][0] + sums[0][1], sums[1][0] + sums[1][1]

    @cute.jit
    def publish(self, scope: Scope, lane: Lane, tile: Tile, tops: list) -> None:
        """Store P and the maxima for the other team."""
        team = lane.team
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), number_type(self.plan))
        copy = cute.make_tiled_copy_C(atom, qk_mma(self.plan))
        thread, _, _ = cute.arch.thread_idx()
        part = copy.get_slice(thread % self.role.team_threads)
        p = cute.make_tensor(tile.p.iterator, tile.scores.layout)
        target = p_tile(self.plan, scope.buffers.k, team)
        cute.copy(copy, part.retile(p), part.partition_D(target))
        maxima = published(scope, MAXIMA)
        for half in cutlass.range_constexpr(2):
            if lane.column == 0:
                maxima[lane.row + 8 * half, team] = tops[half]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        scope.pipes.p.signal(Int32(team))

    @cute.jit
    def hide(self, scope: Scope, lane: Lane, tile: Tile, number: Int32) -> None:
        """Hide keys that a row does not see, and clear V of those that no row sees."""
        config, work = self.plan.config, scope.work
        first, newer = (work.begin + number) * KEYS, Int32(0)
        words = load(scope.buffers.valid + lane.team * 8, Uint32, 2)
        if words[0] & words[1] != Uint32(EVERY_BIT):
            self.hide_missing(lane, tile, words)
        causal = config.causal and config.tokens > 1
        if cutlass.const_expr(causal):
            newer = config.tokens - 1 - work.token
        if cutlass.const_expr(self.plan.by_tma or causal):
            if first + KEYS > work.keys - newer:
                self.hide_later(lane, tile, first)
        if cutlass.const_expr(self.plan.by_tma):
            if first + KEYS > work.keys:
                self.clear_values(scope, lane, work.keys - first)

    @cute.jit
    def hide_missing(self, lane: Lane, tile: Tile, words: tuple[Uint32, Uint32]) -> None:
        """Hide keys whose bit the loading warps left 0."""
        scores = tile.scores
        every = cute.size(scores)
        for element in cutlass.range_constexpr(every):
            bits = words[element // (every // 2)] >> Uint32(lane.column)
            bit = element % (every // 2) // 4 * 8 + element % 2
            scores[element] = scores[element] if (bits >> bit) & 1 != 0 else -Float32.inf

    @cute.jit
    def hide_later(self, lane: Lane, tile: Tile, first: Int32) -> None:
        """Hide keys from the end of what a row sees. first: first key of the tile."""
        scores = tile.scores
        for element in cutlass.range_constexpr(cute.size(scores)):
            column = element // 4 * 8 + element % 2
            visible = first + lane.column + column < lane.ends[element // 2 % 2]
            scores[element] = scores[element] if visible else -Float32.inf

    @cute.jit
    def clear_values(self, scope: Scope, lane: Lane, valid: Int32) -> None:
        """Zero rows of V from `valid` on: their weight is 0, but 0 * NaN is NaN.

        The team meets once more before `publish`, whose fence precedes all products with V.
        """
        thread, _, _ = cute.arch.thread_idx()
        team = lane.team
        zeros = cute.make_rmem_tensor(PANEL, BFloat16)
        zeros.fill(0.0)
        line = thread % self.role.team_threads
        meet(self.plan.barriers, "team", Int32(team))  # all warps have read K
        row, half = line % KEYS, line // KEYS
        if row >= valid:
            for panel in cutlass.range_constexpr(PANELS // 2):
                # A line of zeros needs no swizzle: it stays within the line.
                start = buffer_start(scope.buffers.k, team, 0)
                place = ((half * (PANELS // 2) + panel) * KEYS + row) * PANEL
                target = cute.make_tensor(start + place, cute.make_layout(PANEL))
                cute.autovec_copy(zeros, target)


@cute.jit
def release(plan: Plan90, scope: Scope, ring: Ring, buffer: cutlass.Constexpr) -> None:
    """Release a piece of a buffer, in all CTAs of the cluster that get the same keys.

    One lane arrives for the warp. A wait for products holds for the warp, but what lanes load they
    have to have loaded.
    """
    if cutlass.const_expr(plan.config.sharers == 1):
        ring.release(Int32(buffer))
    else:
        barrier = ring.empty.array.get_barrier(Int32(buffer)).toint()
        for sharer in cutlass.range_constexpr(plan.config.sharers):
            cute.arch.inline_ptx(
                "{ .reg .pred one; .reg .b32 to; elect.sync _|one, 0xffffffff; "
                "mapa.shared::cluster.u32 to, {$r0}, {$r1}; "
                "@one mbarrier.arrive.shared::cluster.b64 _, [to]; }",
                read_only_args=[barrier, scope.work.rank * plan.config.sharers + sharer],
            )


@cute.jit
def largest(scores: cute.Tensor, half: cutlass.Constexpr) -> Float32:
    """Return the maximum of a row over its four lanes."""
    top, other = scores[2 * half], scores[2 * half + 1]
    for quad in cutlass.range_constexpr(4, cute.size(scores), 4):
        top = cute.arch.fmax(top, scores[quad + 2 * half])
        other = cute.arch.fmax(other, scores[quad + 2 * half + 1])
    top = cute.arch.fmax(top, other)
    for step in cutlass.range_constexpr(2):
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << step))
    return top
