"""Chunks of entries to units of 16 bytes in shared memory, as TMA would store them (device code).

Four lanes share an entry: they read 64 bytes of it side by side, a chunk of 16 each. Neighbouring
entries are in neighbouring rows, whose swizzles differ, so that eight lanes that store the same
unit of their chunks never meet in a bank. Lanes of e2m1 have two panels, and those of the second
one begin with another unit; so do lanes of odd rows that move a panel in bf16 as two chunks.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernelkit.device.shared_words import store
from kernelkit.device.warp_mma import copy_chunk
from kernelkit.device.words import four_words_if
from mla.attention.formats import LATENT
from mla.attention.kernel_arguments import Source
from mla.attention.shared.dequantise import (
    Scale,
    exact_scale,
    from_e4m3,
    power_scale,
    scaled_e2m1,
    scaled_e4m3,
    split_scale,
)
from mla.attention.shared.entries import NOWHERE, Entries, data_of
from mla.attention.shared.intake import CHUNK, HALF, LINE_BYTES, PANEL, PANEL_BYTES, Intake

LANES = 4


@dataclass(frozen=True)
class Held:
    """What a gathering lane holds of half a tile: Uint32 tensors in registers."""

    half: cute.Tensor  # (word, chunk, entry)
    rest: cute.Tensor  # (word, chunk, entry), of the panel beside the halves


@dataclass(frozen=True)
class Target:
    """Where a lane stores its units, in this CTA, and in the one that it crosses with."""

    units: tuple[Int32, ...]  # addresses of a chunk's units in the first panel and turn
    peer: Int32  # distance to the same address in the other CTA's shared memory
    full: Int32  # mbarrier of the piece in the other CTA


def make_held(intake: Intake) -> Held:
    parts = {"": 1, "coded": 1, "wide": 2}[intake.rest]
    return Held(
        cute.make_rmem_tensor((4, intake.chunks, intake.depth), Uint32),
        cute.make_rmem_tensor((4, parts, intake.rest_turns), Uint32),
    )


# ---- addresses


@cute.jit
def units_at(line: Int32, code: cutlass.Constexpr) -> tuple[Int32, ...]:
    """Return the addresses of the units of a chunk, or of the two chunks of a panel in bf16, in
    their order. line: address of the row in the first panel.
    """
    lane, row = cute.arch.lane_idx() % LANES, cute.arch.lane_idx() // LANES
    if cutlass.const_expr(code == "e4m3"):
        first, step, count = 2 * lane, 1, 2
    elif cutlass.const_expr(code == "e2m1"):
        first, step, count = lane % 2 * 4 + lane // 2 * 2, 1, 4
        line = line + lane // 2 * PANEL_BYTES
    else:
        first, step, count = lane + row % 2 * 4, 4, 2
    begin = line + (first ^ row) * CHUNK
    return tuple(begin ^ (k * step * CHUNK) for k in range(count))


@cute.jit
def wide_at(part: cutlass.Constexpr) -> Int32:
    """Return the byte of a panel in bf16 where the lane's chunk number `part` begins."""
    lane, row = cute.arch.lane_idx() % LANES, cute.arch.lane_idx() // LANES
    return (lane + row % 2 * 4) * CHUNK ^ (part * 4 * CHUNK)


@cute.jit
def put(
    to_both: cutlass.Constexpr, target: Target, address: Int32, four: tuple[Uint32, ...]
) -> None:
    """Store a unit here, or in both CTAs."""
    store(address, Uint32, four)
    if cutlass.const_expr(to_both):
        cute.arch.inline_ptx(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
            "[{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}}, [{$r1}];",
            read_only_args=[address + target.peer, target.full, *four],
        )


# ---- the two halves


@cute.jit
def is_coded(form: cutlass.Constexpr, number: cutlass.Constexpr, half: Int32) -> cutlass.Boolean:
    """Whether a chunk of a half has codes, not columns in bf16."""
    if cutlass.const_expr(form.code != "" and HALF * PANEL + number * PANEL >= form.coded):
        return half == 0
    return cutlass.Boolean(True)


