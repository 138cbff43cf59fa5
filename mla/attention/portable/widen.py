"""Eight columns of a raw key in bf16 (device code).

Elements are multiplied by their scale in fp32 and rounded to bf16, once. e4m3 becomes a half first,
exactly; e2m1 becomes a half by its bits, 2^-14 times its value, which the scale makes up for.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernelkit.device import warp_mma
from kernelkit.device.shared_words import load
from kernelkit.device.words import float_of
from mla.attention.formats import Form

COLUMNS = 8  # of one chunk in bf16
HALF_BIAS = 2.0**14  # a half's exponent bias, less that of e2m1
E4M3_BIAS = 2.0**120  # that of fp32, less that of e4m3
SMALLEST_BITS, NAN_BITS = 0x00400000, 0x7FFFFFFF  # 2^-127, a subnormal, is code 0
MANTISSA = 23
PRODUCTS = (
    "{ .reg .b16 a, b; .reg .f32 x, y; mov.b32 {a, b}, {$r0}; "
    "cvt.f32.f16 x, a; cvt.f32.f16 y, b; mul.rn.f32 x, x, {$r1}; mul.rn.f32 y, y, {$r1}; "
    "cvt.rn.bf16x2.f32 {$w0}, y, x; }"
)


@cute.jit
def widened(
    form: cutlass.Constexpr[Form],
    arch: cutlass.Constexpr[str],
    raw: Int32,
    chunk: Int32,
    first: cutlass.Constexpr[int],
) -> tuple[Uint32, ...]:
    """Return four words: columns 8 chunk to 8 chunk + 7 of the key at `raw` in shared memory.

    first: the chunk of the first of eight lanes; all of them are quantised, or none.
    """
    if cutlass.const_expr(first * COLUMNS >= form.coded):
        return load(raw + form.wide_at + (chunk - form.coded // COLUMNS) * 16, Uint32, 4)
    if cutlass.const_expr(not form.group):  # e4m3 without scales is exact
        codes = load(raw + chunk * COLUMNS, Uint32, 2)
        return *warp_mma.widen(codes[0], "bf16"), *warp_mma.widen(codes[1], "bf16")
    scale = _scale(form, raw, chunk)
    if cutlass.const_expr(form.code == "e2m1"):
        halves = _halves_of_e2m1(load(raw + chunk * (COLUMNS // 2), Uint32))
    else:
        codes = load(raw + chunk * COLUMNS, Uint32, 2)
        halves = *warp_mma.widen(codes[0], "fp16"), *warp_mma.widen(codes[1], "fp16")
    return tuple(_product(pair, scale) for pair in halves)


@cute.jit
def _product(pair: Uint32, scale: Float32) -> Uint32:
    """Return two halves times the scale in bf16."""
    return cute.arch.inline_ptx(PRODUCTS, write_only_types=[Uint32], read_only_args=[pair, scale])


@cute.jit
def _scale(form: cutlass.Constexpr[Form], raw: Int32, chunk: Int32) -> Float32:
    """Return the scale of a chunk, with the bias of its elements."""
    group = chunk * COLUMNS // form.group
    if cutlass.const_expr(form.scale == "fp32"):
        return load(raw + form.scale_at + group * 4, Float32)
    byte = _byte(raw + form.data_bytes + group)
    if cutlass.const_expr(form.scale == "ue8m0"):
        bits = Uint32(SMALLEST_BITS) if byte == 0 else byte << MANTISSA
        return float_of(Uint32(NAN_BITS) if byte == 0xFF else bits)
    magnitude = float_of((byte & 0x7F) << 20) * Float32(E4M3_BIAS)
    magnitude = float_of(Uint32(NAN_BITS)) if (byte & 0x7F) == 0x7F else magnitude
    sign = Float32(-HALF_BIAS) if byte > 0x7F else Float32(HALF_BIAS)
    return magnitude * sign


@cute.jit
def _byte(address: Int32) -> Uint32:
    return cute.arch.inline_ptx(
        "{ .reg .b16 found; ld.shared.u8 found, [{$r0}]; cvt.u32.u16 {$w0}, found; }",
        write_only_types=[Uint32],
        read_only_args=[address],
    )


@cute.jit
def _halves_of_e2m1(word: Uint32) -> tuple[Uint32, ...]:
    """Return four words of two halves, 2^-14 times the eight numbers of `word`, in order."""
    return tuple(_pair_of_e2m1((word >> (8 * byte)) & Uint32(0xFF)) for byte in range(4))


@cute.jit
def _pair_of_e2m1(codes: Uint32) -> Uint32:
    """Return two halves, 2^-14 times the numbers of two codes, the low one first."""
    low = ((codes & 0x7) << 9) | ((codes & 0x8) << 12)
    high = ((codes & 0x70) << 21) | ((codes & 0x80) << 24)
    return low | high
