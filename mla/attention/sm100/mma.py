"""MMA role: one warp issues S = Q K^T, and O += P V one tile behind it (device code).

Q K^T of the next tile comes before P V, so that the tensor core has work while weights are computed
and exchanged. K is stored [key, column]; as V, the B operand with N = columns and K = keys, the
same panels are MN-major. A TiledMma is built anew wherever it is used: passed through a loop it
stops being a constant.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.pipeline import PipelineState
from cutlass.utils import blackwell_helpers as sm100

from kernelkit.device import tmem
from kernelkit.device.pipelines import Ring, consumer_state_at, producer_state_at
from kernelkit.device.umma import accumulator, copy_panel, issue, shared
from mla.attention.sm100.args import Scope
from mla.attention.sm100.exchange import expect_weights, free_weights
from mla.attention.sm100.finish import mailbox_of
from mla.attention.sm100.load import q_panel
from mla.attention.sm100.plan import (
    COLUMNS,
    GROUP,
    HALF,
    KEY_STAGES,
    OWN_GROUPS,
    OWN_KEYS,
    OWN_STAGES,
    OWN_TILES,
    PAIR,
    PANEL,
    PIECE_KEYS,
    PIECES,
    Q_TMEM_COLUMNS,
    Q_TMEM_PANELS,
    ROWS,
    Plan100,
)

K, MN = OperandMajorMode.K, OperandMajorMode.MN
QK_TILE = (ROWS, OWN_KEYS, PANEL)  # of one panel
PV_TILE = (ROWS, COLUMNS, OWN_KEYS)  # of 64 keys
STEPS = OWN_KEYS // 16  # of 64 keys
ONE = tcgen05.CtaGroup.ONE


def qk_mma(from_smem: bool) -> cute.TiledMma:
    """Make the MMA of S: Q from shared or tensor memory, K from shared memory."""
    source = tcgen05.OperandSource.SMEM if from_smem else tcgen05.OperandSource.TMEM
    return sm100.make_trivial_tiled_mma(BFloat16, BFloat16, K, K, Float32, ONE, QK_TILE[:2], source)


def pv_mma() -> cute.TiledMma:
    """Make the MMA of P V: both from shared memory."""
    return sm100.make_trivial_tiled_mma(BFloat16, BFloat16, K, MN, Float32, ONE, PV_TILE[:2])


def panels_as_a(mma: cute.TiledMma, pointer: cute.Pointer, panels: int) -> cute.Tensor:
    """Return panels of 128 rows as the A operand, (MMA, 1, 4, panel)."""
    layout = sm100.make_smem_layout_a(mma, QK_TILE, BFloat16, panels)
    return mma.make_fragment_A(shared(pointer, layout))


def panels_as_k(mma: cute.TiledMma, pointer: cute.Pointer, panels: int) -> cute.Tensor:
    """Return panels of 64 keys as the B operand of Q K^T, (MMA, 1, 4, panel)."""
    layout = sm100.make_smem_layout_b(mma, QK_TILE, BFloat16, panels)
    return mma.make_fragment_B(shared(pointer, layout))


def as_v(pointer: cute.Pointer, keys: int, stages: int) -> cute.Tensor:
    """Return stages of own columns as the B operand of P V, (MMA, 1, keys / 16, stage)."""
    mma = pv_mma()
    layout = sm100.make_smem_layout_b(mma, (ROWS, COLUMNS, keys), BFloat16, stages)
    return mma.make_fragment_B(shared(pointer, layout))


def q_in_tmem(plan: Plan100, mma: cute.TiledMma, base: cute.Pointer) -> cute.Tensor:
    """Return the panels of Q in tensor memory as the A operand, (MMA, 1, 4, panel)."""
    layout = sm100.make_smem_layout_a(mma, QK_TILE, BFloat16, 1)
    one = mma.make_fragment_A(cute.make_tensor(base, layout.outer))[None, None, None, 0]
    panels = cute.make_layout(Q_TMEM_PANELS, stride=Q_TMEM_COLUMNS * 2)
    pointer = cute.recast_ptr(base + plan.tmem["Q"].begin, dtype=BFloat16)
    return cute.make_tensor(pointer, cute.append(one.layout, panels))


class Mma:
    """Role that issues all MMAs of the CTA."""

    def __init__(self, plan: Plan100) -> None:
        self.plan = plan
        self.role = plan.roles["mma"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        pipes, count = scope.pipes, scope.work.count
        if mailbox_of(self.plan, scope.work, scope.buffers).senders > 0:
            pipes.q.wait(consumer_state_at(1, Int32(0)))  # it comes even to a CTA without keys
        if count > 0:
            self.bring_q(scope)
        for number in cutlass.range(count + 1, unroll=1):
            if number < count:
                self.multiply_keys(scope, number)
            if number > 0 and count > 0:
                self.add_values(scope, number - 1)

    @cute.jit
    def bring_q(self, scope: Scope) -> None:
        """Copy panels of Q to tensor memory. Products that are issued later find them there."""
        plan, buffers = self.plan, scope.buffers
        for panel in cutlass.range_constexpr(plan.panels):
            behind = panel >= plan.key_panels
            number = panel - plan.q_smem_panels if behind else panel
            if cutlass.const_expr(behind or panel < plan.key_panels - plan.q_smem_panels):
                column = plan.tmem["Q"].begin + number * Q_TMEM_COLUMNS
                copy_panel(buffers.tmem + column, q_panel(plan, buffers, panel))
        scope.pipes.lent.signal(Int32(0))

    @cute.jit
    def wait_for(self, ring: Ring, state: PipelineState) -> None:
        """Wait for keys; those that cp.async brought are ordered for the tensor core here."""
        ring.wait(state)
        if cutlass.const_expr(not self.plan.by_tma):
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def multiply_keys(self, scope: Scope, number: Int32) -> None:
        """Issue S = Q K^T of a tile, panel by panel: those outside the own columns first."""
        plan, pipes, buffers = self.plan, scope.pipes, scope.buffers
        pipes.s.wait_free(producer_state_at(1, number))
        tmem.order_after_wait()
        in_tmem = plan.key_panels - plan.q_smem_panels
        for panel in cutlass.range_constexpr(plan.key_panels):
            mma = qk_mma(panel >= in_tmem)
            tS = accumulator(mma, QK_TILE, buffers.tmem, plan.tmem["S"].begin)
            group = panel // GROUP
            state = consumer_state_at(KEY_STAGES, number * len(plan.key_groups) + group)
            if cutlass.const_expr(panel % GROUP == 0):
                self.wait_for(pipes.key, state)
            if cutlass.const_expr(panel < in_tmem):
                tQ = q_in_tmem(plan, mma, buffers.tmem)[None, None, None, panel]
            else:
                tQ = panels_as_a(mma, buffers.q, plan.q_smem_panels)
                tQ = tQ[None, None, None, panel - in_tmem]
            tK = panels_as_k(mma, buffers.key, KEY_STAGES * GROUP)
            tK = tK[None, None, None, state.index * GROUP + panel % GROUP]
            issue(mma, tS, tQ, tK, Boolean(panel > 0))
            if cutlass.const_expr(panel == plan.key_groups[group][-1]):
                pipes.key.release(state.index)
        for panel in cutlass.range_constexpr(HALF):
            if cutlass.const_expr(panel % GROUP == 0):
                state = consumer_state_at(OWN_STAGES, number * OWN_GROUPS + panel // GROUP)
                self.wait_for(pipes.own, state)
            mma = qk_mma(False)
            tS = accumulator(mma, QK_TILE, buffers.tmem, plan.tmem["S"].begin)
            tQ = q_in_tmem(plan, mma, buffers.tmem)[None, None, None, in_tmem + panel]
            tK = panels_as_k(mma, buffers.own, OWN_TILES * HALF)
            tK = tK[None, None, None, number % OWN_TILES * HALF + panel]
            issue(mma, tS, tQ, tK, Boolean(True))
        pipes.s.signal(Int32(0))

    @cute.jit
    def add_values(self, scope: Scope, number: Int32) -> None:
        """Issue O (+)= P V of a tile: own keys, then the peer's. The first tile overwrites O."""
        pipes, tile = scope.pipes, number % OWN_TILES
        pipes.p.wait(consumer_state_at(1, number))
        tmem.order_after_wait()
        values = as_v(scope.buffers.own, OWN_KEYS, OWN_TILES)[None, None, None, tile]
        self.add_keys(scope, values, 0, number > 0)
        for group in cutlass.range_constexpr(OWN_GROUPS):
            pipes.own.release(tile * OWN_GROUPS + group)
        expect_weights(scope, number)
        for piece in cutlass.range_constexpr(PIECES):
            self.wait_for(pipes.peer, consumer_state_at(PIECES, number * PIECES + piece))
            values = as_v(scope.buffers.peer, PIECE_KEYS, PIECES)[None, None, None, piece]
            self.add_keys(scope, values, STEPS + piece * (STEPS // PIECES), Boolean(True))
            pipes.peer.release(Int32(piece))
        pipes.o.signal(Int32(0))
        free_weights(scope)

    @cute.jit
    def add_keys(
        self, scope: Scope, values: cute.Tensor, first: cutlass.Constexpr, accumulate: Boolean
    ) -> None:
        """Issue O (+)= P V over some keys. first: step of 16 keys, among those of both halves."""
        mma = pv_mma()
        tO = accumulator(mma, PV_TILE, scope.buffers.tmem, self.plan.tmem["O"].begin)
        weights = panels_as_a(mma, scope.buffers.p, PAIR)[None, None, None, first // STEPS]
        for step in cutlass.range_constexpr(cute.size(values, mode=[2])):
            mma.set(tcgen05.Field.ACCUMULATE, accumulate if step == 0 else True)
            block = first % STEPS + step
            cute.gemm(mma, tO, weights[None, None, block], values[None, None, step], tO)
