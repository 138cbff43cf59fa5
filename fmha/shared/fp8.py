"""Scales of e4m3 tensors, and Q in bf16 as two e4m3 terms (device code).

A scale of None means 1, without a multiplication.

A term is e4m3 times a power of two that its row shares. A row is multiplied by the power that
brings its largest element to [128, 256), and rounded to e4m3. The remainder is rounded to e4m3,
too. An element of bf16 has 8 bits and each term 4, so their sum is the element, unless it is below
2^-9 of the largest one. Then the sum is off by at most 2^-17 of the largest.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from fmha.shared.args import Tables, Work
from kernelkit.device.boxes import turn
from kernelkit.device.words import float_of, larger
from kernelkit.plan import hw


@cute.jit
def score_scale(tables: Tables, work: Work, head: Int32) -> Float32 | None:
    """Return the scale factor of q.k for a query head."""
    q_scale, k_scale = tables.q_scale, tables.k_scale
    if cutlass.const_expr(q_scale is None and k_scale is None):
        return None
    scale = Float32(1.0)
    if cutlass.const_expr(q_scale is not None):
        scale = scale * q_scale[head]
    if cutlass.const_expr(k_scale is not None):
        scale = scale * k_scale[work.kv_head]
    return scale


@cute.jit
def value_scale(tables: Tables, work: Work) -> Float32 | None:
    """Return the scale factor of V, and so of O."""
    if cutlass.const_expr(tables.v_scale is None):
        return None
    return tables.v_scale[work.kv_head]


EXPONENT_AT = 7  # bit where the exponent of a bf16 begins
MAGNITUDES = 0x7FFF7FFF  # bits of two bf16 without their signs
NOT_FINITE = 255  # exponent of infinities and NaN
LARGEST = 7  # floor of log2 of a row's largest element after scaling
BIAS = 127  # of an exponent
# Eight numbers in four words times a factor: two words of first terms, two of second ones. A
# product is exact, in fp16 too unless both of its terms are 0. Two choices save registers. The
# factor comes first, in bf16, since ptxas would hoist work that does not depend on it for a whole
# row at once. And no pair of bytes lives long by itself, since ptxas keeps each in a register.
_TERMS = (
    "{ .reg .b32 b<2>, n; .reg .f32 v<4>; .reg .b16 c<2>; "
    + "".join(
        f"mul.rn.bf16x2 b0, {{$r{2 * i}}}, {{$r4}}; mul.rn.bf16x2 b1, {{$r{2 * i + 1}}}, {{$r4}}; "
        "shl.b32 n, b0, 16; mov.b32 v0, n; and.b32 n, b0, 0xFFFF0000; mov.b32 v1, n; "
        "shl.b32 n, b1, 16; mov.b32 v2, n; and.b32 n, b1, 0xFFFF0000; mov.b32 v3, n; "
        "cvt.rn.satfinite.e4m3x2.f32 c0, v1, v0; cvt.rn.satfinite.e4m3x2.f32 c1, v3, v2; "
        f"mov.b32 {{$w{i}}}, {{c0, c1}}; "
        "cvt.rn.f16x2.f32 b0, v1, v0; cvt.rn.f16x2.e4m3x2 n, c0; sub.rn.f16x2 b0, b0, n; "
        "cvt.rn.f16x2.f32 b1, v3, v2; cvt.rn.f16x2.e4m3x2 n, c1; sub.rn.f16x2 b1, b1, n; "
        "cvt.rn.satfinite.e4m3x2.f16x2 c0, b0; cvt.rn.satfinite.e4m3x2.f16x2 c1, b1; "
        f"mov.b32 {{$w{i + 2}}}, {{c0, c1}}; "
        for i in range(2)
    )
    + "}"
)


@cute.jit
def largest_of(words: cute.Tensor) -> Uint32:
    """Return the bits of the largest bf16 magnitude, two values a word; NaN exceeds infinity."""
    top = words[0] & Uint32(MAGNITUDES)
    for word in cutlass.range(1, cute.size(words), unroll_full=True):
        top = larger(top, words[word] & Uint32(MAGNITUDES))
    return cutlass.max(top >> 16, top & Uint32(0xFFFF))


@cute.jit
def power_of(largest: Uint32) -> tuple[Uint32, Float32]:
    """Return (factor for the row's bf16, twice in a word, and its inverse), both powers of two.

    The factor brings the largest bf16 of the row to [128, 256). It is NaN if the row is not finite;
    rows below 2^-119 stay smaller.
    """
    exponent = largest >> EXPONENT_AT
    clamped = cutlass.max(exponent, Uint32(LARGEST + 1))  # so that both are normal numbers
    factor = (2 * BIAS + LARGEST - clamped) * Uint32(1 << EXPONENT_AT | 1 << EXPONENT_AT + 16)
    if exponent == NOT_FINITE:
        factor = Uint32(MAGNITUDES)
    return factor, float_of((clamped - LARGEST) << EXPONENT_AT + 16)


@cute.jit
def two_terms(words: tuple[Uint32, ...], factor: Uint32) -> tuple[Uint32, ...]:
    """Multiply eight bf16 in four words by `factor`; return two words of first terms in e4m3, then
    two of second terms.
    """
    return cute.arch.inline_ptx(
        _TERMS, write_only_types=[Uint32] * 4, read_only_args=[*words, factor]
    )


@cute.jit
def anew(row: Int32) -> Int32:
    """Return the same number, opaque to LLVM.

    Addresses derived from it are then recomputed for each block, not kept in registers for all
    blocks.
    """
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[row]
    )


@cute.jit
def place_of(
    line: cutlass.Constexpr, rows: cutlass.Constexpr, row: Int32, unit: cutlass.Constexpr
) -> Int32:
    """Return the byte of a tile where unit `unit` of a row begins; panels have `line` bytes of each
    row.
    """
    panel, inside = divmod(unit, line // hw.SMEM_UNIT_BYTES)
    return panel * rows * line + row * line + (inside ^ turn(row, line)) * hw.SMEM_UNIT_BYTES
