"""Numbers by address in global memory, fp32 as bits, and rounded once (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Boolean, Float32, Int32, Int64, Uint32


@cute.jit
def vector_at(address: Int64, dtype: cutlass.Constexpr, size: cutlass.Constexpr) -> cute.Tensor:
    """`size` elements in global memory, aligned to their own bytes."""
    pointer = cute.make_ptr(
        dtype, address, AddressSpace.gmem, assumed_align=size * dtype.width // 8
    )
    return cute.make_tensor(pointer, cute.make_layout(size))


@cute.jit
def four_words_if(is_there: Boolean, address: Int64) -> tuple[Uint32, ...]:
    """16 bytes in global memory, aligned to them, zeros unless they are there.

    A predicate instead of a branch: many of these are in flight at a time.
    """
    zeros = " ".join(f"mov.b32 w{k}, 0;" for k in range(4))
    results = " ".join(f"mov.b32 {{$w{k}}}, w{k};" for k in range(4))
    return cute.arch.inline_ptx(
        f"{{ .reg .pred there; .reg .b32 w<4>; {zeros} setp.ne.s32 there, {{$r1}}, 0; "
        f"@there ld.global.v4.b32 {{w0, w1, w2, w3}}, [{{$r0}}]; {results} }}",
        write_only_types=[Uint32] * 4,
        read_only_args=[address, Int32(is_there)],
    )


@cute.jit
def index_if(
    is_there: Boolean, address: Int64, dtype: cutlass.Constexpr, other: cutlass.Constexpr
) -> Int32 | Int64:
    """Int32 or Int64 in global memory, `other` unless it is there.

    A predicate instead of a branch, in which the first use of the number would wait for it.
    """
    bits = dtype.width
    return cute.arch.inline_ptx(
        f"{{ .reg .pred there; .reg .b{bits} x; mov.b{bits} x, {other}; "
        "setp.ne.s32 there, {$r1}, 0; "
        f"@there ld.global.b{bits} x, [{{$r0}}]; mov.b{bits} {{$w0}}, x; }}",
        write_only_types=[dtype],
        read_only_args=[address, Int32(is_there)],
    )


@cute.jit
def request_if(is_there: Boolean, address: Int64) -> None:
    """Request the line of an address in global memory to L2, if it is there. Nobody waits."""
    cute.arch.inline_ptx(
        "{ .reg .pred there; setp.ne.s32 there, {$r1}, 0; @there prefetch.global.L2 [{$r0}]; }",
        read_only_args=[address, Int32(is_there)],
    )


@cute.jit
def float_of(bits: Uint32) -> Float32:
    """fp32 of these bits."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits]
    )


@cute.jit
def bits_of(value: Float32) -> Uint32:
    """The bits of fp32 as an integer; those of numbers >= 0 are in the order of the numbers."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value]
    )


@cute.jit
def larger(one: Uint32, other: Uint32) -> Uint32:
    """The maximum in each half of a word, of unsigned 16 bits; sm_90 and later, no immediates."""
    return cute.arch.inline_ptx(
        "max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[one, other]
    )


@cute.jit
def two_of_bf16(word: Uint32) -> tuple[Float32, Float32]:
    """Two bf16 of a word in fp32, the low one first."""
    return float_of(word << 16), float_of(word & Uint32(0xFFFF0000))


@cute.jit
def fused(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, rounded once, wherever it is compiled."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )
