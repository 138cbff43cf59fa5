"""Keys that a table lists: their numbers, which of them exist, and signals to the leader (device
code).

Indices are loaded a tile before they are needed, so that nobody waits for them, see `index_of`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernelkit.device.pipelines import Ring, producer_state_at
from kernelkit.device.shared_words import store
from kernelkit.plan import hw
from mla.attention.shared.entries import index_of, keys_of_tile, number_from, source_of
from mla.attention.sm100.args import Scope
from mla.attention.sm100.plan import KEYS, S_STAGES

LEAST = -(1 << 31)  # number of keys that no key is below


@cute.jit
def look_up(
    intake: cutlass.Constexpr,
    scope: Scope,
    number: Int32,
    end: Int32,
    row: Int32,
    indices: cute.Tensor,
) -> None:
    """Load the indices of a lane's keys in tile `number`; -1 from tile `end` on.

    row: of the lane's first key in the tile.
    """
    for turn in cutlass.range_constexpr(intake.spread.turns):
        place = row + turn * intake.spread.at_once
        indices[turn] = index_in_tile(intake, scope, number, end, place)


@cute.jit
def index_in_tile(
    intake: cutlass.Constexpr, scope: Scope, number: Int32, end: Int32, row: Int32
) -> Int32 | Int64:
    """Load the index of a key in tile `number`; -1 from tile `end` on.

    Tiles of a CTA may end before its second source begins: keys there are negative.
    """
    first, count = keys_of_tile(intake, scope, number, KEYS)
    return index_of(intake, scope, first + row, count if number < end else Int32(LEAST))


@cute.jit
def number_in_tile(
    intake: cutlass.Constexpr, scope: Scope, number: Int32, index: Int32 | Int64, row: Int32
) -> Int32:
    """Return the number of the entry of a key in tile `number`, -1 if its index names none."""
    first, _ = keys_of_tile(intake, scope, number, KEYS)
    return number_from(intake, source_of(scope, intake), index, first + row)


@cute.jit
def numbers_in_tile(
    intake: cutlass.Constexpr, scope: Scope, number: Int32, indices: cute.Tensor, row: Int32
) -> cute.Tensor:
    """Return the numbers of a lane's entries in tile `number`; see `look_up`."""
    found = cute.make_rmem_tensor(intake.spread.turns, Int32)
    for turn in cutlass.range_constexpr(intake.spread.turns):
        place = row + turn * intake.spread.at_once
        found[turn] = number_in_tile(intake, scope, number, indices[turn], place)
    return found


@cute.jit
def row_to_mark(warp: Int32) -> Int32:
    """Return the row of a tile that a lane marks, if each of four warps marks 32."""
    return warp * hw.WARP_THREADS + cute.arch.lane_idx()


@cute.jit
def mark(scope: Scope, warp: Int32, number: Int32, found: Int32) -> None:
    """Store which keys of a tile are entries, a bit each; each of four warps a word.

    found: number of the entry of the row that this lane marks.
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
