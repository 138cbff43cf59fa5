"""Keys that threads bring: their numbers, which of them exist, and signals to the leader (device
code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernelkit.device.pipelines import Ring, producer_state_at
from kernelkit.device.shared_words import store
from kernelkit.plan import hw
from mla.attention.shared.entries import number_of
from mla.attention.sm100.args import Scope
from mla.attention.sm100.plan import KEYS, S_STAGES


@cute.jit
def keys_of_tile(intake: cutlass.Constexpr, scope: Scope, number: Int32) -> tuple[Int32, Int32]:
    """Return the first key of a tile of this pair in its source, and how many the source has."""
    tile, count = scope.work.begin + number, scope.work.keys
    if cutlass.const_expr(intake.which == 1):
        tile, count = tile - scope.work.own_tiles, scope.work.extra
    return tile * KEYS, count


@cute.jit
def look_up(
    intake: cutlass.Constexpr,
    scope: Scope,
    number: Int32,
    end: Int32,
    row: Int32,
    numbers: cute.Tensor,
) -> None:
    """Load the numbers of a lane's entries in tile `number`; -1 from tile `end` on.

    row: of the lane's first entry in the tile.
    """
    first, count = keys_of_tile(intake, scope, number)
    count = count if number < end else Int32(0)
    for turn in cutlass.range_constexpr(intake.spread.turns):
        key = first + row + turn * intake.spread.at_once
        numbers[turn] = number_of(intake, scope, key, count)


@cute.jit
def number_to_mark(
    intake: cutlass.Constexpr, scope: Scope, warp: Int32, number: Int32, end: Int32
) -> Int32:
    """Load the number of the key that a lane marks in tile `number`; -1 from tile `end` on."""
    first, count = keys_of_tile(intake, scope, number)
    count = count if number < end else Int32(0)
    key = first + warp * hw.WARP_THREADS + cute.arch.lane_idx()
    return number_of(intake, scope, key, count)


@cute.jit
def mark(scope: Scope, warp: Int32, number: Int32, found: Int32) -> None:
    """Store which keys of a tile are entries, a bit each; each of four warps a word.

    found: number of the key that this lane marks.
    """
    lane = cute.arch.lane_idx()
    bits = Uint32(cute.arch.vote_ballot_sync(found >= 0))
    state = producer_state_at(S_STAGES, number)
    scope.pipes.marks.wait_free(state)
    if lane == 0:
        store(scope.buffers.marks + state.index * (KEYS // 8) + warp * 4, Uint32, (bits,))
    cute.arch.sync_warp()
    scope.pipes.marks.signal(state.index)


@cute.jit
def tell(ring: Ring, part: Int32) -> None:
    """Tell the leader that this warp's part of a stage has come."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    ring.signal(part)
