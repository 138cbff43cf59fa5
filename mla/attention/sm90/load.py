"""Load roles by TMA: Q once, then the two halves of each tile, a warp for each (device code)."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint16, Uint32

from kernelkit.device.boxes import Box, BoxPosition, copy_in
from kernelkit.device.pipelines import Ring
from kernelkit.device.shared_words import store
from kernelkit.device.umma import shared
from mla.attention.shared.intake import PANEL
from mla.attention.shared.pages import Key, partition_box, place_of
from mla.attention.sm90.args import Scope
from mla.attention.sm90.plan import BUFFERS, KEYS, ROWS, Plan90
from mla.attention.sm90.products import buffer_start
from mla.attention.sm90.walk import after, free_state, steps_of, unit_of


def q_box(plan: Plan90) -> Box:
    """Return the box of Q: the heads of a token in a row tile."""
    return Box(plan.tiles.heads, PANEL, BFloat16)


def k_box(plan: Plan90) -> Box:
    """Return the box of K: the keys of a tile, or as many of them as one page holds."""
    return Box(plan.box_rows, PANEL, BFloat16)


@cute.jit
def load_q(plan: Plan90, scope: Scope) -> None:
    """Load the rows of Q; one warp. Heads and tokens that the tensor lacks arrive as zeros.

    The CTAs of a cluster have the same rows: each brings some panels to all of them.
    """
    box, tiles, work, buffers = q_box(plan), plan.tiles, scope.work, scope.buffers
    with cute.arch.elect_one():
        nbytes = plan.panels * tiles.rows * PANEL * 2
        cute.arch.mbarrier_arrive_and_expect_tx(buffers.q_full, nbytes)
    cluster, sharers = plan.config.cluster, plan.config.sharers
    for sharer in cutlass.range_constexpr(sharers):
        if work.sharer == sharer:
            mask = None
            if cutlass.const_expr(cluster > 1):
                mask = sum(1 << (rank * sharers + sharer) for rank in range(cluster))
            for panel in cutlass.range_constexpr(plan.panels):
                if panel % cluster == work.rank:
                    for token in cutlass.range_constexpr(tiles.tokens):
                        place = (panel * ROWS + token * tiles.heads) * PANEL
                        target = shared(buffers.q + place, box.layout())
                        position = BoxPosition(
                            work.head, panel * PANEL, work.token + token, work.entry
                        )
                        copy_in(scope.q, box, position, target, buffers.q_full, mask)


class LoadHalf:
    """Loads one half of every tile of keys."""

    def __init__(self, plan: Plan90, right: bool) -> None:
        self.plan, self.right = plan, right
        self.role = plan.roles["load_right" if right else "load_left"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        plan, past = self.plan, scope.past
        ring = scope.pipes.right if cutlass.const_expr(self.right) else scope.pipes.left
        if cutlass.const_expr(plan.config.sharers > 1):
            cute.arch.cluster_wait()  # the barriers of all CTAs are initialised
        if cutlass.const_expr(plan.config.ways.resident == 0):
            self.load_unit(scope, ring)
            past = after(past, scope.work.count)
        else:
            for step in cutlass.range(steps_of(plan, scope.given), unroll=1):
                unit = unit_of(plan, scope, step, past)
                self.load_unit(unit, ring)
                past = after(past, unit.work.count)
        if cutlass.const_expr(plan.config.sharers > 1):
            for buffer in cutlass.range_constexpr(BUFFERS):
                # Releases come from the other CTA, too, and have to find this one alive.
                ring.wait_free(free_state(replace(scope, past=past), Int32(buffer)))
        elif cutlass.const_expr(plan.ctas > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def load_unit(self, scope: Scope, ring: Ring) -> None:
        """Load this half of every tile of a unit."""
        for number in cutlass.range(scope.work.count, unroll=1):
            for buffer in cutlass.range_constexpr(BUFFERS):
                if number % BUFFERS == buffer:
                    self.load_piece(scope, ring, number, buffer)

    @cute.jit
    def load_piece(
        self, scope: Scope, ring: Ring, number: Int32, buffer: cutlass.Constexpr
    ) -> None:
        """Load the piece of tile `number` of this CTA into its buffer.

        CTAs that share tiles of keys bring some of the panels to all of them each.
        """
        plan, box = self.plan, k_box(self.plan)
        panels, sharers = plan.piece_panels(buffer, self.right), plan.config.sharers
        first = (scope.work.begin + number) * KEYS
        row, page = place_of(plan.config, scope, first)  # while the buffer is still in use
        state = free_state(scope, number)
        ring.wait_free(state)
        if cutlass.const_expr(not self.right):
            self.mark(scope, first, page, buffer)
        ring.signal_bytes(state.index, KEYS * PANEL * 2 * len(panels))
        for part in cutlass.range(KEYS // box.rows, unroll=1):
            if part > 0:
                row, page = place_of(plan.config, scope, first + part * box.rows)
            for sharer in cutlass.range_constexpr(sharers):
                if scope.work.sharer == sharer:
                    for panel in panels[sharer::sharers]:
                        start = buffer_start(scope.buffers.k, buffer, panel)
                        target = shared(start + part * (box.rows * PANEL), box.layout())
                        place = Key(row, page, panel * PANEL)
                        self.copy(scope, box, place, target, ring.barrier(buffer))

    @cute.jit
    def mark(self, scope: Scope, first: Int32, page: Int32, buffer: cutlass.Constexpr) -> None:
        """Store which keys of a tile have a page: bits for those past the last key are set.

        page: that of the first key.
        """
        box, pages = k_box(self.plan), scope.given.keys.store.shape[0]
        words = [Uint32(0), Uint32(0)]
        for part in cutlass.range_constexpr(KEYS // box.rows):
            key = first + part * box.rows
            if cutlass.const_expr(part > 0):
                _, page = place_of(self.plan.config, scope, key)
            there = (page >= 0 and page < pages) or key >= scope.work.keys
            for half in cutlass.range_constexpr(2):
                bits = bits_of_part(part, box.rows, half)
                words[half] = words[half] | (Uint32(bits) if there else Uint32(0))
        with cute.arch.elect_one():
            store(scope.buffers.valid + buffer * 8, Uint32, (words[0], words[1]))

    @cute.jit
    def copy(
        self,
        scope: Scope,
        box: Box,
        place: Key,
        target: cute.Tensor,
        barrier: cute.Pointer,
    ) -> None:
        """Start one box, to all CTAs of the cluster that share tiles of keys."""
        to_shared, from_global = partition_box(scope.k, box, place, target)
        sharers = self.plan.config.sharers
        if cutlass.const_expr(sharers == 1):
            cute.copy(scope.k.atom, from_global, to_shared, tma_bar_ptr=barrier)
        else:
            mask = Uint16(Int32((1 << sharers) - 1) << (scope.work.rank * sharers))
            cute.copy(scope.k.atom, from_global, to_shared, tma_bar_ptr=barrier, mcast_mask=mask)


def bits_of_part(part: int, rows: int, half: int) -> int:
    """Return the bits of a box's keys within half a tile."""
    return ((1 << rows) - 1) << (part * rows) >> (half * KEYS // 2) & 0xFFFFFFFF
