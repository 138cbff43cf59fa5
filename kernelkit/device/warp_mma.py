"""mma.sync and what feeds it: matrix fragments in the registers of a warp (device code).

Lane t = 4 g + i. An A fragment, 16 x 16 of 16-bit elements, is four words: rows g and g + 8 at
columns 2 i, then the same rows at columns 2 i + 8. A B fragment, 16 x 8, is two words: rows 2 i and
2 i + 8 of column g. An accumulator, 16 x 8 fp32, is (g, 2 i), (g, 2 i + 1), (g + 8, 2 i),
(g + 8, 2 i + 1). PTX ISA: "mma", "ldmatrix", "movmatrix", "cp.async".
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernelkit.device.words import two_of_bf16

MMA_TYPES = {"bf16": "bf16", "fp16": "f16"}  # name of a dtype -> its name in PTX
CHUNK_BYTES = 16  # what ldmatrix and cp.async move at a time


@cute.jit
def load_fragment(address: Int32, transposed: cutlass.Constexpr) -> tuple[Uint32, ...]:
    """Four words of 8x8 matrices whose rows lie at the shared `address` of lanes 0-7, 8-15, ..."""
    trans = ".trans" if transposed else ""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


@cute.jit
def multiply(
    acc: cute.Tensor, a: tuple[Uint32, ...], b: tuple[Uint32, ...], dtype: cutlass.Constexpr
) -> None:
    """Compute acc (4,) += A B with four words `a` and two words `b` in 'bf16' or 'fp16'."""
    kind = MMA_TYPES[dtype]
    acc[0], acc[1], acc[2], acc[3] = cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
        "{{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, acc[0], acc[1], acc[2], acc[3]],
    )


@cute.jit
def transpose(word: Uint32) -> Uint32:
    """An 8x8 matrix of 16-bit elements, two a lane, transposed: an accumulator becomes a B."""
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[word],
    )


@cute.jit
def pack(low: Float32, high: Float32, dtype: cutlass.Constexpr) -> Uint32:
    """Two fp32 rounded to `dtype` in one word."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{MMA_TYPES[dtype]}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


@cute.jit
def scaled_fp16(word: Uint32, factor: Float32) -> Uint32:
    """Two bf16 of a word times a factor, rounded to fp16."""
    low, high = two_of_bf16(word)
    return pack(low * factor, high * factor, "fp16")


@cute.jit
def pack_e4m3(
    first: Float32, second: Float32, third: Float32 = 0.0, fourth: Float32 = 0.0
) -> Uint32:
    """Four numbers rounded to e4m3 in one word, the first lowest; too large ones become 448."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; "
        "cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; "
        "mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Uint32],
        read_only_args=[first, second, Float32(third), Float32(fourth)],
    )


@cute.jit
def store_fragment(address: Int32, words: tuple[Uint32, ...]) -> None:
    """Four words of 8x8 matrices to the rows at the shared `address` of lanes 0-7, 8-15, ..."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
    )


@cute.jit
def store_transposed(address: Int32, words: tuple[Uint32, ...]) -> None:
    """Store one, two or four words of 8x8 matrices, transposed, to the rows at the shared `address`
    of lanes 0-7, 8-15, ..."""
    names = ", ".join(f"{{$r{k + 1}}}" for k in range(len(words)))
    cute.arch.inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x{len(words)}.trans.shared.b16 [{{$r0}}], {{{names}}};",
        read_only_args=[address, *words],
    )


@cute.jit
def widen(word: Uint32, dtype: cutlass.Constexpr) -> tuple[Uint32, Uint32]:
    """Four e4m3 as two words of `dtype`, exactly; the low two first."""
    low, high = cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[word],
    )
    if cutlass.const_expr(dtype == "bf16"):
        low, high = _bf16_of_fp16(low), _bf16_of_fp16(high)
    return low, high


@cute.jit
def _bf16_of_fp16(word: Uint32) -> Uint32:
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; .reg .f32 a, b; mov.b32 {low, high}, {$r0}; "
        "cvt.f32.f16 a, low; cvt.f32.f16 b, high; cvt.rn.bf16x2.f32 {$w0}, b, a; }",
        write_only_types=[Uint32],
        read_only_args=[word],
    )


@cute.jit
def pick(first: Uint32, second: Uint32, selector: Int32) -> Uint32:
    """prmt of two words: byte k of the result is byte (selector >> 4 k) of the eight."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[first, second, selector],
    )


@cute.jit
def permute(word: Uint32, selector: cutlass.Constexpr) -> Uint32:
    """prmt of one word: byte k of the result is byte (selector >> 4 k) of it."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, 0, {selector};",
        write_only_types=[Uint32],
        read_only_args=[word],
    )


@cute.jit
def copy_chunk(target: Int32, source: Int64, valid: cutlass.Boolean) -> None:
    """cp.async of 16 bytes from global to shared memory; zeros where not valid."""
    nbytes = Int32(CHUNK_BYTES) if valid else Int32(0)
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[target, source, nbytes],
    )


@cute.jit
def copy_chunk_unless(target: Int32, source: Int64, missing: cutlass.Boolean) -> None:
    """Copy a chunk, or zeros if `missing`: a predicate, which costs no instruction of its own."""
    cute.arch.inline_ptx(
        "{ .reg .pred missing; setp.ne.s32 missing, {$r2}, 0; "
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, missing; }",
        read_only_args=[target, source, Int32(missing)],
    )
