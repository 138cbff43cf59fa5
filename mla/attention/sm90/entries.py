"""Numbers of the entries that gathering warps bring, and marks of existing keys (device code).

Numbers are loaded a tile ahead of places and scales, and these a tile or half a tile ahead of the
data, see `../shared/entries.py`.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernelkit.device.shared_words import store
from kernelkit.plan import hw
from mla.attention.kernel_arguments import Source
from mla.attention.shared import entries as shared
from mla.attention.shared.entries import number_of
from mla.attention.shared.intake import Intake
from mla.attention.sm90.args import Scope
from mla.attention.sm90.plan import KEYS, Plan90


@dataclass(frozen=True)
class Numbers:
    """Numbers of the entries of a tile, -1 for what is none: Int32 tensors in registers."""

    own: cute.Tensor  # (entry,), of this lane
    every: cute.Tensor  # (2,), of keys `lane` and `lane + 32`; in the warp that marks


@dataclass(frozen=True)
class Entries(shared.Entries):
    """Entries of a lane, and which keys of the tile are entries."""

    found: cute.Tensor  # (2,) words, a bit for each key of the tile; in the warp that marks


def make_numbers(intake: Intake) -> Numbers:
    return Numbers(
        cute.make_rmem_tensor(intake.spread.turns, Int32), cute.make_rmem_tensor(2, Int32)
    )


def make_entries(intake: Intake) -> Entries:
    made = shared.make_entries(intake)
    return Entries(made.places, made.scales, cute.make_rmem_tensor(2, Uint32))


@cute.jit
def first_row(plan: Plan90, intake: cutlass.Constexpr, scope: Scope) -> Int32:
    """Return the first row of this warp in a tile."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % hw.WARPGROUP_WARPS
    row = warp * intake.spread.rows
    if cutlass.const_expr(plan.crosses):
        row = row + scope.work.sharer * plan.gathered_keys
    return row


@cute.jit
def look_up(
    plan: Plan90,
    intake: cutlass.Constexpr,
    scope: Scope,
    number: Int32,
    end: Int32,
    numbers: Numbers,
) -> None:
    """Load the numbers of this lane's entries in tile `number`; -1 from tile `end` on.

    The warp that marks also loads those of two keys for each lane, all of the tile.
    """
    lane, spread = cute.arch.lane_idx(), intake.spread
    count = scope.work.keys if cutlass.const_expr(intake.which == 0) else scope.work.extra
    tile = scope.work.begin + number
    if cutlass.const_expr(intake.which == 1):
        tile = tile - scope.work.own_tiles
    count = count if number < end else Int32(0)
    row = tile * KEYS + first_row(plan, intake, scope) + lane // spread.lanes
    for turn in cutlass.range_constexpr(spread.turns):
        numbers.own[turn] = number_of(intake, scope, row + turn * spread.at_once, count)
    if marks(plan):
        for part in cutlass.range_constexpr(2):
            key = tile * KEYS + part * hw.WARP_THREADS + lane
            numbers.every[part] = number_of(intake, scope, key, count)


# ---- which keys are entries


@cute.jit
def marks(plan: Plan90) -> cutlass.Boolean:
    """Whether this warp tells which keys of a tile are entries."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return warp == plan.roles["gather"].first_warp


@cute.jit
def mark(plan: Plan90, scope: Scope, entries: Entries, buffer: Int32) -> None:
    """Store which keys of a tile are entries, a bit each."""
    if marks(plan):
        if cute.arch.lane_idx() == 0:
            words = (entries.found[0], entries.found[1])
            store(scope.buffers.valid + buffer * 8, Uint32, words)


@cute.jit
def resolve(
    plan: Plan90,
    intake: cutlass.Constexpr,
    source: Source,
    numbers: Numbers,
    half: Int32,
    entries: Entries,
) -> None:
    """Find the entries with these numbers, and load their scales for a half, or for both."""
    shared.find_entries(intake, source, numbers.own, half, entries)
    if marks(plan):
        for part in cutlass.range_constexpr(2):
            entries.found[part] = Uint32(cute.arch.vote_ballot_sync(numbers.every[part] >= 0))


@cute.jit
def take_over(intake: cutlass.Constexpr, entries: Entries, others: Entries) -> None:
    """Make `others` the entries."""
    entries.found.store(others.found.load())
    shared.take_over(intake, entries, others)
