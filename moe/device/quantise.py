"""A block of fp32 numbers in one thread's registers, in a block-scaled format (device code).

`moe.reference` defines the bits: IEEE fp32 with its subnormals, every product rounded by itself, so
that no product may become part of a fused multiply-add. `arch` is one that kernels are written for,
"sm_100a" or "sm_90a": the conversions that Hopper lacks are arithmetic there, with the same bits.

`quantise_block` is all of it. Where several threads hold a block they find its amax together, and
each takes `block_scale` and `packed_elements`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from kernelkit.words import bits_of, float_of
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
) -> tuple:
    """(elements packed in a register tensor of Uint32, the code of their scale factor as Uint32).

    values: register tensor of form.block Float32. encode_scale: g, None in a format without. The
    words are those of `data` in memory, lowest first: 2 of nvfp4, 4 of mxfp4, 8 of mxfp8.
    """
    code, inverse = block_scale(largest_magnitude(values), encode_scale, form)
    return packed_elements(values, inverse, form, arch), code


@cute.jit
def largest_magnitude(values: cute.Tensor) -> Float32:
    """amax of a register tensor of Float32; one NaN makes it NaN."""
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
def encode_scale_of(amax: Float32, form: cutlass.Constexpr[BlockFormat]) -> Float32:
    """g, with which amax becomes the largest number; 1 where amax is 0."""
    g = at_most_flt_max(Float32(form.amax_target) / amax)
    return Float32(1.0) if amax == 0.0 else g


@cute.jit
def block_scale(
    amax: Float32, encode_scale: Float32 | None, form: cutlass.Constexpr[BlockFormat]
) -> tuple:
    """(code of the scale factor of a block as Uint32, what its elements are multiplied by)."""
    wanted = amax * Float32(1.0 / form.largest)
    if cutlass.const_expr(form.scale == "ue8m0"):
        code = ue8m0(wanted)
        return code, inverse_of_ue8m0(code)
    code, scale = e4m3(wanted * encode_scale)
    inverse = at_most_flt_max(encode_scale / scale)
    return code, (Float32(0.0) if scale == 0.0 else inverse)


@cute.jit
def packed_elements(
    values: cute.Tensor,
    inverse: Float32,
    form: cutlass.Constexpr[BlockFormat],
    arch: cutlass.Constexpr[str],
) -> cute.Tensor:
    """The elements of values * inverse; as many as fill whole words, 8 of e2m1 or 4 of e4m3."""
    per_word = 4 * form.per_byte
    words = cute.make_rmem_tensor(cute.size(values) // per_word, Uint32)
    text = WORDS[form.element, arch]
    for word in cutlass.range_constexpr(cute.size(words)):
        elements = [values[word * per_word + index] for index in range(per_word)]
        words[word] = cute.arch.inline_ptx(
            text, write_only_types=[Uint32], read_only_args=[*elements, inverse]
        )
    return words


@cute.jit
def at_most_flt_max(value: Float32) -> Float32:
    """min(value, FLT_MAX), NaN where the value is NaN."""
    return Float32(FLT_MAX) if value > FLT_MAX else value


@cute.jit
def e4m3(value: Float32) -> tuple:
    """(code, value of the code), rounded to nearest and saturated."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 code, half, unused; .reg .b32 pair; "
        "cvt.rn.satfinite.e4m3x2.f32 code, 0f00000000, {$r0}; cvt.u32.u16 {$w0}, code; "
        "cvt.rn.f16x2.e4m3x2 pair, code; mov.b32 {half, unused}, pair; cvt.f32.f16 {$w1}, half; }",
        write_only_types=[Uint32, Float32],
        read_only_args=[value],
    )


@cute.jit
def ue8m0(value: Float32) -> Uint32:
    """Code of the smallest power of two >= value, which is not negative; within its limits."""
    bits = bits_of(value)
    code = cutlass.min((bits + 0x7FFFFF) >> MANTISSA_BITS, Uint32(LARGEST_CODE))
    code = Uint32(0) if bits <= SMALLEST_BITS else code
    return Uint32(NAN_CODE) if bits > INFINITY_BITS else code


