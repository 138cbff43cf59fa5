"""Entries of the cache that gathering warps bring: their numbers, places and scales (device code).

A warp reads `spread.at_once` entries at a time, each by `spread.lanes` neighbouring lanes.
Registers are scarce: what is spilled has to arrive first. So an entry is a word, the distance from
the cache's begin in units of 16 bytes, and its scales are words with what this lane needs of them.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernelkit.device.warp_mma import pick
from kernelkit.device.words import float_of, four_words_if, index_if, request_if
from kernelkit.plan import hw
from mla.attention.kernel_arguments import Source
from mla.attention.shared.dequantise import packed_split
from mla.attention.shared.intake import CHUNK, HALF, PANEL, Intake
from mla.attention.shared.work import HasWork

NOWHERE = 0xFFFFFFFF  # place of what is no entry


@dataclass(frozen=True)
class Entries:
    """Entries of the cache that a gathering lane has of a tile: Uint32 tensors in registers."""

    places: cute.Tensor  # (entry,), begin of the data in units of 16 bytes, or NOWHERE
    scales: cute.Tensor  # (word, entry), see `fetch_scales`


def make_entries(intake: Intake) -> Entries:
    turns = intake.spread.turns
    return Entries(
        cute.make_rmem_tensor(turns, Uint32),
        cute.make_rmem_tensor((scale_words(intake), turns), Uint32),
    )


def scale_words(intake: Intake) -> int:
    """Words of an entry's scales of a half that a lane holds, and one for its unit."""
    return (2 if intake.form.scale == "fp32" else 1) + intake.has_unit


@cute.jit
def source_of(scope: HasWork, intake: cutlass.Constexpr) -> Source:
    return scope.given.keys if cutlass.const_expr(intake.which == 0) else scope.given.extra


@cute.jit
def data_of(source: Source, place: Uint32) -> Int64:
    """Return the address of an entry's data."""
    return source.store.iterator.toint() + (Int64(place) << 4)


@cute.jit
def keys_of_tile(
    intake: cutlass.Constexpr, scope: HasWork, number: Int32, size: cutlass.Constexpr
) -> tuple[Int32, Int32]:
    """Return the first key of a tile of this CTA in its source, and how many the source has.

    size: keys of a tile.
    """
    tile, count = scope.work.begin + number, scope.work.keys
    if cutlass.const_expr(intake.which == 1):
        tile, count = tile - scope.work.own_tiles, scope.work.extra
    return tile * size, count


