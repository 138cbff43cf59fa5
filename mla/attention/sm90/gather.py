"""Gather role: one or two warpgroups fetch the entries of a tile, convert them to bf16 or fp16, and
store them as TMA would (device code).

Codes have two warpgroups, which fill a half of each tile; one copy of the code serves both, since
an SM's caches of instructions are small. A warp has as many entries as its three neighbours. Lanes
hold chunks of codes in registers. As soon as a lane has converted a chunk it loads a later one in
its place. What comes after that is requested to L2 a tile ahead.
Entries in bf16 go to shared memory by cp.async.

Two CTAs with the same keys may cross: each gathers half of the rows of a tile, and gives them to
the other, too, so that a code is converted once. A piece is free once both have released it, and
full once the own threads have arrived and the other's bytes have come.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernelkit.device.pipelines import Ring
from kernelkit.plan import hw
from mla.attention.shared.entries import entry_of_turn, request, source_of
from mla.attention.shared.intake import HALF, LINE_BYTES, PANEL_BYTES, PANELS
from mla.attention.shared.units import (
    Held,
    Target,
    copy_panel,
    copy_wide,
    fetch_chunk,
    fetch_rest,
    has_rest,
    make_held,
    move_up,
    store_chunk,
    store_rest,
    units_at,
)
from mla.attention.shared.work import count_of_first
from mla.attention.sm90 import halves
from mla.attention.sm90.args import Scope
from mla.attention.sm90.entries import (
    Entries,
    Indices,
    first_row,
    look_up,
    make_entries,
    make_indices,
    mark,
    resolve,
    take_over,
)
from mla.attention.sm90.halves import store_halves
from mla.attention.sm90.plan import BUFFER_BYTES, BUFFERS, KEYS, UNIT_BYTES, Plan90
from mla.attention.sm90.walk import after, free_state, steps_of, unit_of


class Gather:
    """Fills both pieces of every buffer."""

    def __init__(self, plan: Plan90) -> None:
        self.plan = plan
        self.first_warp = plan.roles["gather"].first_warp
        self.groups = plan.groups

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps. CTAs that cross pass the cluster's first barrier here."""
        plan, past, crosses = self.plan, scope.past, self.plan.crosses
        if cutlass.const_expr(crosses):
            cute.arch.cluster_wait()  # the barriers of the other CTA are initialised
        if cutlass.const_expr(plan.config.ways.resident == 0):
            self.fill(scope)
            past = after(past, scope.work.count)
        else:
            for step in cutlass.range(steps_of(plan, scope.given), unroll=1):
                unit = unit_of(plan, scope, step, past)
                self.fill(unit)
                past = after(past, unit.work.count)
        if cutlass.const_expr(crosses):
            for buffer in cutlass.range_constexpr(BUFFERS):
                # Releases come from the other CTA, too, and have to find this one alive.
                state = free_state(replace(scope, past=past), Int32(buffer))
                scope.pipes.left.wait_free(state)
                scope.pipes.right.wait_free(state)

    @cute.jit
    def fill(self, scope: Scope) -> None:
        """Fill the buffers with the tiles of a unit."""
        work = scope.work
        middle = count_of_first(work)
        self.stream(scope, 0, Int32(0), middle)
        if cutlass.const_expr(self.plan.config.extra is not None):
            self.stream(scope, 1, middle, work.count)

    @cute.jit
    def group(self) -> Int32:
        """Return which warpgroup of the role this is."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return (warp - self.first_warp) // hw.WARPGROUP_WARPS

    @cute.jit
    def stream(self, scope: Scope, which: cutlass.Constexpr, begin: Int32, end: Int32) -> None:
        """Fill the buffers of this CTA's tiles [begin, end), whose keys are of one source."""
        intake = self.plan.intakes[which]
        if begin < end:  # else its first tile would lie before the source
            if cutlass.const_expr(intake.converts):
                self.convert_all(intake, scope, begin, end)
            else:
                self.copy_all(intake, scope, begin, end)

    @cute.jit
    def copy_all(self, intake: cutlass.Constexpr, scope: Scope, begin: Int32, end: Int32) -> None:
        """Fill the buffers of tiles [begin, end) of a source that is copied as it is."""
        indices = make_indices(intake)
        look_up(self.plan, intake, scope, begin, end, indices)
        for number in cutlass.range(begin, end, unroll=1):
            self.copy(intake, scope, number, end, indices)

    # ---- entries that go through registers

    @cute.jit
    def convert_all(
        self, intake: cutlass.Constexpr, scope: Scope, begin: Int32, end: Int32
    ) -> None:
        """Fill this group's half of the buffers of tiles [begin, end) of a source."""
        plan, source, half = self.plan, source_of(scope, intake), self.group()
        held, indices = make_held(intake), make_indices(intake)
        entries, following = make_entries(intake), make_entries(intake)
        look_up(plan, intake, scope, begin, end, indices)
        resolve(plan, intake, scope, (begin, half), indices, following)
        look_up(plan, intake, scope, begin + 1, end, indices)
        entries.places.store(following.places.load())
        for turn in cutlass.range_constexpr(intake.depth):
            for chunk in cutlass.range_constexpr(intake.chunks):
                fetch_chunk(intake, source, entries, held, (turn, chunk), half)
        if cutlass.const_expr(intake.rest_in_turns):
            wanted = has_rest(intake, begin % BUFFERS, half)
            halves.fetch_rest(source, entries.places[0], wanted, held)
        elif cutlass.const_expr(intake.rest != ""):
            if has_rest(intake, begin % BUFFERS, half):
                fetch_rest(intake, source, entries, held)
        for number in cutlass.range(begin, end, unroll=1):
            take_over(intake, entries, following, half)
            resolve(plan, intake, scope, (number + 1, half), indices, following)
            request(intake, source, following, half)
            look_up(plan, intake, scope, number + 2, end, indices)
            self.convert(intake, scope, (number, half), (entries, following), held)

    @cute.jit
    def convert(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        place: tuple[Int32, Int32],
        tiles: tuple[Entries, Entries],
        held: Held,
    ) -> None:
        """Convert what the lane holds of a half, once its buffer is free, and load the next one.

        Args:
            place: (tile of this CTA, half).
            tiles: entries of this tile and of the next one.
        """
        source, (number, half), (entries, following) = source_of(scope, intake), place, tiles
        buffer, state = number % BUFFERS, free_state(scope, number)
        line = self.line_of(intake, scope, buffer)
        if half == 0:
            scope.pipes.left.wait_free(state)
            mark(self.plan, scope, entries, buffer)
        else:
            scope.pipes.right.wait_free(state)
        if cutlass.const_expr(intake.copies_wide):
            if has_rest(intake, buffer, half):
                copy_wide(intake, source, entries, line)
            cute.arch.cp_async_commit_group()
        target = self.target(intake, scope, line, (buffer, half))
        if cutlass.const_expr(self.plan.has_units):
            if half == 0:
                self.store_units(intake, scope, entries, buffer)
        if cutlass.const_expr(intake.may_round):
            if halves.has_odd_scales(intake, entries):
                self.take_turns(intake, scope, tiles, held, target, (buffer, half), True)
            else:
                self.take_turns(intake, scope, tiles, held, target, (buffer, half), False)
        else:
            self.take_turns(intake, scope, tiles, held, target, (buffer, half), False)
        if cutlass.const_expr(intake.rest != "" and not intake.rest_in_turns):
            if has_rest(intake, buffer, half):
                store_rest(intake, held, target, line)
            if has_rest(intake, 1 - buffer, half):
                fetch_rest(intake, source, following, held)
        if cutlass.const_expr(intake.copies_wide):
            cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        if cutlass.const_expr(intake.crosses):
            self.send(intake, scope, (buffer, half), target)
        if half == 0:
            self.arrive(scope.pipes.left, buffer, half)
        else:
            self.arrive(scope.pipes.right, buffer, half)

    @cute.jit
    def take_turns(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        tiles: tuple[Entries, Entries],
        held: Held,
        target: Target,
        piece: tuple[Int32, Int32],
        odd: cutlass.Constexpr,
    ) -> None:
        """Store what the lane holds of a piece, (buffer, half), and load later entries.

        odd: see `store_halves`. A loop of its own keeps the other one short.
        """
        for turn in cutlass.range(intake.spread.turns, unroll=1):  # half as much code
            self.take_turn(intake, scope, tiles, held, target, piece, turn, odd)

    @cute.jit
    def take_turn(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        tiles: tuple[Entries, Entries],
        held: Held,
        target: Target,
        piece: tuple[Int32, Int32],
        turn: Int32,
        odd: cutlass.Constexpr,
    ) -> None:
        """Store the lane's chunks of an entry in a piece, (buffer, half), and load those of a later
        one in their place. odd: see `store_halves`.
        """
        source, (buffer, half) = source_of(scope, intake), piece
        now, later = make_entries(intake), make_entries(intake)
        entry_of_turn(intake, tiles, turn, now, 0)
        entry_of_turn(intake, tiles, turn + intake.depth, later, intake.depth - 1)
        distance = turn * (intake.spread.at_once * LINE_BYTES)
        moved = replace(target, units=tuple(unit + distance for unit in target.units))
        for chunk in cutlass.range_constexpr(intake.chunks):
            if cutlass.const_expr(intake.halves):
                store_halves(intake, held, now, moved, chunk, odd)
            else:
                store_chunk(intake, held, now, moved, (0, chunk), half)
            move_up(intake, held, chunk)
            fetch_chunk(intake, source, later, held, (intake.depth - 1, chunk), half)
        if cutlass.const_expr(intake.rest_in_turns):
            if has_rest(intake, buffer, half):
                line = self.line_of(intake, scope, buffer)
                halves.store_rest(intake, held, target, line + distance)
            which = buffer if turn + 1 < intake.spread.turns else 1 - buffer
            wanted = has_rest(intake, which, half)
            halves.fetch_rest(source, later.places[0], wanted, held)

    @cute.jit
    def store_units(
        self, intake: cutlass.Constexpr, scope: Scope, entries: Entries, buffer: Int32
    ) -> None:
        """Store the units of the warp's keys; 1 if entries of this source have none."""
        row = first_row(self.plan, intake, scope) + cute.arch.lane_idx() // intake.spread.lanes
        address = scope.buffers.units + (buffer * KEYS + row) * UNIT_BYTES
        if cute.arch.lane_idx() % intake.spread.lanes == 0:
            for turn in cutlass.range_constexpr(intake.spread.turns):
                exponent = Uint32(halves.BIAS)
                if cutlass.const_expr(intake.has_unit):
                    exponent = halves.exponent_of(intake, entries, turn)
                place = address + turn * (intake.spread.at_once * UNIT_BYTES)
                halves.store_unit(place, exponent)

    @cute.jit
    def line_of(self, intake: cutlass.Constexpr, scope: Scope, buffer: Int32) -> Int32:
        """Return the address of the lane's first row in panel 0 of a buffer."""
        row = first_row(self.plan, intake, scope) + cute.arch.lane_idx() // intake.spread.lanes
        return scope.buffers.k.toint() + buffer * BUFFER_BYTES + row * LINE_BYTES

    @cute.jit
    def target(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        line: Int32,
        piece: tuple[Int32, Int32],
    ) -> Target:
        """Return where the lane's units of a piece, (buffer, half), go."""
        buffer, half = piece
        units = units_at(line + half * (HALF * PANEL_BYTES), intake.form.code)
        peer, full = Int32(0), Int32(0)
        if cutlass.const_expr(self.plan.crosses):
            peer = distance_to_peer(scope)
            left, right = scope.pipes.left.barrier(buffer), scope.pipes.right.barrier(buffer)
            full = (left.toint() if half == 0 else right.toint()) + peer
        return Target(units, peer, full)

    @cute.jit
    def send(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        piece: tuple[Int32, Int32],
        target: Target,
    ) -> None:
        """Copy this warp's rows of a half, (buffer, half), to the other CTA."""
        cute.arch.sync_warp()
        buffer, half = piece
        row = first_row(self.plan, intake, scope)
        line = scope.buffers.k.toint() + buffer * BUFFER_BYTES + row * LINE_BYTES
        with cute.arch.elect_one():
            for panel in cutlass.range_constexpr(HALF):
                source = line + (half * HALF + panel) * PANEL_BYTES
                cute.arch.inline_ptx(
                    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                    "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
                    read_only_args=[
                        source + target.peer,
                        source,
                        Int32(intake.spread.rows * LINE_BYTES),
                        target.full,
                    ],
                )

    @cute.jit
    def arrive(self, ring: Ring, buffer: Int32, half: Int32) -> None:
        """Arrive at the full barrier; one thread announces the bytes that the other CTA sends."""
        if cutlass.const_expr(self.plan.crosses):
            thread, _, _ = cute.arch.thread_idx()
            if thread % (hw.WARPGROUP_WARPS * hw.WARP_THREADS) == 0:
                cute.arch.inline_ptx(
                    "mbarrier.expect_tx.relaxed.cta.shared.b64 [{$r0}], {$r1};",
                    read_only_args=[
                        ring.barrier(buffer).toint(),
                        self.panels_of(buffer, half) * (PANEL_BYTES // 2),
                    ],
                )
        cute.arch.sync_warp()
        ring.signal(buffer)

    @cute.jit
    def panels_of(self, buffer: Int32, half: Int32) -> Int32:
        """Return the number of panels of a piece."""
        panels = Int32(HALF)
        if cutlass.const_expr(self.plan.panels > PANELS):
            panels = panels + (half ^ buffer)
        return panels

    # ---- entries that cp.async brings as they are

    @cute.jit
    def copy(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        number: Int32,
        end: Int32,
        indices: Indices,
    ) -> None:
        """Copy entries in bf16 to shared memory; the barriers complete when the copies have."""
        buffer, entries = number % BUFFERS, make_entries(intake)
        resolve(self.plan, intake, scope, (number, Int32(0)), indices, entries)
        look_up(self.plan, intake, scope, number + 1, end, indices)
        line = self.line_of(intake, scope, buffer)
        for right in cutlass.range_constexpr(2):
            if cutlass.const_expr(self.groups == 1):
                self.copy_piece(intake, scope, (number, right), entries, line)
            else:
                if self.group() == right:
                    self.copy_piece(intake, scope, (number, right), entries, line)

    @cute.jit
    def copy_piece(
        self,
        intake: cutlass.Constexpr,
        scope: Scope,
        place: tuple[Int32, int],
        entries: Entries,
        line: Int32,
    ) -> None:
        """Copy a piece of a tile: (tile of this CTA, whether it is the right one)."""
        source, (number, right) = source_of(scope, intake), place
        buffer = number % BUFFERS
        ring = scope.pipes.right if cutlass.const_expr(right) else scope.pipes.left
        ring.wait_free(free_state(scope, number))
        if cutlass.const_expr(not right):
            mark(self.plan, scope, entries, buffer)
        for panel in cutlass.range_constexpr(right * HALF, (right + 1) * HALF):
            copy_panel(intake, source, entries.places, line, panel, panel * LINE_BYTES)
        if cutlass.const_expr(self.plan.panels > PANELS):
            if buffer == 1 - right:
                copy_panel(intake, source, entries.places, line, PANELS, PANELS * LINE_BYTES)
        arrive_after_copies(ring, buffer)


@cute.jit
def distance_to_peer(scope: Scope) -> Int32:
    """Return the distance from an address of this CTA to the same one of the other sharer."""
    address = scope.buffers.valid
    there = cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, scope.work.rank * 2 + 1 - scope.work.sharer],
    )
    return there - address


@cute.jit
def arrive_after_copies(ring: Ring, buffer: Int32) -> None:
    """Arrive at the full barrier of a piece once the thread's copies so far have completed."""
    cute.arch.inline_ptx(
        "cp.async.mbarrier.arrive.noinc.shared.b64 [{$r0}];",
        read_only_args=[ring.barrier(buffer).toint()],
    )