@cute.jit
def inverse_of_ue8m0(code: Uint32) -> Float32:
    """1 / the value of a code, exactly: all inverses are there, one of them a subnormal."""
    bits = (Uint32(LARGEST_CODE) - code) << MANTISSA_BITS
    bits = Uint32(SMALLEST_BITS) if code == LARGEST_CODE else bits
    bits = Uint32(NAN_BITS) if code == NAN_CODE else bits
    return float_of(bits)


def _products(arch: str, count: int) -> str:
    """v0 .. = `count` operands times the one behind them; `.rn` keeps ptxas from fusing them."""
    if arch == "sm_90a":
        return "".join(f"mul.rn.f32 v{i}, {{$r{i}}}, {{$r{count}}}; " for i in range(count))
    text = f".reg .b64 pair, factor; mov.b64 factor, {{{{$r{count}}}, {{$r{count}}}}}; "
    for i in range(0, count, 2):
        text += f"mov.b64 pair, {{{{$r{i}}}, {{$r{i + 1}}}}}; mul.rn.f32x2 pair, pair, factor; "
        text += f"mov.b64 {{v{i}, v{i + 1}}}, pair; "
    return text


def _converted(arch: str, element: str) -> str:
    """A word by the conversions that are there; of two codes the first is lowest."""
    count, bits = (8, 8) if element == "e2m1" else (4, 16)
    convert = f"cvt.rn.satfinite.{element}x2.f32"
    codes = "".join(f"{convert} c{i}, v{2 * i + 1}, v{2 * i}; " for i in range(count // 2))
    names = ", ".join(f"c{i}" for i in range(count // 2))
    return (
        f"{{ .reg .f32 v<{count}>; .reg .b{bits} c<{count // 2}>; {_products(arch, count)}{codes}"
        f"mov.b32 {{$w0}}, {{{names}}}; }}"
    )


def _computed_e2m1() -> str:
    """A word of e2m1 by arithmetic that every architecture has.

    The code of |v| is min(2 |v|, |v| + 2, |v| / 2 + 4, 7), rounded to the nearest integer, of two
    to the even one: each is the line through the codes of one binade. Adding 2^23 rounds, once,
    and leaves the code in the lowest bits; all that stands above them adds up to a constant. The
    minima are those of integers. A product that is NaN is positive and its bits are larger than
    those of any number: that makes it 7, as cvt does. Last come the signs, a byte of each product.
    """
    text = "{ .reg .f32 v<8>, a, x, y, z; .reg .b32 b, n, s, t; " + _products("sm_90a", 8)
    text += f"mov.b32 {{$w0}}, {-sum(0x4B000000 << 4 * k for k in range(8)) % (1 << 32)}; "
    for k in range(8):
        text += (
            f"abs.f32 a, v{k}; "
            "fma.rn.f32 x, a, 0f40000000, 0f4B000000; add.rn.f32 y, a, 0f4B000002; "
            "fma.rn.f32 z, a, 0f3F000000, 0f4B000004; mov.b32 n, x; "
            "mov.b32 b, y; min.s32 n, n, b; mov.b32 b, z; min.s32 n, n, b; "
            f"min.s32 n, n, 0x4B000007; mad.lo.u32 {{$w0}}, n, {1 << 4 * k}, {{$w0}}; "
        )
    for first, shift, mask in ((0, 4, 0x08080808), (1, 0, 0x80808080)):
        for target, k in (("s", first), ("t", first + 4)):
            text += f"mov.b32 n, v{k}; mov.b32 b, v{k + 2}; prmt.b32 {target}, n, b, 0x73; "
        text += f"prmt.b32 s, s, t, 0x5410; shr.u32 s, s, {shift}; "
        text += f"lop3.b32 {{$w0}}, s, {mask}, {{$w0}}, 0xEA; "  # (s & mask) | word
    return text + "}"


# PTX of a word: operands are the elements, the lowest first, and what they are multiplied by.
WORDS = {
    ("e4m3", "sm_100a"): _converted("sm_100a", "e4m3"),
    ("e4m3", "sm_90a"): _converted("sm_90a", "e4m3"),
    ("e2m1", "sm_100a"): _converted("sm_100a", "e2m1"),
    ("e2m1", "sm_90a"): _computed_e2m1(),
}
