"""Access of threads to weights and activations, and arithmetic on them (device code).

Readers of the two layouts differ in `fetch` alone. Either returns the same quants and scale, so the
arithmetic and its order do not depend on the layout.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Uint32

from q8_0.blocks import BLOCK, BLOCK_BYTES, SCALE_BYTES, SOA
from q8_0.params import WeightWords

TYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}
BIASED = 0x4B000000  # 2^23 as fp32: the value of its lowest byte adds to it
# Loads of weights, which are read once. Without .nc: ptxas moves .nc loads past a `sync_warp` down
# to their uses, so that few are in flight.
READ, READ_TOGETHER = "ld.global.L1::no_allocate", "ld.global"
CONSTANT = "ld.global.nc"  # of activations, which all warps read
FOUR_QUANTS = "{ .reg .b32 u, m; .reg .f32 f; xor.b32 u, {$r0}, 0x80808080; " + "".join(
    f"prmt.b32 m, u, {BIASED}, {0x7440 + k}; mov.b32 f, m; "
    f"sub.rn.f32 {{$w{k}}}, f, 0f4B000080; "  # 2^23 + 128
    for k in range(4)
)
FOUR_QUANTS += "}"
# dtype -> PTX that makes fp32 of the numbers of a word, and how many these are.
NUMBERS = {
    "fp32": ("mov.b32 {$w0}, {$r0};", 1),
    "bf16": (
        "{ .reg .b32 a, b; shl.b32 a, {$r0}, 16; and.b32 b, {$r0}, 0xFFFF0000; "
        "mov.b32 {$w0}, a; mov.b32 {$w1}, b; }",
        2,
    ),
    "fp16": (
        "{ .reg .b16 a, b; mov.b32 {a, b}, {$r0}; cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; }",
        2,
    ),
}


@dataclass(frozen=True)
class Row:
    """Addresses of a row's quants and scales; both are that of its first block if interleaved."""

    quants: Int64
    scales: Int64


@dataclass(frozen=True)
class Piece:
    """Neighbouring quants, four to a word, the first lowest, and the fp16 bits of their scale."""

    words: tuple[Uint32, ...]
    scale: Uint32


@cute.jit
def row_of(weights: WeightWords, row: Int32) -> Row:
    """A row that there is."""
    return Row(
        weights.quants + Int64(row) * weights.stride,
        weights.scales + Int64(row) * weights.scale_stride,
    )