@cute.jit
def fetch_chunk(
    intake: cutlass.Constexpr,
    source: Source,
    entries: Entries,
    held: Held,
    place: cutlass.Constexpr,
    half: Int32,
) -> None:
    """Load the lane's chunk of a half of an entry; zeros of what is no entry. place: (turn, number
    of the chunk).
    """
    turn, number = place
    form, lane = intake.form, cute.arch.lane_idx() % LANES
    bytes_of_half = intake.chunks * LANES * CHUNK
    begin = data_of(source, entries.places[turn]) + half * bytes_of_half
    begin = begin + lane * CHUNK + number * LANES * CHUNK
    there = entries.places[turn] != NOWHERE and is_coded(form, number, half)
    four = four_words_if(there, begin)
    for k in cutlass.range_constexpr(4):
        held.half[k, number, turn % intake.depth] = four[k]


@cute.jit
def move_up(intake: cutlass.Constexpr, held: Held, number: cutlass.Constexpr) -> None:
    """Move a chunk of each turn to the turn before."""
    for turn in cutlass.range_constexpr(1, intake.depth):
        for k in cutlass.range_constexpr(4):
            held.half[k, number, turn - 1] = held.half[k, number, turn]


@cute.jit
def store_chunk(
    intake: cutlass.Constexpr,
    held: Held,
    entries: Entries,
    target: Target,
    place: cutlass.Constexpr,
    half: Int32,
) -> None:
    """Convert and store the lane's chunk of a half of an entry. place: (turn, number)."""
    turn, number = place
    form = intake.form
    words = tuple(held.half[k, number, turn % intake.depth] for k in range(4))
    if cutlass.const_expr(form.code == "e2m1"):
        codes = entries.scales[0, turn] >> Uint32(16 * number)
        scales = from_e4m3(codes & 0xFF), from_e4m3((codes >> 8) & 0xFF)
        store_e2m1(words, scales, target, offset_of(intake, 2 * number, turn), scaled_e2m1)
    else:
        if is_coded(form, number, half):
            scale, offset = scale_of(form, entries, turn, number), offset_of(intake, number, turn)
            store_e4m3(False, words, scale, target, offset)


def offset_of(intake: Intake, panel: int, turn: int) -> int:
    """Return the distance of a panel and turn from the first ones."""
    return panel * PANEL_BYTES + turn * intake.spread.at_once * LINE_BYTES


