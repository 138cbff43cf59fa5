"""Codes of 8 and 4 bits to bf16, scaled, in registers (device code).

A number is code * scale, rounded to bf16. NaN codes stay NaN.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernelkit.device.warp_mma import permute, pick
from kernelkit.device.words import float_of

WIDENING, BF16_NANS = 0x7B807B80, 0x7FC07FC0  # two of 2^120, two NaN
EVERY_SIGN = 0x80808080
E2M1_HIGH = 0x3F3F3F00, 0x40404040  # high bytes of 0, 0.5, 1, 1.5, 2, 3, 4, 6 in bf16
E2M1_LOW = 0xC0800000, 0xC0804000  # their low bytes
MAGNITUDES, SIGNS = 0x7777, 0x8888


@cute.jit
def from_e4m3(code: Uint32) -> Float32:
    """One e4m3 in the lowest byte as fp32."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high, first, second; .reg .b32 pair; mov.b32 {low, high}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 pair, low; mov.b32 {first, second}, pair; cvt.f32.f16 {$w0}, first; }",
        write_only_types=[Float32],
        read_only_args=[code],
    )


@dataclass(frozen=True)
class Scale:
    """A scale of codes in e4m3.

    near: a word with two of the nearest bf16, None for 1.
    rest: two of what it lacks, None if it lacks nothing.
    """

    near: Uint32 | None
    rest: Uint32 | None


@cute.jit
def power_scale(word: Uint32, number: cutlass.Constexpr) -> Scale:
    """Return the scale of byte `number` of a word, a UE8M0: 2^(code - 127), exact in bf16."""
    two = permute(word, 0x0404 | number * 0x1010) >> 1
    # 2^-127 is no normal number, and the code 255 is NaN.
    odd = two == 0 or two == Uint32(0x7F807F80)
    return Scale(two | (Uint32(0x00400040) if odd else Uint32(0)), None)


@cute.jit
def packed_split(exact: Float32) -> Uint32:
    """Return an fp32 as a sum of two bf16 in a word, the larger one in the low half: what it lacks
    is below 2^-17 of it.
    """
    near = twice_bf16(exact)
    return pick(near, twice_bf16(exact - float_of(near << 16)), Int32(0x5410))


@cute.jit
def split_scale(packed: Uint32) -> Scale:
    """Return the scale of an fp32 from its two parts, see `packed_split`."""
    return Scale(permute(packed, 0x1010), permute(packed, 0x3232))


@cute.jit
def twice_bf16(value: Float32) -> Uint32:
    """Two of an fp32 rounded to bf16 in a word."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r0};", write_only_types=[Uint32], read_only_args=[value]
    )


@cute.jit
def exact_scale() -> Scale:
    """Return a scale of 1."""
    return Scale(None, None)


@cute.jit
def scaled_e4m3(words: tuple[Uint32, ...], scale: Scale) -> tuple[Uint32, ...]:
    """Sixteen e4m3 of four words times a scale, as eight words of bf16; all are NaN if one is.

    An e4m3 shifted to a bf16's exponent and mantissa is 2^-120 times as large. That takes half the
    time of the conversion through fp16 and fp32.
    """
    marks = Uint32(0)
    for k in cutlass.range_constexpr(4):
        # Adding 1 turns the sign of a NaN code, and that of no other unless a NaN stands below it.
        marks = marks | (words[k] ^ (words[k] + Uint32(0x01010101)))
    factor = Uint32(BF16_NANS) if marks & Uint32(EVERY_SIGN) != 0 else Uint32(WIDENING)
    found: list[Uint32] = []
    for k in cutlass.range_constexpr(4):
        for pair in widened_e4m3(words[k], factor):
            found.append(times(pair, scale))
    return tuple(found)


@cute.jit
def widened_e4m3(word: Uint32, factor: Uint32) -> tuple[Uint32, Uint32]:
    """Four e4m3 as two words of bf16, 2^-120 times as large, times a factor.

    prmt puts two codes into the high bytes of 16 bits each, and the sign of the lower one between
    them, so that one arithmetic shift moves both magnitudes and leaves both signs in place.
    """
    return cute.arch.inline_ptx(
        "{ .reg .b32 t, u; "
        "prmt.b32 t, {$r0}, 0, 0x1804; prmt.b32 u, {$r0}, 0, 0x3A24; "
        "shr.s32 t, t, 4; shr.s32 u, u, 4; "
        "and.b32 t, t, 0x87f087f0; and.b32 u, u, 0x87f087f0; "
        "mul.rn.bf16x2 {$w0}, t, {$r1}; mul.rn.bf16x2 {$w1}, u, {$r1}; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[word, factor],
    )


@cute.jit
def times(pair: Uint32, scale: Scale) -> Uint32:
    """Two bf16 times a scale."""
    if cutlass.const_expr(scale.near is None):
        return pair
    if cutlass.const_expr(scale.rest is None):
        return cute.arch.inline_ptx(
            "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};",
            write_only_types=[Uint32],
            read_only_args=[pair, scale.near],
        )
    return cute.arch.inline_ptx(
        "{ .reg .b32 t; mul.rn.bf16x2 t, {$r0}, {$r2}; fma.rn.bf16x2 {$w0}, {$r0}, {$r1}, t; }",
        write_only_types=[Uint32],
        read_only_args=[pair, scale.near, scale.rest],
    )


@cute.jit
def scaled_e2m1(word: Uint32, scale: Float32) -> tuple[Uint32, ...]:
    """Eight e2m1 of a word, the lowest nibble first, times an e4m3, as four words of bf16.

    The scale is exact in bf16, and so are the products: two bits by four.
    """
    return (*four_e2m1(word & 0xFFFF, scale), *four_e2m1(word >> 16, scale))


@cute.jit
def four_e2m1(codes: Uint32, scale: Float32) -> tuple[Uint32, Uint32]:
    """Four e2m1 in the lowest 16 bits times a scale, as two words of bf16."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 which, high, low, signs, a, b, t, u, factor, zero; .reg .b16 s; "
        "mov.b32 zero, 0x80008000; "
        f"and.b32 which, {{$r0}}, {MAGNITUDES}; and.b32 signs, {{$r0}}, {SIGNS}; "
        f"prmt.b32 high, {E2M1_HIGH[0]}, {E2M1_HIGH[1]}, which; "
        f"prmt.b32 low, {E2M1_LOW[0]}, {E2M1_LOW[1]}, which; "
        "prmt.b32 a, low, high, 0x5140; prmt.b32 b, low, high, 0x7362; "
        # Signs stand at bits 3, 7, 11 and 15, and go to bits 15 and 31 of each word.
        "shl.b32 t, signs, 12; and.b32 t, t, 0x8000; "
        "shl.b32 u, signs, 24; and.b32 u, u, 0x80000000; or.b32 a, a, t; or.b32 a, a, u; "
        "shl.b32 t, signs, 4; and.b32 t, t, 0x8000; "
        "shl.b32 u, signs, 16; and.b32 u, u, 0x80000000; or.b32 b, b, t; or.b32 b, b, u; "
        "cvt.rn.bf16.f32 s, {$r1}; mov.b32 factor, {s, s}; "
        "fma.rn.bf16x2 {$w0}, a, factor, zero; fma.rn.bf16x2 {$w1}, b, factor, zero; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[codes, scale],
    )
