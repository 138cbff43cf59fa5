"""Entries with codes in fp16, which holds every e4m3 and every scaled e2m1 exactly (device code).

sm_90 converts two e4m3 to fp16 by one instruction; to bf16 it takes three and a half, see
notes/mla.md. But fp16 has a smaller range. So an entry whose scales are fp32 or UE8M0 is divided by
its unit, a power of two, which makes its largest column less than 2^16. What underflows is below
2^-39 of the largest column, or below 2^-64. The computing warps multiply S by the unit, and take it
into the weights of V, as `math.py` says. Columns in bf16 stay so: they are none of V.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from kernelkit.device.shared_words import store
from kernelkit.device.warp_mma import pack, permute, pick, scaled_fp16, widen
from kernelkit.device.words import bits_of, float_of, four_words_if, larger
from mla.attention.kernel_arguments import Source
from mla.attention.shared.entries import NOWHERE, Entries, scale_words
from mla.attention.shared.intake import PANEL
from mla.attention.shared.units import (
    LANES,
    Held,
    Target,
    codes_beside,
    offset_of,
    store_e2m1,
    store_pair,
    units_at,
)

BIAS, MANTISSA = 127, 23  # of fp32
TOP_SCALE = 6  # exponent of the largest scale of an entry, in its unit
LEAST_UNIT = -40  # exponent; with smaller ones the weight of a key times its unit may underflow
NAN_SCALE, NAN_BITS = 255, 0x7FC00000  # UE8M0 and fp32
EVERY_MAGNITUDE = 0x7FFF7FFF  # of two numbers of 16 bits
E2M1_HIGH = 0x3E3C3800, 0x46444240  # high bytes of 0, 0.5, 1, 1.5, 2, 3, 4, 6 in fp16


# ---- exponents


@cute.jit
def power(exponent: Int32) -> Float32:
    """Return 2^exponent, which has to be a normal fp32."""
    return float_of(Uint32((exponent + BIAS) << MANTISSA))


@cute.jit
def largest_pair(words: tuple[Uint32, ...]) -> Uint32:
    """Return the largest magnitudes of the low and of the high halves of some words."""
    found = words[0] & EVERY_MAGNITUDE
    for word in words[1:]:
        found = larger(found, word & EVERY_MAGNITUDE)
    return found


@cute.jit
def top_exponent(pair: Uint32) -> Int32:
    """Return the exponent field of the larger one of two magnitudes in bf16."""
    low, high = Int32(pair & 0xFFFF), Int32(pair >> 16)
    return cutlass.max(low, high) >> 7


@cute.jit
def largest_of_lanes(value: Int32) -> Int32:
    """Return the maximum over the four lanes of an entry or a row."""
    for step in cutlass.range_constexpr(2):
        other = cute.arch.shuffle_sync_bfly(value, offset=1 << step)
        value = cutlass.max(value, other)
    return value


# ---- scales and units of an entry


@cute.jit
def settle(
    intake: cutlass.Constexpr, loaded: Uint32, half: Int32
) -> tuple[tuple[Uint32, ...], Uint32]:
    """Return (scales of the lane's chunks of a half, exponent field of the unit) of an entry.

    loaded: the lane's word of the scales, of which four lanes have all.
    """
    lane = cute.arch.lane_idx()
    first = lane - lane % LANES
    top = largest_of_lanes(largest_scale(intake, loaded))
    exponent = Uint32(cutlass.max(top - TOP_SCALE, BIAS + LEAST_UNIT))
    low = cute.arch.shuffle_sync(loaded, first + 2 * half)
    high = cute.arch.shuffle_sync(loaded, first + 2 * half + 1)
    if cutlass.const_expr(intake.form.scale == "fp32"):
        return (low, high), exponent
    return (pick(low, high, 0x6420 + lane % LANES // 2 * 0x1111),), exponent


@cute.jit
def largest_scale(intake: cutlass.Constexpr, word: Uint32) -> Int32:
    """Return the exponent field of the largest scale of a word."""
    if cutlass.const_expr(intake.form.scale == "fp32"):
        return Int32((word >> MANTISSA) & 0xFF)
    pair = larger(word & 0x00FF00FF, (word >> 8) & 0x00FF00FF)
    return cutlass.max(Int32(pair & 0xFFFF), Int32(pair >> 16))


@cute.jit
def store_unit(address: Int32, exponent: Uint32) -> None:
    """Store the unit of a key, and its log2."""
    power_of_two = Int32(exponent) - BIAS
    store(address, Float32, (power(power_of_two), Float32(power_of_two)))


@cute.jit
def inverse_of(exponent: Uint32) -> Float32:
    """Return 1 / unit."""
    return power(BIAS - Int32(exponent))


@cute.jit
def inverse_of_unit(unit: Float32) -> Float32:
    """Return 1 / unit from the unit itself."""
    return float_of(Uint32(2 * BIAS << MANTISSA) - bits_of(unit))


@cute.jit
def exponent_of(intake: cutlass.Constexpr, entries: Entries, turn: cutlass.Constexpr) -> Uint32:
    """Return the exponent field of the unit of an entry."""
    return entries.scales[scale_words(intake) - 1, turn]


@cute.jit
def scale_of(intake: cutlass.Constexpr, entries: Entries, panel: cutlass.Constexpr) -> Float32:
    """Return the scale in fp32 of the lane's chunk of a panel of a half."""
    return float_of(entries.scales[panel * PANEL // intake.form.group, 0])


@cute.jit
def ratio_of(intake: cutlass.Constexpr, entries: Entries, panel: cutlass.Constexpr) -> Uint32:
    """Return twice the scale of the lane's chunk of a panel of a half, in units, in fp16."""
    exponent = exponent_of(intake, entries, 0)
    if cutlass.const_expr(intake.form.scale == "fp32"):
        ratio = scale_of(intake, entries, panel) * inverse_of(exponent)
    else:
        code = Int32((entries.scales[0, 0] >> (8 * panel)) & 0xFF)
        field = cutlass.max(code - Int32(exponent) + BIAS, 0)
        bits = Uint32(NAN_BITS) if code == NAN_SCALE else Uint32(field << MANTISSA)
        ratio = float_of(bits)
    return pack(ratio, ratio, "fp16")


# ---- numbers


@cute.jit
def halved_e4m3(words: tuple[Uint32, ...], ratio: Uint32 | None) -> tuple[Uint32, ...]:
    """Sixteen e4m3 of four words as eight words of fp16, times two of a ratio if there is one."""
    found: list[Uint32] = []
    for word in words:
        for pair in widen(word, "fp16"):
            found.append(pair if cutlass.const_expr(ratio is None) else product(pair, ratio))
    return tuple(found)


@cute.jit
def has_odd_scales(intake: cutlass.Constexpr, entries: Entries) -> Boolean:
    """Whether a scale in fp32 of the warp's entries is no power of two."""
    every = Uint32(0)
    for turn in cutlass.range_constexpr(intake.spread.turns):
        every = every | entries.scales[0, turn] | entries.scales[1, turn]
    return cute.arch.vote_any_sync(every & Uint32((1 << MANTISSA) - 1) != 0)


@cute.jit
def rounded_e4m3(words: tuple[Uint32, ...], scale: Float32, inverse: Float32) -> tuple[Uint32, ...]:
    """Sixteen e4m3 of four words times a scale, rounded to bf16, times the inverse of a unit, as
    eight words of fp16. An entry is defined by bf16. That takes five times as many instructions as
    `halved_e4m3`, whose products are exact if the scale is a power of two.
    """
    found: list[Uint32] = []
    for pair in halved_e4m3(words, None):
        rounded = cute.arch.inline_ptx(
            "{ .reg .b16 low, high; .reg .f32 a, b; mov.b32 {low, high}, {$r0}; "
            "cvt.f32.f16 a, low; cvt.f32.f16 b, high; mul.f32 a, a, {$r1}; mul.f32 b, b, {$r1}; "
            "cvt.rn.bf16x2.f32 {$w0}, b, a; }",
            write_only_types=[Uint32],
            read_only_args=[pair, scale],
        )
        found.append(scaled_fp16(rounded, inverse))
    return tuple(found)


@cute.jit
def halved_e2m1(word: Uint32, scale: Uint32) -> tuple[Uint32, ...]:
    """Eight e2m1 of a word, the lowest nibble first, times two of a scale in fp16."""
    found: list[Uint32] = []
    for codes in (word & 0xFFFF, word >> 16):
        for pair in four_e2m1(codes):
            found.append(product(pair, scale))
    return tuple(found)


@cute.jit
def four_e2m1(codes: Uint32) -> tuple[Uint32, Uint32]:
    """Four e2m1 in the lowest 16 bits as two words of fp16, whose low bytes are 0.

    prmt repeats signs, those of bytes: nibbles 1 and 3, and 0 and 2 once they are shifted.
    """
    return cute.arch.inline_ptx(
        "{ .reg .b32 which, high, even, t, u; "
        "and.b32 which, {$r0}, 0x7777; shl.b32 even, {$r0}, 4; "
        f"prmt.b32 high, {E2M1_HIGH[0]}, {E2M1_HIGH[1]}, which; "
        "prmt.b32 t, even, {$r0}, 0xC080; prmt.b32 u, even, {$r0}, 0xD090; "
        "and.b32 t, t, 0x80008000; and.b32 u, u, 0x80008000; "
        "prmt.b32 even, high, 0, 0x1404; prmt.b32 high, high, 0, 0x3424; "
        "or.b32 {$w0}, t, even; or.b32 {$w1}, u, high; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[codes],
    )


@cute.jit
def product(pair: Uint32, other: Uint32) -> Uint32:
    """Products of two fp16 and two others."""
    return cute.arch.inline_ptx(
        "mul.rn.f16x2 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[pair, other],
    )


# ---- chunks


@cute.jit
def store_halves(
    intake: cutlass.Constexpr,
    held: Held,
    entries: Entries,
    target: Target,
    number: cutlass.Constexpr,
    odd: cutlass.Constexpr,
) -> None:
    """Convert and store the lane's first chunk of a panel, or of two in e2m1, of a half.

    odd: whether scales may be no powers of two, so that codes times scales have to be rounded.
    """
    words = tuple(held.half[k, number, 0] for k in range(4))
    if cutlass.const_expr(intake.form.code == "e2m1"):
        # Twice either of the two scales, in fp16.
        scales = widen(permute(entries.scales[0, 0] >> Uint32(16 * number), 0x1100), "fp16")
        store_e2m1(words, scales, target, offset_of(intake, 2 * number, 0), halved_e2m1)
    else:
        if cutlass.const_expr(not intake.has_unit):
            eight = halved_e4m3(words, None)
        elif cutlass.const_expr(odd):
            inverse = inverse_of(exponent_of(intake, entries, 0))
            eight = rounded_e4m3(words, scale_of(intake, entries, number), inverse)
        else:
            eight = halved_e4m3(words, ratio_of(intake, entries, number))
        store_pair(False, eight, target, offset_of(intake, number, 0))


@cute.jit
def fetch_rest(source: Source, place: Uint32, wanted: Boolean, held: Held) -> None:
    """Load the lane's chunk of an entry's panel beside the halves, if it is wanted and there."""
    four = four_words_if(wanted and place != NOWHERE, codes_beside(source, place))
    for k in cutlass.range_constexpr(4):
        held.rest[k, 0, 0] = four[k]


@cute.jit
def store_rest(intake: cutlass.Constexpr, held: Held, target: Target, line: Int32) -> None:
    """Convert and store that chunk. line: address of the row in panel 0."""
    words = tuple(held.rest[k, 0, 0] for k in range(4))
    there = replace(target, units=units_at(line, "e4m3"))
    store_pair(False, halved_e4m3(words, None), there, offset_of(intake, intake.rest_panel, 0))
