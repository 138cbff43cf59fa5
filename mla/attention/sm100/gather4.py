"""Gather roles: TMA fetches listed entries in bf16, as keys and as values (device code).

An instruction fetches 64 columns of four entries. Four warps start those of K, and four those of V:
a warp alone takes longer to start the 144 of K than the tensor core to multiply. A warp has 16 of
each 64 keys. What is no entry has the number -1, a row out of bounds, which TMA fills with zeros.
The load warps announce the bytes.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint32
from cutlass.cute.nvgpu import cpasync

from kernelkit.device.boxes import Box, TmaTensor
from kernelkit.device.gather4 import GATHERED, describe_rows, gather_panels, map_of
from kernelkit.device.pipelines import producer_state_at
from mla.attention.kernel_arguments import Source
from mla.attention.shared.work import count_of_first
from mla.attention.sm100.args import Scope
from mla.attention.sm100.listed import index_in_tile, number_in_tile
from mla.attention.sm100.load import free, leave, ring_of
from mla.attention.sm100.plan import (
    COLUMNS,
    HALF,
    KEYS,
    OWN_KEYS,
    PANEL,
    PANEL_BYTES,
    PIECE_BYTES,
    PIECES,
    S_STAGES,
    Plan100,
)

LINE = PANEL * 2  # bytes of an entry in a panel
OWN = 16  # keys of a warp of each 64; lanes hold the numbers of two times as many


@cute.jit
def rows_of(source: Source) -> TmaTensor:
    """Return the entries of a cache as TMA fetches them. Its slots have one row."""
    slots, _, columns = source.store.shape
    layout = cute.make_layout((slots, columns), stride=(source.store.stride[0], 1))
    return describe_rows(cute.make_tensor(source.store.iterator, layout), Box(1, PANEL, BFloat16))


def panels_of(plan: Plan100, values: bool) -> tuple[range, ...]:
    """Return the panels of each group of K, or of each piece of V."""
    return (range(HALF),) * PIECES if values else plan.groups


@cute.jit
def announce(plan: Plan100, scope: Scope, values: cutlass.Constexpr) -> None:
    """Announce the bytes of all tiles, by one warp. A copy may come before: until the arrival here,
    its bytes are less than nothing.
    """
    ring, parts = ring_of(scope, values), panels_of(plan, values)
    for number in cutlass.range(scope.work.count, unroll=1):
        for part in cutlass.range_constexpr(len(parts)):
            ring.acquire_bytes(free(part, number), len(parts[part]) * PANEL_BYTES)
    leave(ring, len(parts), scope.work.count)


class Gather:
    """Fetches the CTA's keys for Q K^T, or half of the columns of all keys for P V."""

    def __init__(self, plan: Plan100, values: bool) -> None:
        self.plan, self.values = plan, values
        self.role = plan.roles["gather_v" if values else "gather_k"]
        self.intakes = plan.intakes

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        work = scope.work
        middle = count_of_first(work)
        if middle > 0:  # else the first tile would lie outside of the source
            self.stream(self.intakes[0], scope, scope.rows, Int32(0), middle)
        if cutlass.const_expr(self.plan.config.extra is not None):
            if middle < work.count:
                self.stream(self.intakes[1], scope, scope.extra_rows, middle, work.count)

    @cute.jit
    def stream(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        tma: TmaTensor,
        begin: Int32,
        end: Int32,
    ) -> None:
        """Fetch the tiles [begin, end) of this CTA, whose keys are of one source."""
        cpasync.prefetch_descriptor(tma.atom)
        parts = len(panels_of(self.plan, self.values))
        index = index_in_tile(intake, scope, begin, end, self.row(scope))
        for number in cutlass.range(begin, end, unroll=1):
            own = number_in_tile(intake, scope, number, index, self.row(scope))
            index = index_in_tile(intake, scope, number + 1, end, self.row(scope))
            if cutlass.const_expr(self.values):
                self.mark(scope, number, own)
            entries = of_lanes(own, PIECES * OWN if self.values else OWN)
            for part in cutlass.range_constexpr(parts):
                first = part * OWN if cutlass.const_expr(self.values) else 0
                self.fetch(scope, tma, number, part, entries[first : first + OWN])

    @cute.jit
    def row(self, scope: Scope) -> Int32:
        """Return the row of a tile that this lane looks up.

        The second half of the lanes has keys of the second piece of V; of K they repeat the first.
        """
        lane, half = cute.arch.lane_idx(), scope.work.sharer
        if cutlass.const_expr(self.values):
            half = lane // OWN
        return half * OWN_KEYS + self.warp() * OWN + lane % OWN

    def warp(self) -> Int32:
        """Return the number of this warp in the role."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) - self.role.first_warp

    @cute.jit
    def fetch(
        self,
        scope: Scope,
        tma: TmaTensor,
        number: Int32,
        part: cutlass.Constexpr,
        entries: cutlass.Constexpr,
    ) -> None:
        """Start the copies of this warp's entries, for a group of K or a piece of V."""
        ring, panels = ring_of(scope, self.values), panels_of(self.plan, self.values)[part]
        column, target = Int32(0), scope.buffers.k.toint()
        if cutlass.const_expr(self.values):
            column = scope.work.sharer * COLUMNS
            target = scope.buffers.v.toint() + part * PIECE_BYTES
        target += self.warp() * (OWN * LINE)
        places = tuple((panel * PANEL, panel * PANEL_BYTES) for panel in panels)
        ring.wait_free(free(part, number))
        barrier, tensor_map = ring.barrier(Int32(part)).toint(), map_of(tma)
        with cute.arch.elect_one():
            for first in cutlass.range_constexpr(0, OWN, GATHERED):
                rows = tuple(entries[first : first + GATHERED])
                line = target + first * LINE
                gather_panels(True, tensor_map, rows, column, line, barrier, places)

    @cute.jit
    def mark(self, scope: Scope, number: Int32, own: Int32) -> None:
        """Store which of this warp's keys of a tile are entries, 16 bits of each piece."""
        state, lane = producer_state_at(S_STAGES, number), cute.arch.lane_idx()
        bits = Uint32(cute.arch.vote_ballot_sync(own >= 0))
        scope.pipes.marks.wait_free(state)
        if lane % OWN == 0:
            place = lane // OWN * (OWN_KEYS // 8) + self.warp() * (OWN // 8)
            cute.arch.inline_ptx(
                "{ .reg .b16 low, high; mov.b32 {low, high}, {$r1}; st.shared.b16 [{$r0}], low; }",
                read_only_args=[
                    scope.buffers.marks + state.index * (KEYS // 8) + place,
                    bits >> Uint32(lane),
                ],
            )
        cute.arch.sync_warp()
        scope.pipes.marks.signal(state.index)


def of_lanes(value: Int32, count: int) -> tuple[Int32, ...]:
    """Return the values of the first lanes of the warp."""
    return tuple(cute.arch.shuffle_sync(value, lane) for lane in range(count))
