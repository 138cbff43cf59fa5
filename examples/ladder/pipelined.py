"""Rung 2: loads run ahead. K and V come through rings of three tiles, by TMA and mbarriers.

The same four warps and the same plan with more stages. While the warps compute with one tile, the
next ones are on their way; a stage is filled again as soon as the tensor core has read it.
"""

import sys

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from demonstrate import main
from kernelkit.device.pipelines import consumer_state, producer_state
from minimal import make_plan
from pieces import (
    TILE,
    Attention,
    Tensors,
    add_product,
    fetch,
    hide,
    issue_pv,
    issue_qk,
    own_row,
    read_scores,
    set_up,
    store_row,
    tear_down,
    weigh,
    write_weights,
)

STAGES = 3


class Pipelined(Attention):
    """Copies run up to three tiles ahead of the products."""

    plan = make_plan(STAGES)

    @cute.kernel
    def kernel(self, tensors: Tensors, scale_log2: Float32) -> None:
        """Grid (query tiles, heads, batch), 128 threads."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        q_tile, _, _ = cute.arch.block_idx()
        tmem = self.plan.tmem
        s_column, p_column, o_column = (tmem[name].begin for name in ("S", "P", "O"))
        chip, lane = set_up(self.plan), own_row()
        q, k, v, s, o = (chip.pipes[name] for name in ("q", "k", "v", "s", "o"))
        k_fill, v_fill = producer_state(STAGES), producer_state(STAGES)
        k_full, v_full = consumer_state(STAGES), consumer_state(STAGES)
        s_full, o_full = consumer_state(1), consumer_state(1)
        row_max, row_sum = -Float32.inf, Float32(0.0)
        tiles = cute.ceil_div(tensors.keys, TILE)
        if warp == 0:
            q.signal(0)
            fetch(tensors.q, q_tile, chip.q, q, 0)
            # Fill the rings: nothing has to be waited for.
            for tile in cutlass.range(cutlass.min(STAGES, tiles), unroll=1):
                k.acquire(k_fill)
                fetch(tensors.k, tile, chip.k, k, k_fill.index)
                v.acquire(v_fill)
                fetch(tensors.v, tile, chip.v, v, v_fill.index)
                k_fill.advance()
                v_fill.advance()
            q.wait(consumer_state(1))

        for tile in cutlass.range(tiles, unroll=1):
            # First S = Q K^T.
            if warp == 0:
                k.wait(k_full)
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
                v.wait(v_full)
                issue_pv(chip, p_column, o_column, v_full.index)
                v.release(v_full.index)
                o.signal(0)
                # Refill the stages of this tile, once the products have read them.
                if tile + STAGES < tiles:
                    k.acquire(k_fill)
                    fetch(tensors.k, tile + STAGES, chip.k, k, k_fill.index)
                    v.acquire(v_fill)
                    fetch(tensors.v, tile + STAGES, chip.v, v, v_fill.index)
                    k_fill.advance()
                    v_fill.advance()
            o.wait(o_full)
            lane.output.store(lane.output.load() * acc_scale)
            add_product(lane, chip, o_column)
            k_full.advance()
            v_full.advance()
            s_full.advance()
            o_full.advance()

        store_row(lane, tensors.o, row_max * scale_log2, row_sum)
        tear_down(self.plan, chip)


if __name__ == "__main__":
    sys.exit(main(Pipelined))
