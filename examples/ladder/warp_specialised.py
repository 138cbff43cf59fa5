"""Rung 3: each kind of work has warps of its own, which run as far ahead as the edges let them.

One warp loads, one issues products, four turn S into P; the next S is made in the meantime.
"""

import sys
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from demonstrate import main
from kernelkit.device import tmem
from kernelkit.device.pipelines import consumer_state, producer_state
from kernelkit.plan.edges import Edge, EdgePlan, Signal
from kernelkit.plan.tmem import TmemPlan, TmemRange
from kernelkit.plan.warps import Role, RolePlan
from pieces import (
    TILE,
    TILE_BYTES,
    Attention,
    Chip,
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

STAGES = 3  # tiles in each ring
S_STAGES = 2  # the next S is made while the softmax works on this one


def make_plan() -> Plan:
    """Three roles, and a loop of edges: K -> S -> P -> O."""
    roles = RolePlan(
        (
            Role("softmax", 0, 4, "S -> P, and O: a row a thread"),
            Role("mma", 4, 1, "S = Q K^T and P V on the tensor core"),
            Role("load", 5, 1, "Q, K and V by TMA"),
        )
    )
    ring = {"signal": Signal.TMA, "release": Signal.UMMA, "tx_bytes": TILE_BYTES}
    edges = EdgePlan(
        roles,
        (
            Edge("q", "load", "mma", 1, Signal.TMA, "Q tile", TILE_BYTES, freed_by="exit"),
            Edge("k", "load", "mma", STAGES, payload="K tile", **ring),
            Edge("v", "load", "mma", STAGES, payload="V tile", **ring),
            # P of a tile shows three things: it is stored, its S is in registers, and so is the
            # previous product. So neither S nor O needs a barrier in the reverse direction.
            Edge("s", "mma", "softmax", S_STAGES, Signal.UMMA, "S tile", freed_by="p"),
            Edge("p", "softmax", "mma", S_STAGES, Signal.THREADS, "P tile", freed_by="s"),
            Edge("o", "mma", "softmax", 1, Signal.UMMA, "product P V", freed_by="p"),
        ),
    )
    half = TILE // 2
    columns = TmemPlan(
        (
            TmemRange("S0", 0, TILE, "S, fp32, tiles 0 mod 2"),
            TmemRange("P0", half, half, "P, bf16, same tile", over="S0"),
            TmemRange("S1", TILE, TILE, "S, fp32, tiles 1 mod 2"),
            TmemRange("P1", TILE + half, half, "P, bf16, same tile", over="S1"),
            TmemRange("O", 2 * TILE, 64, "P V of one tile, fp32"),
        )
    )
    return Plan(roles, edges, shared_memory(edges, STAGES), columns)


@dataclass(frozen=True)
class Scope:
    """Values that every role can access."""

    tensors: Tensors
    chip: Chip
    tiles: Int32  # of keys
    scale_log2: Float32


class Load:
    """Fetches Q once, then K and V, in the order in which the MMA warp wants them."""

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        tensors, chip = scope.tensors, scope.chip
        q, k, v = (chip.pipes[name] for name in ("q", "k", "v"))
        q_tile, _, _ = cute.arch.block_idx()
        q.signal(0)
        fetch(tensors.q, q_tile, chip.q, q, 0)
        k_state, v_state = producer_state(STAGES), producer_state(STAGES)
        for tile in cutlass.range(scope.tiles, unroll=1):
            k.acquire(k_state)
            fetch(tensors.k, tile, chip.k, k, k_state.index)
            v.acquire(v_state)
            fetch(tensors.v, tile, chip.v, v, v_state.index)
            k_state.advance()
            v_state.advance()


class Mma:
    """Issues S = Q K^T two tiles ahead of P V."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        chip, columns = scope.chip, self.plan.tmem
        q, k, v, s, p, o = (chip.pipes[name] for name in ("q", "k", "v", "s", "p", "o"))
        k_state, v_state = consumer_state(STAGES), consumer_state(STAGES)
        s_state, p_state = consumer_state(S_STAGES), consumer_state(S_STAGES)
        q.wait(consumer_state(1))
        for step in cutlass.range(scope.tiles + S_STAGES, unroll=1):
            if step >= S_STAGES:
                p.wait(p_state)
                v.wait(v_state)
                tmem.order_after_wait()
                p_column = columns["P0"].begin + p_state.index * TILE
                issue_pv(chip, p_column, columns["O"].begin, v_state.index)
                v.release(v_state.index)
                o.signal(0)
                p_state.advance()
                v_state.advance()
            if step < scope.tiles:
                # P of two tiles ago lay here; products of one thread execute in order.
                k.wait(k_state)
                issue_qk(chip, columns["S0"].begin + s_state.index * TILE, k_state.index)
                k.release(k_state.index)
                s.signal(s_state.index)
                k_state.advance()
                s_state.advance()


class Softmax:
    """A query row per thread: S -> P, and the sum of the products in registers."""

    def __init__(self, plan: Plan, mask: object) -> None:
        self.plan, self.mask = plan, mask

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        chip, columns, lane = scope.chip, self.plan.tmem, own_row()
        s, p, o = (chip.pipes[name] for name in ("s", "p", "o"))
        s_state, o_state = consumer_state(S_STAGES), consumer_state(1)
        row_max, row_sum = -Float32.inf, Float32(0.0)
        for tile in cutlass.range(scope.tiles, unroll=1):
            s.wait(s_state)
            read_scores(lane, chip, columns["S0"].begin + s_state.index * TILE)
            hide(lane, tile * TILE, scope.tensors.keys, self.mask)
            row_max, row_sum, acc_scale = weigh(lane, row_max, row_sum, scope.scale_log2)
            write_weights(lane, chip, columns["P0"].begin + s_state.index * TILE)
            if tile > 0:
                # The product before, made under this softmax, in units of the maximum before.
                o.wait(o_state)
                add_product(lane, chip, columns["O"].begin)
                o_state.advance()
            lane.output.store(lane.output.load() * acc_scale)
            p.signal(s_state.index)
            s_state.advance()
        o.wait(o_state)
        add_product(lane, chip, columns["O"].begin)
        store_row(lane, scope.tensors.o, row_max * scope.scale_log2, row_sum)


class WarpSpecialised(Attention):
    """Load, products and softmax by different warps, all at the same time."""

    plan = make_plan()

    @cute.kernel
    def kernel(self, tensors: Tensors, scale_log2: Float32) -> None:
        """Grid (query tiles, heads, batch), 192 threads: each warp plays its role."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        scope = Scope(tensors, set_up(self.plan), cute.ceil_div(tensors.keys, TILE), scale_log2)
        if warp == self.plan.roles["load"].first_warp:
            Load().run(scope)
        elif warp == self.plan.roles["mma"].first_warp:
            Mma(self.plan).run(scope)
        else:
            Softmax(self.plan, self.mask).run(scope)
        tear_down(self.plan, scope.chip)


if __name__ == "__main__":
    sys.exit(main(WarpSpecialised))
