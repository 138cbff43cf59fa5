"""Entries of the cache that gathering warps bring: their numbers, places and scales (device code).

A warp reads `spread.at_once` entries at a time, each by `spread.lanes` neighbouring lanes. Numbers
are loaded a tile ahead of the places and scales, and these a tile or half a tile ahead of the data.

Registers are scarce: what is spilled has to arrive first. So an entry is a word, the distance from
the cache's begin in units of 16 bytes, and its scales are words with what this lane needs of them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernelkit.device.shared_words import store
from kernelkit.device.warp_mma import pick
from kernelkit.device.words import float_of, four_words_if
from kernelkit.plan import hw
from mla.attention.kernel_arguments import Source
from mla.attention.sm90.args import Entries, Numbers, Scope
from mla.attention.sm90.dequantise import packed_split
from mla.attention.sm90.plan import HALF, KEYS, PANEL, Intake, Plan90

NOWHERE = 0xFFFFFFFF  # place of what is no entry


def make_numbers(intake: Intake) -> Numbers:
    return Numbers(
        cute.make_rmem_tensor(intake.spread.turns, Int32), cute.make_rmem_tensor(2, Int32)
    )


def make_entries(intake: Intake) -> Entries:
    turns = intake.spread.turns
    return Entries(
        cute.make_rmem_tensor(turns, Uint32),
        cute.make_rmem_tensor((scale_words(intake), turns), Uint32),
        cute.make_rmem_tensor(2, Uint32),
    )


def scale_words(intake: Intake) -> int:
    """Words of an entry's scales that a lane holds: for a half, then for the other if they lie
    apart from the data, whose place alone is kept.
    """
    form = intake.form
    if form.scale == "fp32":
        return 2
    return intake.halves if form.scale else 1


@cute.jit
def source_of(scope: Scope, intake: cutlass.Constexpr) -> Source:
    return scope.given.keys if cutlass.const_expr(intake.which == 0) else scope.given.extra


@cute.jit
def data_of(source: Source, place: Uint32) -> Int64:
    """Return the address of an entry's data."""
    return source.store.iterator.toint() + (Int64(place) << 4)


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


@cute.jit
def number_of(intake: cutlass.Constexpr, scope: Scope, key: Int32, count: Int32) -> Int32:
    """Return the number of a key below `count`, -1 of another one or of what is no entry.

    A listed key has the number of an entry, another one that of its page times the rows of a page,
    plus its row.
    """
    keys, source, found = intake.keys, source_of(scope, intake), Int32(-1)
    if key < count:
        if cutlass.const_expr(keys.listed):
            number = source.places[scope.work.entry, key]
            inside = number >= 0 and number < Int64(source.store.shape[0]) * keys.rows
            found = Int32(number) if inside else Int32(-1)
        else:
            page = source.places[scope.work.entry, key // keys.rows]
            if page >= 0 and page < source.store.shape[0]:
                found = page * keys.rows + key % keys.rows
    return found


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


# ---- places and scales


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
    keys, form, strides = intake.keys, intake.form, source.store.stride
    for turn in cutlass.range_constexpr(intake.spread.turns):
        number = numbers.own[turn]
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
    if marks(plan):
        for part in cutlass.range_constexpr(2):
            entries.found[part] = Uint32(cute.arch.vote_ballot_sync(numbers.every[part] >= 0))


@cute.jit
def same_entries(
    intake: cutlass.Constexpr, source: Source, entries: Entries, others: Entries
) -> None:
    """Copy entries for their right half. Scales in the data are loaded."""
    for turn in cutlass.range_constexpr(intake.spread.turns):
        place = entries.places[turn]
        others.places[turn] = place
        if cutlass.const_expr(intake.form.scale == "fp32"):
            address = data_of(source, place) + intake.form.scale_at
            fetch_scales(intake, address, place != NOWHERE, Int32(1), others, turn)
        elif cutlass.const_expr(intake.form.scale != ""):
            others.scales[0, turn] = entries.scales[intake.halves - 1, turn]


@cute.jit
def take_over(intake: cutlass.Constexpr, entries: Entries, others: Entries) -> None:
    """Make `others` the entries. Scales in fp32, which have arrived by now, are split."""
    entries.places.store(others.places.load())
    entries.found.store(others.found.load())
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
    """Load an entry's scales for a half, for both if they lie apart and the warp fills both. Keep
    what this lane needs, in words for a half each.

    fp32: the two of the half. UE8M0: a byte for each panel. e4m3, for e2m1: two bytes for each
    chunk.
    """
    form, halves = intake.form, intake.halves
    if cutlass.const_expr(form.scale == "fp32"):
        entries.scales[0, turn], entries.scales[1, turn] = words_if(valid, address + half * 8, 2)
    else:
        begin = address
        if cutlass.const_expr(halves == 1):
            begin = address + half * (HALF * PANEL // form.group)
        for number in cutlass.range_constexpr(halves):
            at = begin + number * (HALF * PANEL // form.group)
            entries.scales[number, turn] = scales_of_half(form, at, valid)


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
