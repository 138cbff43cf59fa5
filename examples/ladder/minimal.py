"""Rung 1: everything in order. Load, multiply, softmax, multiply, add; nothing overlaps.

Four warps; warp 0 issues the copies and the products besides. One buffer of everything.
"""

import sys

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from demonstrate import main
from kernelkit.device.pipelines import consumer_state, producer_state
from kernelkit.plan.edges import Edge, EdgePlan, Signal
from kernelkit.plan.tmem import TmemPlan, TmemRange
from kernelkit.plan.warps import Role, RolePlan
from pieces import (
    TILE,
    TILE_BYTES,
    Attention,
    Plan,
    Tensors,
    add_product,
    fetch,
    hide,
    issue_pv,
    issue_qk,
    own_row,
    read_scores,
    set_up,
    shared_memory,
    store_row,
    tear_down,
    weigh,
    write_weights,
)


def make_plan(stages: int) -> Plan:
    """Rings of `stages` tiles of K and V; the second rung has the same plan with more of them."""
    roles = RolePlan(
        (
            Role("issuer", 0, 1, "issues copies and products, and owns rows 0 to 31"),
            Role("others", 1, 3, "own rows 32 to 127"),
        )
    )
    ring = {"signal": Signal.TMA, "release": Signal.UMMA, "tx_bytes": TILE_BYTES}
    one = ("issuer", "issuer")
    edges = EdgePlan(
        roles,
        (
            Edge("q", *one, 1, Signal.TMA, "Q tile", TILE_BYTES, freed_by="exit"),
            Edge("k", *one, stages, payload="K tile", **ring),
            Edge("v", *one, stages, payload="V tile", **ring),
            # All four warps wait for these. A barrier of the CTA is between the two, so each
            # is waited for before the other is signalled.
            Edge("s", *one, 1, Signal.UMMA, "S tile", freed_by="o"),
            Edge("o", *one, 1, Signal.UMMA, "product P V", freed_by="s"),
        ),
    )
    tmem = TmemPlan(
        (
            TmemRange("S", 0, TILE, "S, fp32"),
            TmemRange("P", TILE // 2, TILE // 2, "P, bf16, once S is in registers", over="S"),
            TmemRange("O", TILE, 64, "P V of one tile, fp32"),
        )
    )
    return Plan(roles, edges, shared_memory(edges, stages), tmem)


class Minimal(Attention):
    """Attention that processes one tile after the other, one step after the other."""

    plan = make_plan(stages=1)

    @cute.kernel
    def kernel(self, tensors: Tensors, scale_log2: Float32) -> None:
        """Grid (query tiles, heads, batch), 128 threads."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        q_tile, _, _ = cute.arch.block_idx()
        tmem = self.plan.tmem
        s_column, p_column, o_column = (tmem[name].begin for name in ("S", "P", "O"))
        chip, lane = set_up(self.plan), own_row()
        q, k, v, s, o = (chip.pipes[name] for name in ("q", "k", "v", "s", "o"))
        # Producer and consumer state of each edge: which stage, and which phase of its barrier.
        k_fill, v_fill = producer_state(1), producer_state(1)
        k_full, v_full, s_full, o_full = (consumer_state(1) for _ in range(4))
        row_max, row_sum = -Float32.inf, Float32(0.0)
        if warp == 0:
            q.signal(0)
            fetch(tensors.q, q_tile, chip.q, q, 0)
            q.wait(consumer_state(1))

        for tile in cutlass.range(cute.ceil_div(tensors.keys, TILE), unroll=1):
            if warp == 0:
                # Load K and V, and wait for both.
                k.acquire(k_fill)
                fetch(tensors.k, tile, chip.k, k, k_fill.index)
                v.acquire(v_fill)
                fetch(tensors.v, tile, chip.v, v, v_fill.index)
                k.wait(k_full)
                v.wait(v_full)
                # First S = Q K^T.
                issue_qk(chip, s_column, k_full.index)
                k.release(k_full.index)
                s.signal(0)
            # Then P, the softmax of S.
            s.wait(s_full)
            read_scores(lane, chip, s_column)
            hide(lane, tile * TILE, tensors.keys, self.mask)
            row_max, row_sum, acc_scale = weigh(lane, row_max, row_sum, scale_log2)
            write_weights(lane, chip, p_column)
            cute.arch.sync_threads()  # all rows of P are there, all of the last product are read
            # Then O = O acc_scale + P V.
            if warp == 0:
                issue_pv(chip, p_column, o_column, v_full.index)
                v.release(v_full.index)
                o.signal(0)
            o.wait(o_full)
            lane.output.store(lane.output.load() * acc_scale)
            add_product(lane, chip, o_column)
            k_fill.advance()
            v_fill.advance()
            k_full.advance()
            v_full.advance()
            s_full.advance()
            o_full.advance()

        store_row(lane, tensors.o, row_max * scale_log2, row_sum)
        tear_down(self.plan, chip)


if __name__ == "__main__":
    sys.exit(main(Minimal))