@cute.jit
def fetch(
    layout: cutlass.Constexpr[str],
    count: cutlass.Constexpr[int],
    row: Row,
    piece: Int32,
    exists: Boolean,
    further: cutlass.Constexpr[int] = 0,
) -> Piece:
    """The piece that is `further` blocks behind piece number `piece` of a row, `count` words of
    quants (a power of two up to 4); zeros where it does not exist.

    Pieces that a thread has in flight differ by `further` alone, a part of the instruction: an
    address of its own for each would take two registers.
    """
    size = 4 * count
    block, wanted = piece // (BLOCK // size), Int32(exists)
    if cutlass.const_expr(layout == SOA):
        quants, scale = row.quants + Int64(piece) * size, row.scales + Int64(block) * SCALE_BYTES
        text = _aligned(count, further)
    else:
        scale = row.scales + Int64(block) * BLOCK_BYTES
        quants = scale + SCALE_BYTES + Int64(piece % (BLOCK // size)) * size
        text = _assembled(count, further)
    found = cute.arch.inline_ptx(
        text, write_only_types=[Uint32] * (count + 1), read_only_args=[quants, scale, wanted]
    )
    return Piece(tuple(found[:count]), found[count])


def _scaffold(count: int, loads: str, scale: int, results: str) -> str:
    """PTX of `fetch`: operands are the addresses of quants and scale of the first piece in flight,
    and whether to load. scale: so many bytes further."""
    clear = " ".join(f"mov.b32 t{k}, 0;" for k in range(count + 1))
    return (
        f"{{ .reg .pred p; .reg .b32 t<{count + 1}>; .reg .b16 s, h; "
        f"setp.ne.s32 p, {{$r2}}, 0; {clear} mov.b16 s, 0; mov.b16 h, 0; "
        f"{loads} @p {READ_TOGETHER}.b16 s, [{{$r1}} + {scale}]; {results} "
        f"cvt.u32.u16 {{$w{count}}}, s; }}"
    )


def _aligned(count: int, further: int) -> str:
    """Return PTX of one load of a block's words, `further` blocks after the addresses."""
    names = ", ".join(f"t{k}" for k in range(count))
    vector, words = (f".v{count}", f"{{{names}}}") if count > 1 else ("", names)
    loads = f"@p {READ}{vector}.b32 {words}, [{{$r0}} + {further * BLOCK}];"
    results = " ".join(f"mov.b32 {{$w{k}}}, t{k};" for k in range(count))
    return _scaffold(count, loads, further * SCALE_BYTES, results)


def _assembled(count: int, further: int) -> str:
    """Words around quants at a multiple of 2 bytes, shifted into place.

    Where they are no multiple of 4, the first word has two bytes of the same block in front of
    them, its scale or other quants, and the last two quants come by themselves: behind them the
    memory may end.
    """
    offset = further * BLOCK_BYTES
    odd = offset % 4  # all the same, or two addresses and shifts of all pieces in flight
    loads = f"{{ .reg .b64 down; add.s64 down, {{$r0}}, {odd}; and.b64 down, down, -4; " + " ".join(
        f"@p {READ_TOGETHER}.b32 t{k}, [down + {offset - odd + 4 * k}];" for k in range(count)
    )
    last = offset + 4 * count - 2
    loads += f" @p {READ_TOGETHER}.b16 h, [{{$r0}} + {last}]; }} cvt.u32.u16 t{count}, h;"
    results = "{ .reg .b32 shift; cvt.u32.u64 shift, {$r0}; "
    results += f"add.s32 shift, shift, {odd}; and.b32 shift, shift, 2; "
    results += "shl.b32 shift, shift, 3; " + " ".join(
        f"shf.r.wrap.b32 {{$w{k}}}, t{k}, t{k + 1}, shift;" for k in range(count)
    )
    return _scaffold(count, loads, offset, results + " }")


@cute.jit
def quant_floats(words: tuple[Uint32, ...]) -> list[Float32]:
    """Quants as fp32, exactly: a byte, its sign flipped, is added to 2^23 by where it stands."""
    found = []
    for word in words:
        found += cute.arch.inline_ptx(
            FOUR_QUANTS, write_only_types=[Float32] * 4, read_only_args=[word]
        )
    return found


@cute.jit
def scale_float(bits: Uint32) -> Float32:
    """fp32 of the bits of fp16."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 s; cvt.u16.u32 s, {$r0}; cvt.f32.f16 {$w0}, s; }",
        write_only_types=[Float32],
        read_only_args=[bits],
    )


@cute.jit
def numbers_of(words: list[Uint32], dtype: cutlass.Constexpr[str]) -> list[Float32]:
    """The fp32 numbers of words."""
    found = []
    for word in words:
        found += _numbers(word, dtype)
    return found


@cute.jit
def load_words(
    address: Int64,
    vectors: cutlass.Constexpr[int],
    exists: Boolean,
    count: cutlass.Constexpr[int] = 4,
) -> list[Uint32]:
    """Load `vectors` vectors of `count` 32-bit words, 2 or 4; zeros unless `exists`."""
    found = []
    for vector in cutlass.range_constexpr(vectors):
        found += cute.arch.inline_ptx(
            _vector(count, vector),
            write_only_types=[Uint32] * count,
            read_only_args=[address, Int32(exists)],
        )
    return found


def _vector(count: int, vector: int) -> str:
    """PTX of `load_words`."""
    names = ", ".join(f"t{k}" for k in range(count))
    clear = " ".join(f"mov.b32 t{k}, 0;" for k in range(count))
    results = " ".join(f"mov.b32 {{$w{k}}}, t{k};" for k in range(count))
    return (
        f"{{ .reg .pred p; .reg .b32 t<{count}>; setp.ne.s32 p, {{$r1}}, 0; {clear} "
        f"@p {CONSTANT}.v{count}.b32 {{{names}}}, [{{$r0}} + {4 * count * vector}]; {results} }}"
    )


@cute.jit
def load_scale(address: Int64, exists: Boolean) -> Float32:
    """fp16 as fp32, 0 where it does not exist."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b16 s; setp.ne.s32 p, {$r1}, 0; mov.b16 s, 0; "
        f"@p {CONSTANT}.b16 s, [{{$r0}}]; cvt.f32.f16 {{$w0}}, s; }}",
        write_only_types=[Float32],
        read_only_args=[address, Int32(exists)],
    )


@cute.jit
def _numbers(word: Uint32, dtype: cutlass.Constexpr[str]) -> tuple[Float32, ...]:
    """The one or two numbers of a word, as fp32."""
    text, count = NUMBERS[dtype]
    found = cute.arch.inline_ptx(text, write_only_types=[Float32] * count, read_only_args=[word])
    return (found,) if cutlass.const_expr(count == 1) else found


@cute.jit
def dot(quants: list[Float32], numbers: list[Float32]) -> Float32:
    """The sum of products of both, one fused multiply-add behind the other."""
    total = Float32(0.0)
    for first in cutlass.range_constexpr(0, len(quants), 4):
        total = cute.arch.inline_ptx(
            "{ .reg .f32 s; fma.rn.f32 s, {$r0}, {$r4}, {$r8}; fma.rn.f32 s, {$r1}, {$r5}, s; "
            "fma.rn.f32 s, {$r2}, {$r6}, s; fma.rn.f32 {$w0}, {$r3}, {$r7}, s; }",
            write_only_types=[Float32],
            read_only_args=[*quants[first : first + 4], *numbers[first : first + 4], total],
        )
    return total


@cute.jit
def integer_dot(quants: tuple[Uint32, ...], others: list[Uint32]) -> Float32:
    """The sum of products of 16 int8 and 16 others, exactly."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 s; dp4a.s32.s32 s, {$r0}, {$r4}, 0; dp4a.s32.s32 s, {$r1}, {$r5}, s; "
        "dp4a.s32.s32 s, {$r2}, {$r6}, s; dp4a.s32.s32 s, {$r3}, {$r7}, s; "
        "cvt.rn.f32.s32 {$w0}, s; }",
        write_only_types=[Float32],
        read_only_args=[*quants, *others],
    )


@cute.jit
def product(a: Float32, b: Float32) -> Float32:
    """a * b, which nobody fuses with a sum."""
    return cute.arch.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


# Four quants as two words of two 16-bit numbers each, exactly. fp16: a byte with flipped sign bit
# is the low byte of 1024 + byte, from which 1024 + 128 is subtracted. bf16 has room for 7 bits:
# they give 128 + low bits, from which 128 is subtracted, or 256 if the sign bit (-128) is set.
TWO_HALVES = {
    "fp16": "prmt.b32 a, u, 0x64646464, {selector}; sub.f16x2 {{$w{k}}}, a, one; ",
    "bf16": "prmt.b32 u, {{$r0}}, 0, {selector}; lop3.b32 a, u, 0x007F007F, 0x43004300, 0xEA; "
    "lop3.b32 c, u, 0x00800080, 0xC300C300, 0xEA; fma.rn.bf16x2 {{$w{k}}}, a, one, c; ",
}
BEGIN = {  # 1152 is subtracted, 1 multiplied by
    "fp16": "xor.b32 u, {$r0}, 0x80808080; mov.b32 one, 0x64806480; ",
    "bf16": "mov.b32 one, 0x3F803F80; ",
}
SELECTORS = ("0x4140", "0x4342")  # two bytes each, something else's between them


def _halves(dtype: str) -> str:
    """PTX of `quant_halves`."""
    pairs = (TWO_HALVES[dtype].format(selector=s, k=k) for k, s in enumerate(SELECTORS))
    return "{ .reg .b32 u, a, c, one; " + BEGIN[dtype] + "".join(pairs) + "}"


@cute.jit
def quant_halves(word: Uint32, dtype: cutlass.Constexpr[str]) -> tuple[Uint32, ...]:
    """Four quants as two words of 'fp16' or 'bf16'."""
    return cute.arch.inline_ptx(
        _halves(dtype), write_only_types=[Uint32] * 2, read_only_args=[word]
    )


@cute.jit
def multiply_integers(a: list[Uint32], b: list[Uint32]) -> tuple[Float32, ...]:
    """A 16 x 32 tile of int8 times one of 32 x 8, by a warp: int32, exact, as fp32. Lane
    t = 4 g + i: words of a are rows g, g + 8, g, g + 8 at bytes 4 i and, the last two, 4 i + 16;
    those of b column g at the same; results rows g, g, g + 8, g + 8 at columns 2 i and 2 i + 1."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 s<4>; mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {s0, s1, s2, s3}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r6}, {$r6}, {$r6}}; "
        + " ".join(f"cvt.rn.f32.s32 {{$w{k}}}, s{k};" for k in range(4))
        + " }",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, Int32(0)],
    )
