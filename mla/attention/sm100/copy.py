"""Copy role: four warps copy listed entries in bf16 to shared memory by cp.async (device code).

A warp has 16 of 64 keys, and eight lanes share an entry. Panels go where TMA would put them, in the
order in which the tensor core needs them: own keys of a tile, then the peer's of the tile before.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernelkit.device.pipelines import consumer_state_at, producer_state_at
from mla.attention.sm90.args import Entries
from mla.attention.sm90.gather import (
    AT_ONCE,
    LANES,
    LINE_BYTES,
    NOWHERE,
    TURNS,
    WARP_KEYS,
    arrive_after_copies,
    copy_panel,
    make_entries,
    resolve,
    source_of,
    within,
)
from mla.attention.sm100.args import Scope
from mla.attention.sm100.load import key_column
from mla.attention.sm100.plan import (
    COLUMNS,
    GROUP,
    HALF,
    KEY_STAGES,
    KEYS,
    OWN_GROUPS,
    OWN_KEYS,
    OWN_STAGES,
    OWN_TILES,
    PANEL,
    PANEL_BYTES,
    PIECE_BYTES,
    PIECE_KEYS,
    PIECES,
    Plan100,
)


class Copy:
    """Fills panels with listed entries."""

    def __init__(self, plan: Plan100) -> None:
        self.plan = plan
        self.role = plan.roles["gather"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        work = scope.work
        middle = cutlass.min(cutlass.max(work.own_tiles - work.begin, 0), work.count)
        self.stream(scope, 0, Int32(0), middle)
        if cutlass.const_expr(self.plan.config.extra is not None):
            self.stream(scope, 1, middle, work.count)

    @cute.jit
    def stream(self, scope: Scope, which: cutlass.Constexpr, begin: Int32, end: Int32) -> None:
        """Copy the tiles [begin, end) of this CTA, whose keys are of one source."""
        keys, source = self.plan.config.sources[which], source_of(scope, which)
        own, peer = make_entries(keys.form), make_entries(keys.form)
        following = make_entries(keys.form)  # the peer's keys of the tile that comes
        numbers = cute.make_rmem_tensor((TURNS, 2), Int32)
        self.look_up(scope, which, begin, end, numbers)
        for number in cutlass.range(begin, end, unroll=1):
            resolve(keys, source, numbers[None, 0], own)
            resolve(keys, source, numbers[None, 1], following)
            self.look_up(scope, which, number + 1, end, numbers)
            self.copy_own(scope, which, number, own)
            if number > begin:
                self.copy_peer(scope, which, number - 1, peer)
            peer.places.store(following.places.load())
        if end > begin:
            self.copy_peer(scope, which, end - 1, peer)

    @cute.jit
    def look_up(
        self,
        scope: Scope,
        which: cutlass.Constexpr,
        number: Int32,
        end: Int32,
        numbers: cute.Tensor,
    ) -> None:
        """Load the numbers of this lane's entries in tile `number`, (entry, own or the peer's).

        -1 from tile `end` on. A listed key has the number of an entry, another one that of its page
        times the rows of a page, plus its row.
        """
        keys, source = self.plan.config.sources[which], source_of(scope, which)
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() - self.role.first_warp
        count = scope.work.keys if cutlass.const_expr(which == 0) else scope.work.extra
        tile = scope.work.begin + number
        if cutlass.const_expr(which == 1):
            tile = tile - scope.work.own_tiles
        count = count if number < end else Int32(0)
        for side in cutlass.range_constexpr(2):
            half = scope.work.half ^ side
            first = tile * KEYS + half * OWN_KEYS + warp * WARP_KEYS + lane // LANES
            for turn in cutlass.range_constexpr(TURNS):
                key, found = first + turn * AT_ONCE, Int32(-1)
                if key < count:
                    if cutlass.const_expr(keys.listed):
                        found = within(source.places[scope.work.entry, key], keys, source)
                    else:
                        page = source.places[scope.work.entry, key // keys.rows]
                        if page >= 0 and page < source.store.shape[0]:
                            found = page * keys.rows + key % keys.rows
                numbers[turn, side] = found

    @cute.jit
    def copy_own(
        self, scope: Scope, which: cutlass.Constexpr, number: Int32, entries: Entries
    ) -> None:
        """Copy the own keys of a tile: panels outside the own columns, then the own columns."""
        plan, pipes, work = self.plan, scope.pipes, scope.work
        for group in cutlass.range_constexpr(len(plan.key_groups)):
            state = producer_state_at(KEY_STAGES, number * len(plan.key_groups) + group)
            pipes.key.wait_free(state)
            for panel in plan.key_groups[group]:
                place = state.index * GROUP + panel % GROUP
                line = line_in(scope.buffers.key, place * PANEL_BYTES)
                column = key_column(plan, work.half, panel)
                copy_panel(source_of(scope, which), entries, line, 0, column * 2)
            arrive_after_copies(pipes.key, state.index)
        if number == 1:
            pipes.lent.wait(consumer_state_at(1, Int32(0)))
        begin = work.half * (COLUMNS * 2)
        for panel in cutlass.range_constexpr(HALF):
            state = producer_state_at(OWN_STAGES, number * OWN_GROUPS + panel // GROUP)
            if cutlass.const_expr(panel % GROUP == 0):
                pipes.own.wait_free(state)
            if cutlass.const_expr(panel == 0):
                self.mark(scope, entries, number % OWN_TILES)
            line = line_in(scope.buffers.own, (number % OWN_TILES * HALF + panel) * PANEL_BYTES)
            column = begin + panel * (PANEL * 2)
            copy_panel(source_of(scope, which), entries, line, 0, column)
            if cutlass.const_expr(panel % GROUP == GROUP - 1):
                arrive_after_copies(pipes.own, state.index)

    @cute.jit
    def copy_peer(
        self, scope: Scope, which: cutlass.Constexpr, number: Int32, entries: Entries
    ) -> None:
        """Copy the own columns of the peer's keys of a tile."""
        ring, begin = scope.pipes.peer, scope.work.half * (COLUMNS * 2)
        warp = cute.arch.warp_idx() - self.role.first_warp
        if number == 0:
            scope.pipes.lent.wait(consumer_state_at(1, Int32(0)))
        for piece in cutlass.range_constexpr(PIECES):
            ring.wait_free(producer_state_at(PIECES, number * PIECES + piece))
            if warp * WARP_KEYS // PIECE_KEYS == piece:
                # A piece has the rows of two warps, so its panels are nearer to each other.
                line = line_in(scope.buffers.peer, piece * (PIECE_BYTES - PIECE_KEYS * LINE_BYTES))
                for panel in cutlass.range_constexpr(HALF):
                    at = line + panel * (PIECE_BYTES // HALF)
                    column = begin + panel * (PANEL * 2)
                    copy_panel(source_of(scope, which), entries, at, 0, column)
            arrive_after_copies(ring, Int32(piece))

    @cute.jit
    def mark(self, scope: Scope, entries: Entries, stage: Int32) -> None:
        """Store which own keys of the warp are entries, a bit each."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() - self.role.first_warp
        bits = Int32(0)
        for turn in cutlass.range_constexpr(TURNS):
            found = cute.arch.vote_ballot_sync(entries.places[turn] != NOWHERE)
            for entry in cutlass.range_constexpr(AT_ONCE):
                bits = bits | (found >> (LANES * entry) & 1) << (turn * AT_ONCE + entry)
        if lane == 0:
            cute.arch.inline_ptx(
                "{ .reg .b16 low, high; mov.b32 {low, high}, {$r1}; st.shared.b16 [{$r0}], low; }",
                read_only_args=[scope.buffers.valid + stage * 8 + warp * 2, bits],
            )


@cute.jit
def line_in(buffer: cute.Pointer, place: Int32) -> Int32:
    """Return the address of the lane's first row in a panel."""
    thread, _, _ = cute.arch.thread_idx()
    row = thread % 128 // 32 * WARP_KEYS + thread % 32 // LANES
    return buffer.toint() + place + row * LINE_BYTES
