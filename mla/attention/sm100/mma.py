"""MMA role: the leader's warp issues S = Q K^T, and O += P V one tile behind it (device code).

Q K^T of the next tile comes before P V, so that the tensor core has work while weights are
computed. K is stored [key, column]; as V, the B operand with N = columns and K = keys, its panels
are MN-major. Stages of K and V have constant places, so that descriptors are known beforehand.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.pipeline import PipelineState

from kernelkit.device import tmem
from kernelkit.device.pipelines import consumer_state_at, in_leader, producer_state_at
from kernelkit.device.umma import Step, bf16_instruction, issue_run, operand_at
from mla.attention.shared.intake import HALF, LINE_BYTES, PANEL, PANEL_BYTES
from mla.attention.sm100.args import Scope
from mla.attention.sm100.finish import mailbox_of
from mla.attention.sm100.plan import (
    KEYS,
    LANE_COLUMNS,
    OWN_KEYS,
    PAIR,
    PIECE_BYTES,
    PIECES,
    PRODUCTS,
    PV_COLUMNS,
    ROWS,
    S_STAGES,
    Plan100,
)

QK = bf16_instruction(PAIR * ROWS, KEYS, True)
PV = bf16_instruction(PAIR * ROWS, PV_COLUMNS, False)
EIGHT = 8 * LINE_BYTES
STEP = 16  # K of an MMA: columns of Q, or keys


def qk_steps(panels: range) -> tuple[Step, ...]:
    """Return the MMAs of S over some panels, whose Q and K lie alike."""
    return tuple(
        Step(0, place, place, bool(panel or part))
        for panel in panels
        for part in range(PANEL // STEP)
        for place in (panel * PANEL_BYTES + part * STEP * 2,)
    )


def pv_steps(piece: int) -> tuple[Step, ...]:
    """Return the MMAs of O over a piece of keys. Whether the first ones add is not known here."""
    steps = []
    for product in range(PRODUCTS):
        for part in range(OWN_KEYS // STEP):
            weights = piece * PANEL_BYTES + part * STEP * 2
            values = piece * PIECE_BYTES + part * STEP * LINE_BYTES
            values += product * (HALF // PRODUCTS) * PANEL_BYTES
            first = piece + part == 0
            steps.append(Step(product * LANE_COLUMNS, weights, values, None if first else True))
    return tuple(steps)


def filled(stage: int, number: Int32) -> PipelineState:
    """Return the state of a stage for its filling `number`."""
    return PipelineState(0, number, Int32(stage), number % 2)


class Mma:
    """Role that issues all MMAs of a pair."""

    def __init__(self, plan: Plan100) -> None:
        self.plan = plan
        self.role = plan.roles["mma"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp: in the leader."""
        if in_leader():
            count = scope.work.count
            if count == 0 and mailbox_of(self.plan, scope.work, scope.buffers).senders > 0:
                scope.pipes.q.wait(consumer_state_at(1, Int32(0)))  # it comes in any case
            for number in cutlass.range(count + 1, unroll=1):
                if number < count:
                    self.multiply_keys(scope, number)
                if number > 0 and count > 0:
                    self.add_values(scope, number - 1)

    @cute.jit
    def multiply_keys(self, scope: Scope, number: Int32) -> None:
        """Issue S = Q K^T of a tile, group by group of panels."""
        plan, pipes, buffers, groups = self.plan, scope.pipes, scope.buffers, self.plan.groups
        into = producer_state_at(S_STAGES, number)
        pipes.s.wait_free(into)
        if number == 0:  # here, so that all that the loop needs is ready by then
            pipes.q.wait(consumer_state_at(1, number))
        tmem.order_after_wait()
        first = plan.tmem["S0"]
        d = buffers.tmem.toint() + first.begin + into.index * first.columns
        q, k = (operand_at(each.toint(), 16, EIGHT) for each in (buffers.q, buffers.k))
        for group in cutlass.range_constexpr(len(groups)):
            pipes.k.wait(filled(group, number))
            issue_run(True, QK, d, q, k, qk_steps(groups[group]), Boolean(True))
            pipes.k.release(Int32(group))
        pipes.s.signal(into.index)

    @cute.jit
    def add_values(self, scope: Scope, number: Int32) -> None:
        """Issue O (+)= P V of a tile, piece by piece. The first tile overwrites O."""
        plan, pipes, buffers = self.plan, scope.pipes, scope.buffers
        if cutlass.const_expr(plan.by_tma):
            if (scope.work.begin + number + 1) * KEYS > scope.work.keys:
                pipes.cleared.wait(consumer_state_at(1, Int32(0)))
        pipes.p.wait(consumer_state_at(1, number))
        tmem.order_after_wait()
        d = buffers.tmem.toint() + plan.tmem["O"].begin
        p = operand_at(buffers.p.toint(), 16, EIGHT)
        v = operand_at(buffers.v.toint(), PANEL_BYTES, EIGHT)
        for piece in cutlass.range_constexpr(PIECES):
            pipes.v.wait(filled(piece, number))
            issue_run(True, PV, d, p, v, pv_steps(piece), number > 0)
            pipes.v.release(Int32(piece))
        pipes.o.signal(Int32(0))
