"""Indices of the entries that gathering warps bring, and marks of existing keys (device code).

Indices are loaded a tile ahead of places and scales, and these a tile ahead of the data, see
`../shared/entries.py`.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernelkit.device.shared_words import store
from kernelkit.plan import hw
from mla.attention.shared import entries as shared
from mla.attention.shared.entries import (
    index_of,
    index_type,
    keys_of_tile,
    number_from,
    source_of,
)
from mla.attention.shared.intake import Intake
from mla.attention.sm90.args import Scope
from mla.attention.sm90.halves import settle
from mla.attention.sm90.plan import KEYS, Plan90


@dataclass(frozen=True)
class Indices:
    """What the table holds for keys of a tile, see `index_of`: tensors in registers."""

    own: cute.Tensor  # (entry,), of this lane
    every: cute.Tensor  # (2,), of keys `lane` and `lane + 32`; in the warp that marks


@dataclass(frozen=True)
class Entries(shared.Entries):
    """Entries of a lane, and which keys of the tile are entries."""

    found: cute.Tensor  # (2,) words, a bit for each key of the tile; in the warp that marks


def make_indices(intake: Intake) -> Indices:
    sizes = (intake.spread.turns, 2)
    return Indices(*(cute.make_rmem_tensor(size, index_type(intake)) for size in sizes))


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
    indices: Indices,
) -> None:
    """Load the indices of this lane's keys in tile `number`; -1 from tile `end` on.

    The warp that marks also loads those of two keys for each lane, all of the tile.
    """
    first, count = keys_of_tile(intake, scope, number, KEYS)
    count = count if number < end else Int32(0)
    for turn in cutlass.range_constexpr(intake.spread.turns):
        key = first + row_of_lane(plan, intake, scope, turn)
        indices.own[turn] = index_of(intake, scope, key, count)
    if marks(plan):
        for part in cutlass.range_constexpr(2):
            indices.every[part] = index_of(intake, scope, first + every_row(part), count)


@cute.jit
def row_of_lane(
    plan: Plan90, intake: cutlass.Constexpr, scope: Scope, turn: cutlass.Constexpr
) -> Int32:
    """Return the row of a tile that this lane brings at a turn."""
    spread = intake.spread
    row = first_row(plan, intake, scope) + cute.arch.lane_idx() // spread.lanes
    return row + turn * spread.at_once


@cute.jit
def every_row(part: cutlass.Constexpr) -> Int32:
    """Return the row of a tile that this lane of the warp that marks looks at."""
    return part * hw.WARP_THREADS + cute.arch.lane_idx()


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
    scope: Scope,
    place: tuple[Int32, Int32],
    indices: Indices,
    entries: Entries,
) -> None:
    """Find the entries that the table names, and load their scales for a half.

    place: (tile of this CTA, half).
    """
    (tile, half), source = place, source_of(scope, intake)
    first, _ = keys_of_tile(intake, scope, tile, KEYS)
    numbers = cute.make_rmem_tensor_like(indices.own, Int32)
    for turn in cutlass.range_constexpr(intake.spread.turns):
        key = first + row_of_lane(plan, intake, scope, turn)
        numbers[turn] = number_from(intake, source, indices.own[turn], key)
    shared.find_entries(intake, source, numbers, half, entries)
    if marks(plan):
        for part in cutlass.range_constexpr(2):
            key = first + every_row(part)
            number = number_from(intake, source, indices.every[part], key)
            entries.found[part] = Uint32(cute.arch.vote_ballot_sync(number >= 0))


@cute.jit
def take_over(intake: cutlass.Constexpr, entries: Entries, others: Entries, half: Int32) -> None:
    """Make `others`, whose scales have arrived by now, the entries of a half."""
    entries.found.store(others.found.load())
    if cutlass.const_expr(not intake.has_unit):
        shared.take_over(intake, entries, others)
    else:
        entries.places.store(others.places.load())
        for turn in cutlass.range_constexpr(intake.spread.turns):
            scales, exponent = settle(intake, others.scales[0, turn], half)
            for word in cutlass.range_constexpr(len(scales)):
                entries.scales[word, turn] = scales[word]
            entries.scales[len(scales), turn] = exponent
