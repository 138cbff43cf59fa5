"""Quantise a block of fp32 numbers in a thread's registers (device code).

`moe.reference` defines the bits: IEEE fp32 with subnormals, every product rounded separately, so no
product may become part of a fused multiply-add. `arch` is "sm_100a" or "sm_90a": conversions that
Hopper lacks are computed by arithmetic there, with the same bits.

`quantise_block` does everything. If several threads hold a block, they find its amax together, and
each calls `block_scale` and `packed_elements`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from kernelkit.device.narrow import packed_elements
from kernelkit.device.words import bits_of, float_of
from moe.formats import BlockFormat

FLT_MAX = float.fromhex("0x1.fffffep127")
INFINITY_BITS = 0x7F800000
NAN_BITS = 0x7FFFFFFF
# ue8m0
MANTISSA_BITS = 23
SMALLEST_BITS = 0x00400000  # 2^-127, a subnormal, is code 0 and the inverse of the largest
LARGEST_CODE = 254
NAN_CODE = 255


@cute.jit
def quantise_block(
    values: cute.Tensor,
    encode_scale: Float32 | None,
    form: cutlass.Constexpr[BlockFormat],
    arch: cutlass.Constexpr[str],
    amax: Float32 | None = None,
) -> tuple[cute.Tensor, Uint32]:
    """Return (elements packed in a register tensor of Uint32, their scale factor's code as Uint32).

    The words are those of `data` in memory, lowest first: 2 of nvfp4, 4 of mxfp4, 8 of mxfp8.

    Args:
        values: register tensor of form.block Float32.
        encode_scale: g; None in a format without a global scale.
        amax: largest magnitude of `values`, if it is known.
    """
    if cutlass.const_expr(amax is None):
        amax = largest_magnitude(values)
    code, inverse = block_scale(amax, encode_scale, form)
    return packed_elements(values, inverse, form.element, arch), code


@cute.jit
def largest_magnitude(values: cute.Tensor) -> Float32:
    """Return the amax of a register tensor of Float32; one NaN makes it NaN."""
    top = Float32(0.0)
    for index in cutlass.range_constexpr(cute.size(values)):
        top = cute.arch.fmax(top, magnitude(values[index]), nan=True)
    return top


@cute.jit
def magnitude(value: Float32) -> Float32:
    """|value|."""
    return cute.arch.inline_ptx(
        "abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value]
    )


@cute.jit
def largest_half(values: cute.Tensor) -> Uint32:
    """Return the bits of the amax of a register tensor of 16-bit floats, compared two at a time.
    Without the sign, bits are ordered as the numbers, NaN last."""
    words, pair = cute.recast_tensor(values, Uint32), Uint32(0)
    for index in cutlass.range_constexpr(cute.size(words)):
        pair = cute.arch.inline_ptx(
            "{ .reg .b32 word, top; and.b32 word, {$r0}, 0x7fff7fff; mov.b32 top, {$r1}; "
            "max.u16x2 top, top, word; mov.b32 {$w0}, top; }",
            write_only_types=[Uint32],
            read_only_args=[words[index], pair],
        )
    return cutlass.max(pair & 0xFFFF, pair >> 16)


@cute.jit
def float_of_half(bits: Uint32, dtype: cutlass.Constexpr) -> Float32:
    """Convert the bits of a bf16 or fp16 to fp32."""
    if cutlass.const_expr(dtype is cutlass.BFloat16):
        return float_of(bits << 16)
    return cute.arch.inline_ptx(
        "{ .reg .b16 half, unused; mov.b32 {half, unused}, {$r0}; cvt.f32.f16 {$w0}, half; }",
        write_only_types=[Float32],
        read_only_args=[bits],
    )


@cute.jit
def encode_scale_of(amax: Float32, form: cutlass.Constexpr[BlockFormat]) -> Float32:
    """Return g, which maps amax to the largest number; 1 where amax is 0."""
    g = at_most_flt_max(Float32(form.amax_target) / amax)
    return Float32(1.0) if amax == 0.0 else g


@cute.jit
def block_scale(
    amax: Float32, encode_scale: Float32 | None, form: cutlass.Constexpr[BlockFormat]
) -> tuple[Uint32, Float32]:
    """Return (code of the scale factor of a block as Uint32, factor of its elements)."""
    wanted = amax * Float32(1.0 / form.largest)
    if cutlass.const_expr(form.scale == "ue8m0"):
        code = ue8m0(wanted)
        return code, inverse_of_ue8m0(code)
    code, scale = e4m3(wanted * encode_scale)
    inverse = at_most_flt_max(encode_scale / scale)
    return code, (Float32(0.0) if scale == 0.0 else inverse)


@cute.jit
def at_most_flt_max(value: Float32) -> Float32:
    """Return min(value, FLT_MAX), NaN where the value is NaN."""
    return Float32(FLT_MAX) if value > FLT_MAX else value


@cute.jit
def e4m3(value: Float32) -> tuple[Uint32, Float32]:
    """Return (code, value of the code), rounded to nearest and saturated."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 code, half, unused; .reg .b32 pair; "
        "cvt.rn.satfinite.e4m3x2.f32 code, 0f00000000, {$r0}; cvt.u32.u16 {$w0}, code; "
        "cvt.rn.f16x2.e4m3x2 pair, code; mov.b32 {half, unused}, pair; cvt.f32.f16 {$w1}, half; }",
        write_only_types=[Uint32, Float32],
        read_only_args=[value],
    )


@cute.jit
def ue8m0(value: Float32) -> Uint32:
    """Return the code of the smallest power of two >= value, which is not negative; within its
    limits."""
    bits = bits_of(value)
    code = cutlass.min((bits + 0x7FFFFF) >> MANTISSA_BITS, Uint32(LARGEST_CODE))
    code = Uint32(0) if bits <= SMALLEST_BITS else code
    return Uint32(NAN_CODE) if bits > INFINITY_BITS else code


@cute.jit
def inverse_of_ue8m0(code: Uint32) -> Float32:
    """Return 1 / the value of a code, exactly: all inverses exist, one of them as a subnormal."""
    bits = (Uint32(LARGEST_CODE) - code) << MANTISSA_BITS
    bits = Uint32(SMALLEST_BITS) if code == LARGEST_CODE else bits
    bits = Uint32(NAN_BITS) if code == NAN_CODE else bits
    return float_of(bits)
