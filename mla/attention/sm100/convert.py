"""Convert roles: four warps each bring entries that TMA cannot, as keys and as values (device
code).

A CTA converts its 64 keys for Q K^T, and its half of the columns of all 128 keys for P V: what it
multiplies, and so no CTA waits for another one's stores. Both are two parts of 64 keys and 256
columns. A warp has 16 of the keys, and four lanes share an entry. A lane holds both parts of a tile
in registers. Once it has converted a part it loads that of the next tile in its place. In the first
tile, which all wait for, values are loaded after keys.
Columns in bf16 next to codes come by cp.async, and so do entries in bf16: those of pages that lie
apart or that a table lists, and those beside a source with codes.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernelkit.device.barriers import arrive, meet
from mla.attention.shared.entries import (
    Entries,
    find_entries,
    index_type,
    make_entries,
    source_of,
    take_over,
)
from mla.attention.shared.intake import HALF, LINE_BYTES, PANEL_BYTES, PANELS
from mla.attention.shared.units import (
    Held,
    Target,
    copy_panel,
    copy_wide,
    fetch_chunk,
    fetch_rest,
    make_held,
    store_chunk,
    store_rest,
    units_at,
)
from mla.attention.shared.work import count_of_first
from mla.attention.sm100.args import Scope
from mla.attention.sm100.listed import (
    index_in_tile,
    look_up,
    mark,
    number_in_tile,
    numbers_in_tile,
    row_to_mark,
    tell,
)
from mla.attention.sm100.load import free, leave, ring_of
from mla.attention.sm100.plan import OWN_KEYS, PIECE_BYTES, PIECES, Plan100

PARTS = 2  # of a tile: halves of K, pieces of V
BESIDE = 2  # stage of K behind its halves


@dataclass(frozen=True)
class Part:
    """What a lane has of a part of a tile, in registers."""

    indices: cute.Tensor  # (entry,), of the next tile; both parts of K have the same
    entries: Entries
    held: Held


class Convert:
    """Converts the CTA's keys for Q K^T, or half of the columns of all keys for P V."""

    def __init__(self, plan: Plan100, values: bool) -> None:
        self.plan, self.values = plan, values
        self.role = plan.roles["copy_v" if values else "copy_k"]
        self.stages = PIECES if values else len(plan.groups)
        # Keys are what a CTA waits for; and values have no registers left.
        self.intakes = tuple(replace(each, holds_wide=not values) for each in plan.intakes)

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        work, intakes = scope.work, self.intakes
        middle = count_of_first(work)
        shares = ((Int32(0), middle), (middle, work.count))
        firsts = [self.make_indices(intake) for intake in intakes]
        for which in cutlass.range_constexpr(len(intakes)):
            self.look_up_all(intakes[which], scope, *shares[which], firsts[which])
        for which in cutlass.range_constexpr(len(intakes)):
            begin, end = shares[which]
            if begin < end:
                self.stream(intakes[which], scope, begin, end, firsts[which])
        leave(ring_of(scope, self.values), self.stages, work.count)

    @cute.jit
    def stream(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        begin: Int32,
        end: Int32,
        indices: list[cute.Tensor],
    ) -> None:
        """Bring the tiles [begin, end) of this CTA, whose keys are of one source.

        indices: of the lane's keys in the first of the tiles.
        """
        if cutlass.const_expr(intake.converts):
            self.convert_all(intake, scope, begin, end, indices)
        else:
            self.copy_all(intake, scope, begin, end, indices)

    # ---- places

    @cute.jit
    def warp(self) -> Int32:
        """Return which of the role's warps this is."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) - self.role.first_warp

    @cute.jit
    def row(self, intake: cutlass.Constexpr) -> Int32:
        """Return the lane's first row among 64 keys."""
        return self.warp() * intake.spread.rows + cute.arch.lane_idx() // intake.spread.lanes

    @cute.jit
    def row_of(self, intake: cutlass.Constexpr, scope: Scope, piece: cutlass.Constexpr) -> Int32:
        """Return the lane's first row in a tile: of a piece of V, or of the CTA's own keys."""
        keys = Int32(piece) if cutlass.const_expr(self.values) else scope.work.sharer
        return keys * OWN_KEYS + self.row(intake)

    def make_indices(self, intake: cutlass.Constexpr) -> list[cute.Tensor]:
        """Return registers for the indices of the lane's keys in a tile: among 64 keys each."""
        size, pieces = intake.spread.turns, PIECES if self.values else 1
        return [cute.make_rmem_tensor(size, index_type(intake)) for _ in range(pieces)]

    @cute.jit
    def look_up_all(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        number: Int32,
        end: Int32,
        indices: list[cute.Tensor],
    ) -> None:
        """Load the indices of the lane's keys in tile `number`; -1 from tile `end` on."""
        for piece in cutlass.range_constexpr(len(indices)):
            row = self.row_of(intake, scope, piece)
            look_up(intake, scope, number, end, row, indices[piece])

    @cute.jit
    def line_of(self, intake: cutlass.Constexpr, scope: Scope, part: cutlass.Constexpr) -> Int32:
        """Return the address of the lane's first row in the first panel of a part."""
        begin = scope.buffers.k.toint() + part * (HALF * PANEL_BYTES)
        if cutlass.const_expr(self.values):
            begin = scope.buffers.v.toint() + part * PIECE_BYTES
        return begin + self.row(intake) * LINE_BYTES

    @cute.jit
    def half_of(self, scope: Scope, part: cutlass.Constexpr) -> Int32:
        """Return which half of the columns a part has."""
        return scope.work.sharer if cutlass.const_expr(self.values) else Int32(part)

    # ---- entries with codes

    @cute.jit
    def convert_all(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        begin: Int32,
        end: Int32,
        indices: list[cute.Tensor],
    ) -> None:
        """Convert the tiles [begin, end), part by part."""
        parts = [
            Part(indices[part if self.values else 0], make_entries(intake), make_held(intake))
            for part in range(PARTS)
        ]
        if cutlass.const_expr(self.values):
            if begin == 0:
                meet(self.plan.barriers, "first")
        for part in cutlass.range_constexpr(PARTS):
            self.fetch(intake, scope, begin, part, parts[part])
        if cutlass.const_expr(not self.values):
            if begin == 0:
                arrive(self.plan.barriers, "first")
        self.look_up_all(intake, scope, begin + 1, end, indices)
        marked = self.index_to_mark(intake, scope, begin, end)
        for number in cutlass.range(begin, end, unroll=1):
            marked = self.mark(intake, scope, number, end, marked)
            for part in cutlass.range_constexpr(PARTS):
                self.convert(intake, scope, number, part, parts[part])
                if number + 1 < end:
                    self.fetch(intake, scope, number + 1, part, parts[part])
            self.look_up_all(intake, scope, number + 2, end, indices)

    @cute.jit
    def index_to_mark(
        self, intake: cutlass.Constexpr, scope: Scope, number: Int32, end: Int32
    ) -> Int32 | Int64:
        """Load the index of the key that the lane marks in tile `number`, if it marks any."""
        if cutlass.const_expr(not self.values):
            return index_type(intake)(-1)
        return index_in_tile(intake, scope, number, end, row_to_mark(self.warp()))

    @cute.jit
    def mark(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        number: Int32,
        end: Int32,
        index: Int32 | Int64,
    ) -> Int32 | Int64:
        """Mark the keys of a tile; return what `index_to_mark` does for the next one."""
        following = self.index_to_mark(intake, scope, number + 1, end)
        if cutlass.const_expr(self.values):
            row = row_to_mark(self.warp())
            found = number_in_tile(intake, scope, number, index, row)
            mark(scope, self.warp(), number, found)
        return following

    @cute.jit
    def fetch(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        number: Int32,
        part: cutlass.Constexpr,
        own: Part,
    ) -> None:
        """Find the entries of a part of a tile, and load their scales and the lane's chunks."""
        source, half = source_of(scope, intake), self.half_of(scope, part)
        row = self.row_of(intake, scope, part)
        numbers = numbers_in_tile(intake, scope, number, own.indices, row)
        find_entries(intake, source, numbers, half, own.entries)
        for turn in cutlass.range_constexpr(intake.spread.turns):
            for chunk in cutlass.range_constexpr(intake.chunks):
                fetch_chunk(intake, source, own.entries, own.held, (turn, chunk), half)
        if cutlass.const_expr(self.stores_rest(intake, part)):
            fetch_rest(intake, source, own.entries, own.held)

    @cute.jit
    def convert(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        number: Int32,
        part: cutlass.Constexpr,
        own: Part,
    ) -> None:
        """Convert and store what the lane holds of a part, once its stage is free."""
        ring, half = ring_of(scope, self.values), self.half_of(scope, part)
        entries = make_entries(intake)
        ring.wait_free(free(part, number))
        if cutlass.const_expr(self.has_beside(part)):
            ring.wait_free(free(BESIDE, number))
        self.copy_beside(intake, scope, part, own)
        take_over(intake, entries, own.entries)
        line = self.line_of(intake, scope, part)
        target = Target(units_at(line, intake.form.code), Int32(0), Int32(0))
        for turn in cutlass.range_constexpr(intake.spread.turns):
            for chunk in cutlass.range_constexpr(intake.chunks):
                store_chunk(intake, own.held, entries, target, (turn, chunk), half)
        if cutlass.const_expr(self.stores_rest(intake, part)):
            store_rest(intake, own.held, target, self.line_of(intake, scope, 0))
        if cutlass.const_expr(intake.copies_wide):
            cute.arch.cp_async_wait_group(0)
        tell(ring, Int32(part))
        if cutlass.const_expr(self.has_beside(part)):
            tell(ring, Int32(BESIDE))

    # ---- the panel beside the codes of both halves

    def has_beside(self, part: int) -> bool:
        """Whether the panel of K behind its halves comes with a part."""
        return not self.values and part == PARTS - 1 and self.stages > BESIDE

    def stores_rest(self, intake: cutlass.Constexpr, part: int) -> bool:
        """Whether registers hold that panel of a part."""
        return bool(intake.rest) and not self.values and part == PARTS - 1

    @cute.jit
    def copy_beside(
        self, intake: cutlass.Constexpr, scope: Scope, part: cutlass.Constexpr, own: Part
    ) -> None:
        """Start the copies of columns in bf16 next to the codes of values."""
        if cutlass.const_expr(intake.copies_wide):
            source = source_of(scope, intake)
            if cutlass.const_expr(intake.rest_panel < PANELS):
                if scope.work.sharer == 1:
                    # The line of what would be V's first panel, were all panels there.
                    line = self.line_of(intake, scope, part) - HALF * PANEL_BYTES
                    copy_wide(intake, source, own.entries, line)
            cute.arch.cp_async_commit_group()

    # ---- entries in bf16

    @cute.jit
    def copy_all(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        begin: Int32,
        end: Int32,
        indices: list[cute.Tensor],
    ) -> None:
        """Copy the tiles [begin, end)."""
        entries = [make_entries(intake) for _ in indices]
        source, ring = source_of(scope, intake), ring_of(scope, self.values)
        marked = self.index_to_mark(intake, scope, begin, end)
        for number in cutlass.range(begin, end, unroll=1):
            for piece in cutlass.range_constexpr(len(indices)):
                row = self.row_of(intake, scope, piece)
                numbers = numbers_in_tile(intake, scope, number, indices[piece], row)
                find_entries(intake, source, numbers, Int32(0), entries[piece])
            self.look_up_all(intake, scope, number + 1, end, indices)
            marked = self.mark(intake, scope, number, end, marked)
            for stage in cutlass.range_constexpr(self.stages):
                ring.wait_free(free(stage, number))
                places = entries[stage if cutlass.const_expr(self.values) else 0].places
                self.copy(intake, scope, stage, places)
                cute.arch.cp_async_commit_group()
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.cp_async_wait_group(self.stages - 1 - stage)
                tell(ring, Int32(stage))

    @cute.jit
    def copy(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        stage: cutlass.Constexpr,
        places: cute.Tensor,
    ) -> None:
        """Start the copies of a stage."""
        source = source_of(scope, intake)
        if cutlass.const_expr(self.values):
            line = self.line_of(intake, scope, stage)
            begin = scope.work.sharer * (HALF * LINE_BYTES)
            for panel in cutlass.range_constexpr(HALF):
                copy_panel(intake, source, places, line, panel, begin + panel * LINE_BYTES)
        else:
            line = self.line_of(intake, scope, 0)
            for panel in self.plan.groups[stage]:
                copy_panel(intake, source, places, line, panel, panel * LINE_BYTES)