@cute.jit
def scale_of(
    form: cutlass.Constexpr,
    entries: Entries,
    turn: cutlass.Constexpr,
    panel: cutlass.Constexpr,
) -> Scale:
    """Return the scale of the lane's chunk of a panel of a half in e4m3."""
    if cutlass.const_expr(form.scale == ""):
        return exact_scale()
    if cutlass.const_expr(form.scale == "fp32"):
        return split_scale(entries.scales[panel * PANEL // form.group, turn])
    return power_scale(entries.scales[0, turn], panel)


@cute.jit
def store_e4m3(
    to_both: cutlass.Constexpr,
    words: tuple[Uint32, ...],
    scale: Scale,
    target: Target,
    offset: cutlass.Constexpr,
) -> None:
    """Convert and store a chunk of 16 columns, `offset` behind the units of the target."""
    store_pair(to_both, scaled_e4m3(words, scale), target, offset)


@cute.jit
def store_pair(
    to_both: cutlass.Constexpr,
    eight: tuple[Uint32, ...],
    target: Target,
    offset: cutlass.Constexpr,
) -> None:
    """Store 16 columns: two units, `offset` behind those of the target."""
    for k in cutlass.range_constexpr(2):
        put(to_both, target, target.units[k] + offset, eight[4 * k : 4 * k + 4])


@cute.jit
def store_e2m1(
    words: tuple[Uint32, ...],
    scales: tuple[Any, Any],
    target: Target,
    offset: cutlass.Constexpr,
    converted: cutlass.Constexpr,
) -> None:
    """Convert and store a chunk of 32 columns: four units of half a panel.

    Args:
        scales: of the first and of the last 16 columns, as `converted` takes them.
        converted: function that returns eight columns of a word of codes as four words.
    """
    second = cute.arch.lane_idx() % LANES // 2 == 1
    low, high = scales
    early, late = (high, low) if second else (low, high)
    for k in cutlass.range_constexpr(4):
        word = words[k ^ 2] if second else words[k]
        four = converted(word, late if cutlass.const_expr(k >= 2) else early)
        store(target.units[k] + offset, Uint32, four)


# ---- the panel beside the halves


@cute.jit
def has_rest(intake: cutlass.Constexpr, buffer: Int32, half: Int32) -> cutlass.Boolean:
    """Whether the panel beside the codes of both halves belongs to this piece."""
    if cutlass.const_expr(intake.rest_panel * PANEL < LATENT):
        return half == 1
    return half != buffer


@cute.jit
def codes_beside(source: Source, place: Uint32) -> Int64:
    """Return the address of the lane's chunk of an entry's codes in that panel."""
    return data_of(source, place) + LATENT + cute.arch.lane_idx() % LANES * CHUNK


@cute.jit
def fetch_rest(intake: cutlass.Constexpr, source: Source, entries: Entries, held: Held) -> None:
    """Load the lane's chunks of that panel."""
    for turn in cutlass.range_constexpr(intake.spread.turns):
        place = entries.places[turn]
        for part in cutlass.range_constexpr(2 if intake.rest == "wide" else 1):
            if cutlass.const_expr(intake.rest == "coded"):
                begin = codes_beside(source, place)
            else:
                begin = data_of(source, place) + intake.form.wide_at + wide_at(part)
            four = four_words_if(place != NOWHERE, begin)
            for k in cutlass.range_constexpr(4):
                held.rest[k, part, turn] = four[k]


@cute.jit
def store_rest(intake: cutlass.Constexpr, held: Held, target: Target, line: Int32) -> None:
    """Store the lane's chunks of that panel. line: address of the row in panel 0."""
    for turn in cutlass.range_constexpr(intake.spread.turns):
        for part in cutlass.range_constexpr(2 if intake.rest == "wide" else 1):
            words = tuple(held.rest[k, part, turn] for k in range(4))
            offset = offset_of(intake, intake.rest_panel, turn)
            if cutlass.const_expr(intake.rest == "coded"):
                there = Target(units_at(line, "e4m3"), target.peer, target.full)
                store_e4m3(intake.crosses_rest, words, exact_scale(), there, offset)
            else:
                put(intake.crosses_rest, target, units_at(line, "")[part] + offset, words)


@cute.jit
def copy_wide(intake: cutlass.Constexpr, source: Source, entries: Entries, line: Int32) -> None:
    """Start cp.async of that panel in bf16, zeros of what is no entry."""
    for turn in cutlass.range_constexpr(intake.spread.turns):
        place = entries.places[turn]
        for part in cutlass.range_constexpr(2):
            unit = units_at(line, "")[part] + offset_of(intake, intake.rest_panel, turn)
            address = data_of(source, place) + intake.form.wide_at + wide_at(part)
            copy_chunk(unit, address, place != NOWHERE)


@cute.jit
def unit_of_copy(line: Int32, panel: cutlass.Constexpr, turn: cutlass.Constexpr) -> Int32:
    """Return the address of the lane's unit where eight lanes share an entry."""
    lane, at_once = cute.arch.lane_idx(), 4
    row = lane // 8 + turn * at_once % 8  # among eight
    return line + panel * PANEL_BYTES + turn * at_once * LINE_BYTES + (lane % 8 ^ row) * CHUNK


@cute.jit
def copy_panel(
    intake: cutlass.Constexpr,
    source: Source,
    places: cute.Tensor,
    line: Int32,
    panel: cutlass.Constexpr,
    begin: Int32 | int,
) -> None:
    """Start cp.async of 64 columns of entries in bf16 where eight lanes share one; zeros of what is
    no entry. begin: byte of the columns in an entry.
    """
    lane = cute.arch.lane_idx() % 8
    for turn in cutlass.range_constexpr(intake.spread.turns):
        address = data_of(source, places[turn]) + begin + lane * CHUNK
        copy_chunk(unit_of_copy(line, panel, turn), address, places[turn] != NOWHERE)
