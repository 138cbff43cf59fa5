"""fp32 numbers of one thread to words of e2m1 or e4m3 (device code).

Rounded to nearest even and saturated, infinities too; a NaN becomes 7 or 0x7F. Every product is
rounded by itself, with its subnormals. `arch` is one that kernels are written for, "sm_100a" or
"sm_90a": the conversions that Hopper lacks are arithmetic there, with the same bits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from kernelkit.device.warp_mma import pack_e4m3

PER_WORD = {"e2m1": 8, "e4m3": 4}


@cute.jit
def packed_elements(
    values: cute.Tensor,
    inverse: Float32,
    element: cutlass.Constexpr[str],
    arch: cutlass.Constexpr[str],
) -> cute.Tensor:
    """The elements of values * inverse; as many as fill whole words, 8 of e2m1 or 4 of e4m3."""
    per_word = PER_WORD[element]
    words = cute.make_rmem_tensor(cute.size(values) // per_word, Uint32)
    text = WORDS[element, arch]
    for word in cutlass.range_constexpr(cute.size(words)):
        elements = [values[word * per_word + index] for index in range(per_word)]
        words[word] = cute.arch.inline_ptx(
            text, write_only_types=[Uint32], read_only_args=[*elements, inverse]
        )
    return words


@cute.jit
def inverse_of(scale: cute.Tensor | None) -> Float32 | None:
    """Return 1 / scale[0], rounded once; None without a scale.

    A scale below 2^-126 counts as 2^-126: the inverse is finite, and 0 times it is 0. NaN stays
    NaN.
    """
    if cutlass.const_expr(scale is None):
        return None
    return cute.arch.inline_ptx(
        "{ .reg .f32 s; max.NaN.f32 s, {$r0}, 0f00800000; rcp.rn.f32 {$w0}, s; }",
        write_only_types=[Float32],
        read_only_args=[scale[0]],
    )


@cute.jit
def to_e4m3(values: cute.Tensor, factor: Float32 | None) -> cute.Tensor:
    """Return words of four e4m3 each: `values` (N,) times `factor`, or as they are without one.

    For all GPUs that have the conversion, from compute capability 8.9 on.
    """
    words = cute.make_rmem_tensor(cute.size(values) // PER_WORD["e4m3"], Uint32)
    for word in cutlass.range_constexpr(cute.size(words)):
        four = tuple(values[word * PER_WORD["e4m3"] + place] for place in range(4))
        if cutlass.const_expr(factor is not None):
            four = tuple(value * factor for value in four)
        words[word] = pack_e4m3(*four)
    return words


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
