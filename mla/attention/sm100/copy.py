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

from kernelkit.device.pipelines import Ring, producer_state_at
from kernelkit.device.shared_words import store
from kernelkit.device.warp_mma import copy_chunk
from kernelkit.plan import hw
from mla.attention.shared.entries import NOWHERE, data_of, number_of, source_of
from mla.attention.shared.intake import HALF, LINE_BYTES, Intake, Spread
from mla.attention.shared.units import unit_of_copy
from mla.attention.sm100.args import Scope
from mla.attention.sm100.load import free
from mla.attention.sm100.plan import (
    COLUMNS,
    KEYS,
    OWN_KEYS,
    PIECE_BYTES,
    PIECES,
    S_STAGES,
    Plan100,
)

SPREAD = Spread(8, 16)  # of the entries of a warp
UNIT = 16  # bytes of a copy


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
                self.mark(intake, scope, number)
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
        ring = self.ring(scope)
        ring.wait_free(free(part, number))
        if cutlass.const_expr(self.values):
            line = line_in(scope.buffers.v, part * PIECE_BYTES)
            first = scope.work.sharer * (COLUMNS * 2)
            for panel in cutlass.range_constexpr(HALF):
                copy_panel(intake, scope, places, line, panel, first + panel * LINE_BYTES)
        else:
            line = line_in(scope.buffers.k, 0)
            for panel in self.plan.groups[part]:
                copy_panel(intake, scope, places, line, panel, panel * LINE_BYTES)
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
        first, count = keys_of_tile(intake, scope, number)
        count = count if number < end else Int32(0)
        for turn in cutlass.range_constexpr(SPREAD.turns):
            key = first + row + turn * SPREAD.at_once
            numbers[turn] = number_of(intake, scope, key, count)

    @cute.jit
    def mark(self, intake: cutlass.Constexpr, scope: Scope, number: Int32) -> None:
        """Store which keys of a tile are entries, a bit each; each warp a word."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() - self.role.first_warp
        first, count = keys_of_tile(intake, scope, number)
        found = number_of(intake, scope, first + warp * hw.WARP_THREADS + lane, count)
        bits = Uint32(cute.arch.vote_ballot_sync(found >= 0))
        state = producer_state_at(S_STAGES, number)
        scope.pipes.marks.wait_free(state)
        if lane == 0:
            store(scope.buffers.marks + state.index * (KEYS // 8) + warp * 4, Uint32, (bits,))
        cute.arch.sync_warp()
        scope.pipes.marks.signal(state.index)


@cute.jit
def keys_of_tile(intake: cutlass.Constexpr, scope: Scope, number: Int32) -> tuple[Int32, Int32]:
    """Return the first key of a tile of this pair in its source, and how many the source has."""
    tile, count = scope.work.begin + number, scope.work.keys
    if cutlass.const_expr(intake.which == 1):
        tile, count = tile - scope.work.own_tiles, scope.work.extra
    return tile * KEYS, count


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
def copy_panel(
    intake: cutlass.Constexpr,
    scope: Scope,
    places: cute.Tensor,
    line: Int32,
    panel: cutlass.Constexpr,
    begin: Int32,
) -> None:
    """Start the copies of a panel, at byte `begin` of an entry; zeros of what is no entry."""
    source, lane = source_of(scope, intake), cute.arch.lane_idx() % SPREAD.lanes
    for turn in cutlass.range_constexpr(SPREAD.turns):
        address = data_of(source, places[turn]) + begin + lane * UNIT
        copy_chunk(unit_of_copy(line, panel, turn), address, places[turn] != NOWHERE)


@cute.jit
def tell(ring: Ring, part: Int32) -> None:
    """Tell the leader that this warp's copies of a group have come."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    ring.signal(part)


@cute.jit
def line_in(buffer: cute.Pointer, place: cutlass.Constexpr) -> Int32:
    """Return the address of the lane's first row in a panel."""
    thread, _, _ = cute.arch.thread_idx()
    row = thread % 128 // 32 * SPREAD.rows + thread % 32 // SPREAD.lanes
    return buffer.toint() + place + row * LINE_BYTES
