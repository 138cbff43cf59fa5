"""Copy roles: four warps each copy listed entries in bf16, as keys and as values (device code).

These are entries that TMA cannot fetch by their numbers, see `Plan100.gathers`: those of pages that
lie apart, and of pages that a table lists.

A warp has 16 of 64 keys, and eight lanes share an entry. The tensor core waits for both CTAs of the
pair, so that copies have to be told across: a warp tells a group of copies once it has started the
next one, by when they have mostly come.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernelkit.device.pipelines import Ring
from mla.attention.shared.entries import NOWHERE, source_of
from mla.attention.shared.intake import HALF, LINE_BYTES, Intake, Spread
from mla.attention.shared.units import copy_panel
from mla.attention.sm100.args import Scope
from mla.attention.sm100.listed import look_up, mark, number_to_mark, tell
from mla.attention.sm100.load import free
from mla.attention.sm100.plan import COLUMNS, OWN_KEYS, PIECE_BYTES, PIECES, Plan100

SPREAD = Spread(8, 16)  # of the entries of a warp


class Copy:
    """Copies the CTA's keys for Q K^T, or half of the columns of all keys for P V."""

    def __init__(self, plan: Plan100, values: bool) -> None:
        self.plan, self.values = plan, values
        self.role = plan.roles["copy_v" if values else "copy_k"]
        self.parts = PIECES if values else len(plan.groups)  # groups of copies of a tile
        self.intakes = tuple(
            Intake(which, keys, SPREAD, 1, "") for which, keys in enumerate(plan.config.sources)
        )

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        work, ring = scope.work, self.ring(scope)
        middle = cutlass.min(cutlass.max(work.own_tiles - work.begin, 0), work.count)
        if middle > 0:  # else the first tile would lie outside of the source
            self.stream(self.intakes[0], scope, Int32(0), middle)
        if cutlass.const_expr(self.plan.config.extra is not None):
            if middle < work.count:
                self.stream(self.intakes[1], scope, middle, work.count)
        if work.count > 0:
            cute.arch.cp_async_wait_group(0)
            tell(ring, Int32(self.parts - 1))
        for part in cutlass.range_constexpr(self.parts):
            # Releases come from the leader, and have to find this CTA alive.
            ring.wait_free(free(part, work.count))

    def ring(self, scope: Scope) -> Ring:
        return scope.pipes.v if self.values else scope.pipes.k

    @cute.jit
    def stream(self, intake: cutlass.Constexpr, scope: Scope, begin: Int32, end: Int32) -> None:
        """Copy the tiles [begin, end) of this CTA, whose keys are of one source."""
        pieces = PIECES if cutlass.const_expr(self.values) else 1
        places, numbers = (
            [cute.make_rmem_tensor(SPREAD.turns, kind) for _ in range(pieces)]
            for kind in (Uint32, Int32)
        )
        for piece in cutlass.range_constexpr(pieces):
            self.look_up(intake, scope, begin, end, piece, numbers[piece])
        for number in cutlass.range(begin, end, unroll=1):
            for piece in cutlass.range_constexpr(pieces):
                find(intake, scope, numbers[piece], places[piece])
                self.look_up(intake, scope, number + 1, end, piece, numbers[piece])
            if cutlass.const_expr(self.values):
                warp = cute.arch.warp_idx() - self.role.first_warp
                mark(scope, warp, number, number_to_mark(intake, scope, warp, number, end))
            for part in cutlass.range_constexpr(self.parts):
                piece = part if cutlass.const_expr(self.values) else 0
                self.copy_part(intake, scope, number, part, places[piece])

    @cute.jit
    def copy_part(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        number: Int32,
        part: cutlass.Constexpr,
        places: cute.Tensor,
    ) -> None:
        """Copy a group of panels of a tile, and tell the group before."""
        ring, source = self.ring(scope), source_of(scope, intake)
        ring.wait_free(free(part, number))
        if cutlass.const_expr(self.values):
            line = line_in(scope.buffers.v, part * PIECE_BYTES)
            first = scope.work.sharer * (COLUMNS * 2)
            for panel in cutlass.range_constexpr(HALF):
                copy_panel(intake, source, places, line, panel, first + panel * LINE_BYTES)
        else:
            line = line_in(scope.buffers.k, 0)
            for panel in self.plan.groups[part]:
                copy_panel(intake, source, places, line, panel, panel * LINE_BYTES)
        cute.arch.cp_async_commit_group()
        if cutlass.const_expr(part > 0):
            cute.arch.cp_async_wait_group(1)
            tell(ring, Int32(part - 1))
        else:
            if number > 0:
                cute.arch.cp_async_wait_group(1)
                tell(ring, Int32(self.parts - 1))

    @cute.jit
    def look_up(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        number: Int32,
        end: Int32,
        piece: cutlass.Constexpr,
        numbers: cute.Tensor,
    ) -> None:
        """Load the numbers of this lane's entries in tile `number`; -1 from tile `end` on.

        piece: of V. For Q K^T there is one, the CTA's own.
        """
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() - self.role.first_warp
        half = Int32(piece) if cutlass.const_expr(self.values) else scope.work.sharer
        row = half * OWN_KEYS + warp * SPREAD.rows + lane // SPREAD.lanes
        look_up(intake, scope, number, end, row, numbers)


@cute.jit
def find(
    intake: cutlass.Constexpr, scope: Scope, numbers: cute.Tensor, places: cute.Tensor
) -> None:
    """Find the entries with these numbers: distances from the cache's begin in 16 bytes."""
    rows, strides = intake.keys.rows, source_of(scope, intake).store.stride
    for turn in cutlass.range_constexpr(SPREAD.turns):
        slot, row = numbers[turn] // rows, numbers[turn] % rows
        place = Int64(slot) * strides[0] + Int64(row) * strides[1] >> 3
        places[turn] = Uint32(place) if numbers[turn] >= 0 else Uint32(NOWHERE)


@cute.jit
def line_in(buffer: cute.Pointer, place: cutlass.Constexpr) -> Int32:
    """Return the address of the lane's first row in a panel."""
    thread, _, _ = cute.arch.thread_idx()
    row = thread % 128 // 32 * SPREAD.rows + thread % 32 // SPREAD.lanes
    return buffer.toint() + place + row * LINE_BYTES
