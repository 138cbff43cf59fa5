"""Copy roles: four warps each copy listed entries in bf16, as keys and as values (device code).

A warp has 16 of 64 keys, and eight lanes share an entry. The tensor core waits for both CTAs of the
pair, so that copies have to be told across: a warp tells a group of copies once it has started the
next one, by when they have mostly come.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernelkit.device.pipelines import Ring, producer_state_at
from kernelkit.device.shared_words import store
from kernelkit.plan import hw
from mla.attention.sm90.args import Entries
from mla.attention.sm90.gather import (
    AT_ONCE,
    LANES,
    LINE_BYTES,
    TURNS,
    WARP_KEYS,
    copy_panel,
    make_entries,
    resolve,
    source_of,
    within,
)
from mla.attention.sm100.args import Scope
from mla.attention.sm100.load import free
from mla.attention.sm100.plan import (
    COLUMNS,
    HALF,
    KEYS,
    OWN_KEYS,
    PIECE_BYTES,
    PIECES,
    S_STAGES,
    Plan100,
)


class Copy:
    """Copies the CTA's keys for Q K^T, or half of the columns of all keys for P V."""

    def __init__(self, plan: Plan100, values: bool) -> None:
        self.plan, self.values = plan, values
        self.role = plan.roles["copy_v" if values else "copy_k"]
        self.parts = PIECES if values else len(plan.groups)  # groups of copies of a tile

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        work, ring = scope.work, self.ring(scope)
        middle = cutlass.min(cutlass.max(work.own_tiles - work.begin, 0), work.count)
        self.stream(scope, 0, Int32(0), middle)
        if cutlass.const_expr(self.plan.config.extra is not None):
            self.stream(scope, 1, middle, work.count)
        if work.count > 0:
            cute.arch.cp_async_wait_group(0)
            tell(ring, Int32(self.parts - 1))
        for part in cutlass.range_constexpr(self.parts):
            # Releases come from the leader, and have to find this CTA alive.
            ring.wait_free(free(part, work.count))

    def ring(self, scope: Scope) -> Ring:
        return scope.pipes.v if self.values else scope.pipes.k

    @cute.jit
    def stream(self, scope: Scope, which: cutlass.Constexpr, begin: Int32, end: Int32) -> None:
        """Copy the tiles [begin, end) of this CTA, whose keys are of one source."""
        keys, source = self.plan.config.sources[which], source_of(scope, which)
        pieces = PIECES if cutlass.const_expr(self.values) else 1
        entries = [make_entries(keys.form) for _ in range(pieces)]
        numbers = [cute.make_rmem_tensor(TURNS, Int32) for _ in range(pieces)]
        for piece in cutlass.range_constexpr(pieces):
            self.look_up(scope, which, begin, end, piece, numbers[piece])
        for number in cutlass.range(begin, end, unroll=1):
            for piece in cutlass.range_constexpr(pieces):
                resolve(keys, source, numbers[piece], entries[piece])
                self.look_up(scope, which, number + 1, end, piece, numbers[piece])
            if cutlass.const_expr(self.values):
                self.mark(scope, which, number)
            for part in cutlass.range_constexpr(self.parts):
                piece = part if cutlass.const_expr(self.values) else 0
                self.copy_part(scope, which, number, part, entries[piece])

    @cute.jit
    def copy_part(
        self,
        scope: Scope,
        which: cutlass.Constexpr,
        number: Int32,
        part: cutlass.Constexpr,
        entries: Entries,
    ) -> None:
        """Copy a group of panels of a tile, and tell the group before."""
        ring, source = self.ring(scope), source_of(scope, which)
        ring.wait_free(free(part, number))
        if cutlass.const_expr(self.values):
            line, first = (
                line_in(scope.buffers.v, part * PIECE_BYTES),
                scope.work.half * COLUMNS * 2,
            )
            for panel in cutlass.range_constexpr(HALF):
                copy_panel(source, entries, line, panel, first + panel * LINE_BYTES)
        else:
            line = line_in(scope.buffers.k, 0)
            for panel in self.plan.groups[part]:
                copy_panel(source, entries, line, panel, panel * LINE_BYTES)
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
        scope: Scope,
        which: cutlass.Constexpr,
        number: Int32,
        end: Int32,
        piece: cutlass.Constexpr,
        numbers: cute.Tensor,
    ) -> None:
        """Load the numbers of this lane's entries in tile `number`; -1 from tile `end` on.

        piece: of V. For Q K^T there is one, the CTA's own.
        """
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() - self.role.first_warp
        half = Int32(piece) if cutlass.const_expr(self.values) else scope.work.half
        row = half * OWN_KEYS + warp * WARP_KEYS + lane // LANES
        for turn in cutlass.range_constexpr(TURNS):
            numbers[turn] = self.number_of(scope, which, number, end, row + turn * AT_ONCE)

    @cute.jit
    def number_of(
        self, scope: Scope, which: cutlass.Constexpr, number: Int32, end: Int32, row: Int32
    ) -> Int32:
        """Return the number of the entry at a row of a tile, -1 without one.

        A listed key has the number of an entry, another one that of its page times the rows of a
        page, plus its row.
        """
        keys, source = self.plan.config.sources[which], source_of(scope, which)
        count = scope.work.keys if cutlass.const_expr(which == 0) else scope.work.extra
        tile = scope.work.begin + number
        if cutlass.const_expr(which == 1):
            tile = tile - scope.work.own_tiles
        key, found = tile * KEYS + row, Int32(-1)
        if number < end and key < count:
            if cutlass.const_expr(keys.listed):
                found = within(source.places[scope.work.entry, key], keys, source)
            else:
                page = source.places[scope.work.entry, key // keys.rows]
                if page >= 0 and page < source.store.shape[0]:
                    found = page * keys.rows + key % keys.rows
        return found

    @cute.jit
    def mark(self, scope: Scope, which: cutlass.Constexpr, number: Int32) -> None:
        """Store which keys of a tile are entries, a bit each; each warp a word."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() - self.role.first_warp
        row = warp * hw.WARP_THREADS + lane
        found = self.number_of(scope, which, number, number + 1, row)
        bits = Uint32(cute.arch.vote_ballot_sync(found >= 0))
        state = producer_state_at(S_STAGES, number)
        scope.pipes.marks.wait_free(state)
        if lane == 0:
            store(scope.buffers.marks + state.index * (KEYS // 8) + warp * 4, Uint32, (bits,))
        cute.arch.sync_warp()
        scope.pipes.marks.signal(state.index)


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
    row = thread % 128 // 32 * WARP_KEYS + thread % 32 // LANES
    return buffer.toint() + place + row * LINE_BYTES
