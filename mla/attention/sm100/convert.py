"""Convert roles: four warps each bring entries of caches with codes, as keys and as values (device
code).

A CTA converts its 64 keys for Q K^T, and its half of the columns of all 128 keys for P V: what it
multiplies, and so no CTA waits for another one's stores. Both are two parts of 64 keys and 256
columns. A warp has 16 of the keys, and four lanes share an entry. A lane holds both parts of a tile
in registers. As soon as it has converted a chunk it loads that of the next tile in its place.
Columns in bf16 next to codes, and entries in bf16 beside a source with codes, come by cp.async.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernelkit.device.pipelines import Ring
from mla.attention.shared.entries import (
    Entries,
    find_entries,
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
from mla.attention.sm100.args import Scope
from mla.attention.sm100.listed import look_up, mark, tell
from mla.attention.sm100.load import free
from mla.attention.sm100.plan import OWN_KEYS, PIECE_BYTES, PIECES, Plan100

PARTS = 2  # of a tile: halves of K, pieces of V
BESIDE = 2  # stage of K behind its halves


@dataclass(frozen=True)
class Part:
    """What a lane has of a part of a tile, in registers."""

    numbers: cute.Tensor  # (entry,), of the next tile; those of K have one tensor
    entries: Entries
    held: Held


class Convert:
    """Converts the CTA's keys for Q K^T, or half of the columns of all keys for P V."""

    def __init__(self, plan: Plan100, values: bool) -> None:
        self.plan, self.values = plan, values
        self.role = plan.roles["copy_v" if values else "copy_k"]
        self.stages = PIECES if values else len(plan.groups)

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        work, intakes = scope.work, self.plan.intakes
        middle = cutlass.min(cutlass.max(work.own_tiles - work.begin, 0), work.count)
        if middle > 0:  # else the first tile would lie outside of the source
            self.stream(intakes[0], scope, Int32(0), middle)
        if cutlass.const_expr(self.plan.config.extra is not None):
            if middle < work.count:
                self.stream(intakes[1], scope, middle, work.count)
        for stage in cutlass.range_constexpr(self.stages):
            # Releases come from the leader, and have to find this CTA alive.
            self.ring(scope).wait_free(free(stage, work.count))

    def ring(self, scope: Scope) -> Ring:
        return scope.pipes.v if self.values else scope.pipes.k

    @cute.jit
    def stream(self, intake: cutlass.Constexpr, scope: Scope, begin: Int32, end: Int32) -> None:
        """Bring the tiles [begin, end) of this CTA, whose keys are of one source."""
        if cutlass.const_expr(intake.converts):
            self.convert_all(intake, scope, begin, end)
        else:
            self.copy_all(intake, scope, begin, end)

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
    def look_up(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        number: Int32,
        end: Int32,
        part: cutlass.Constexpr,
        numbers: cute.Tensor,
    ) -> None:
        """Load the numbers of the lane's entries of a part in tile `number`."""
        piece = Int32(part) if cutlass.const_expr(self.values) else scope.work.sharer
        look_up(intake, scope, number, end, piece * OWN_KEYS + self.row(intake), numbers)

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
        self, intake: cutlass.Constexpr, scope: Scope, begin: Int32, end: Int32
    ) -> None:
        """Convert the tiles [begin, end), part by part."""
        parts, source = self.make_parts(intake), source_of(scope, intake)
        for part in cutlass.range_constexpr(PARTS):
            self.look_up(intake, scope, begin, end, part, parts[part].numbers)
        for part in cutlass.range_constexpr(PARTS):
            first, half = make_entries(intake), self.half_of(scope, part)
            find_entries(intake, source, parts[part].numbers, half, first)
            for turn in cutlass.range_constexpr(intake.spread.turns):
                for chunk in cutlass.range_constexpr(intake.chunks):
                    fetch_chunk(intake, source, first, parts[part].held, (turn, chunk), half)
            if cutlass.const_expr(self.stores_rest(intake, part)):
                fetch_rest(intake, source, first, parts[part].held)
            take_over(intake, parts[part].entries, first)
        for part in cutlass.range_constexpr(PARTS):
            self.look_up(intake, scope, begin + 1, end, part, parts[part].numbers)
        for number in cutlass.range(begin, end, unroll=1):
            if cutlass.const_expr(self.values):
                mark(intake, scope, self.warp(), number)
            for part in cutlass.range_constexpr(PARTS):
                self.convert(intake, scope, number, part, parts[part])
            for part in cutlass.range_constexpr(PARTS):
                self.look_up(intake, scope, number + 2, end, part, parts[part].numbers)

    def make_parts(self, intake: cutlass.Constexpr) -> list[Part]:
        """Return the registers of both parts."""
        numbers = [cute.make_rmem_tensor(intake.spread.turns, Int32) for _ in range(PARTS)]
        return [
            Part(numbers[part if self.values else 0], make_entries(intake), make_held(intake))
            for part in range(PARTS)
        ]

    @cute.jit
    def convert(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        number: Int32,
        part: cutlass.Constexpr,
        own: Part,
    ) -> None:
        """Convert what the lane holds of a part, once its stage is free, and load the next tile."""
        ring, source, half = self.ring(scope), source_of(scope, intake), self.half_of(scope, part)
        following = make_entries(intake)
        find_entries(intake, source, own.numbers, half, following)
        ring.wait_free(free(part, number))
        if cutlass.const_expr(self.has_beside(part)):
            ring.wait_free(free(BESIDE, number))
        self.copy_beside(intake, scope, part, own)
        line = self.line_of(intake, scope, part)
        target = Target(units_at(line, intake.form.code), Int32(0), Int32(0))
        for turn in cutlass.range_constexpr(intake.spread.turns):
            for chunk in cutlass.range_constexpr(intake.chunks):
                store_chunk(intake, own.held, own.entries, target, (turn, chunk), half)
                fetch_chunk(intake, source, following, own.held, (turn, chunk), half)
        if cutlass.const_expr(self.stores_rest(intake, part)):
            store_rest(intake, own.held, target, self.line_of(intake, scope, 0))
            fetch_rest(intake, source, following, own.held)
        if cutlass.const_expr(intake.copies_wide):
            cute.arch.cp_async_wait_group(0)
        tell(ring, Int32(part))
        if cutlass.const_expr(self.has_beside(part)):
            tell(ring, Int32(BESIDE))
        take_over(intake, own.entries, following)

    # ---- the panel beside the codes of both halves

    def has_beside(self, part: int) -> bool:
        """Whether the panel of K behind its halves comes with a part."""
        return not self.values and part == PARTS - 1 and self.stages > BESIDE

    def stores_rest(self, intake: cutlass.Constexpr, part: int) -> bool:
        """Whether codes of that panel come with a part."""
        return bool(intake.rest) and self.has_beside(part)

    @cute.jit
    def copy_beside(
        self, intake: cutlass.Constexpr, scope: Scope, part: cutlass.Constexpr, own: Part
    ) -> None:
        """Start the copies of columns in bf16 next to the codes of a part."""
        if cutlass.const_expr(intake.copies_wide):
            source, is_value = source_of(scope, intake), intake.rest_panel < PANELS
            if cutlass.const_expr(not self.values and part == PARTS - 1):
                copy_wide(intake, source, own.entries, self.line_of(intake, scope, 0))
            elif cutlass.const_expr(self.values and is_value):
                if scope.work.sharer == 1:
                    # The line of what would be V's first panel, were all panels there.
                    line = self.line_of(intake, scope, part) - HALF * PANEL_BYTES
                    copy_wide(intake, source, own.entries, line)
            cute.arch.cp_async_commit_group()

    # ---- entries in bf16

    @cute.jit
    def copy_all(self, intake: cutlass.Constexpr, scope: Scope, begin: Int32, end: Int32) -> None:
        """Copy the tiles [begin, end)."""
        pieces = PIECES if cutlass.const_expr(self.values) else 1
        numbers = [cute.make_rmem_tensor(intake.spread.turns, Int32) for _ in range(pieces)]
        entries = [make_entries(intake) for _ in range(pieces)]
        source, ring = source_of(scope, intake), self.ring(scope)
        for piece in cutlass.range_constexpr(pieces):
            self.look_up(intake, scope, begin, end, piece, numbers[piece])
        for number in cutlass.range(begin, end, unroll=1):
            for piece in cutlass.range_constexpr(pieces):
                find_entries(intake, source, numbers[piece], Int32(0), entries[piece])
                self.look_up(intake, scope, number + 1, end, piece, numbers[piece])
            if cutlass.const_expr(self.values):
                mark(intake, scope, self.warp(), number)
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