@cute.jit
def index_of(intake: cutlass.Constexpr, scope: HasWork, key: Int32, count: Int32) -> Int32 | Int64:
    """Load the index of a key below `count`, -1 for another one: the number of an entry if keys are
    listed, else that of the key's page. `number_from` waits for it, this function does not.
    """
    keys, places = intake.keys, source_of(scope, intake).places
    column = key if cutlass.const_expr(keys.listed) else key // keys.rows
    place = Int64(scope.work.entry) * places.stride[0] + Int64(column) * places.stride[1]
    address = places.iterator.toint() + place * (places.element_type.width // 8)
    return index_if(key < count, address, index_type(intake), -1)


def index_type(intake: Intake) -> type:
    return Int64 if intake.keys.wide_index else Int32


@cute.jit
def number_from(
    intake: cutlass.Constexpr, source: Source, index: Int32 | Int64, key: Int32
) -> Int32:
    """Return the number of the entry of a key, -1 if its index names none.

    A key of a page has the number of the page times the rows of a page, plus its row.
    """
    keys, pages = intake.keys, source.store.shape[0]
    if cutlass.const_expr(keys.listed):
        inside = index >= 0 and index < Int64(pages) * keys.rows
        return Int32(index) if inside else Int32(-1)
    there = index >= 0 and index < pages
    return index * keys.rows + key % keys.rows if there else Int32(-1)


# ---- places and scales


@cute.jit
def find_entries(
    intake: cutlass.Constexpr,
    source: Source,
    numbers: cute.Tensor,
    half: Int32,
    entries: Entries,
) -> None:
    """Find the entries with these numbers, and load their scales for a half."""
    keys, form, strides = intake.keys, intake.form, source.store.stride
    for turn in cutlass.range_constexpr(intake.spread.turns):
        number = numbers[turn]
        slot, row = number // keys.rows, number % keys.rows
        if cutlass.const_expr(form.plain):
            item = source.store.element_type.width // 8
            data = (Int64(slot) * strides[0] + Int64(row) * strides[1]) * item
            scales = data
        else:
            begin = Int64(slot) * strides[0]
            data = begin + source.data_offset + row * form.data_bytes
            scales = data + form.scale_at
            if cutlass.const_expr(form.scale_at < 0):
                scales = begin + source.scale_offset + row * form.scale_bytes
        entries.places[turn] = Uint32(data >> 4) if number >= 0 else Uint32(NOWHERE)
        if cutlass.const_expr(form.scale != ""):
            address = source.store.iterator.toint() + scales
            fetch_scales(intake, address, number >= 0, half, entries, turn)


@cute.jit
def entry_of_turn(
    intake: cutlass.Constexpr,
    tiles: tuple[Entries, Entries],
    turn: Int32,
    found: Entries,
    slot: cutlass.Constexpr,
) -> None:
    """Copy entry number `turn` of two tiles, one behind the other, to a slot of `found`."""
    every = [(tile, number) for tile in tiles for number in range(intake.spread.turns)]
    found.places[slot] = tiles[0].places[0]
    for word in cutlass.range_constexpr(scale_words(intake)):
        found.scales[word, slot] = tiles[0].scales[word, 0]
    for position in cutlass.range_constexpr(1, len(every)):
        tile, number = every[position]
        here = turn == position
        found.places[slot] = tile.places[number] if here else found.places[slot]
        for word in cutlass.range_constexpr(scale_words(intake)):
            old = found.scales[word, slot]
            found.scales[word, slot] = tile.scales[word, number] if here else old


@cute.jit
def request(intake: cutlass.Constexpr, source: Source, entries: Entries, half: Int32) -> None:
    """Request the bytes of a half of the lane's entries to L2: a line for each of four lanes. Where
    entries come from memory, not from L2, their loads would be late, see notes/mla.md.
    """
    form, lane = intake.form, cute.arch.lane_idx() % intake.spread.lanes
    every, own = form.data_bytes, intake.chunks * intake.spread.lanes * CHUNK
    last = every - own if half == 1 else Int32(own)
    offset = half * own + cutlass.min(lane * hw.L2_LINE_BYTES, last - 1)
    for turn in cutlass.range_constexpr(intake.spread.turns):
        place = entries.places[turn]
        request_if(place != NOWHERE, data_of(source, place) + offset)


@cute.jit
def take_over(intake: cutlass.Constexpr, entries: Entries, others: Entries) -> None:
    """Make `others` the entries. Scales in fp32, which have arrived by now, are split."""
    entries.places.store(others.places.load())
    for turn in cutlass.range_constexpr(intake.spread.turns):
        for word in cutlass.range_constexpr(scale_words(intake)):
            scales = others.scales[word, turn]
            if cutlass.const_expr(intake.form.scale == "fp32"):
                scales = packed_split(float_of(scales))
            entries.scales[word, turn] = scales


@cute.jit
def fetch_scales(
    intake: cutlass.Constexpr,
    address: Int64,
    valid: cutlass.Boolean,
    half: Int32,
    entries: Entries,
    turn: cutlass.Constexpr,
) -> None:
    """Load an entry's scales for a half. Keep what this lane needs.

    fp32: the two of the half. UE8M0: a byte for each panel. e4m3, for e2m1: two bytes for each
    chunk.
    """
    form = intake.form
    if cutlass.const_expr(intake.has_unit):  # lanes share them, see `sm90/halves.py`
        word = address + cute.arch.lane_idx() % intake.spread.lanes * 4
        (entries.scales[0, turn],) = words_if(valid, word, 1)
    elif cutlass.const_expr(form.scale == "fp32"):
        entries.scales[0, turn], entries.scales[1, turn] = words_if(valid, address + half * 8, 2)
    else:
        begin = address + half * (HALF * PANEL // form.group)
        entries.scales[0, turn] = scales_of_half(form, begin, valid)


@cute.jit
def scales_of_half(form: cutlass.Constexpr, address: Int64, valid: cutlass.Boolean) -> Uint32:
    """Load a half's scales of one byte; return what this lane needs."""
    lane = cute.arch.lane_idx() % 4
    if cutlass.const_expr(form.group == PANEL):
        (word,) = words_if(valid, address, 1)
        return word
    if cutlass.const_expr(form.scale == "ue8m0"):  # two of a panel
        low, high = words_if(valid, address, 2)
        return pick(low, high, 0x6420 + lane // 2 * 0x1111)
    words = four_words_if(valid, address)  # eight of two panels, two for each lane
    low = words[1] if lane // 2 == 1 else words[0]
    high = words[3] if lane // 2 == 1 else words[2]
    return pick(low, high, 0x5410 + lane % 2 * 0x2222)


@cute.jit
def words_if(
    is_there: cutlass.Boolean, address: Int64, count: cutlass.Constexpr
) -> tuple[Uint32, ...]:
    """One or two words in global memory, aligned to all their bytes; zeros if not `is_there`."""
    names = ["w0", "w1"][:count]
    zeros = " ".join(f"mov.b32 {name}, 0;" for name in names)
    results = " ".join(f"mov.b32 {{$w{k}}}, {name};" for k, name in enumerate(names))
    vector, words = (".v2", "{w0, w1}") if count == 2 else ("", "w0")
    found = cute.arch.inline_ptx(
        f"{{ .reg .pred there; .reg .b32 w<2>; {zeros} setp.ne.s32 there, {{$r1}}, 0; "
        f"@there ld.global{vector}.b32 {words}, [{{$r0}}]; {results} }}",
        write_only_types=[Uint32] * count,
        read_only_args=[address, Int32(is_there)],
    )
    return found if cutlass.const_expr(count > 1) else (found,)
