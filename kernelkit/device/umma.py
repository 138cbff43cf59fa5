"""Issuing tcgen05.mma: operands in swizzled shared memory, accumulators and scale factors in TMEM
(device code).

Scale factors of block-scaled MMAs come from shared memory by atoms. An atom is 512 bytes: 128 rows
by four scale factors, row r's at byte r % 32 * 16 + r / 32 * 4. tcgen05.cp.32x128b.warpx4 brings it
to four columns, row r to lane r % 32 of column r / 32, in every quarter of the lanes, where MMAs
find it. Copies and MMAs of one thread execute in order.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import tcgen05


def shared(pointer: cute.Pointer, layout: cute.ComposedLayout) -> cute.Tensor:
    """The buffer at `pointer` as TMA and the tensor core see it, swizzled as `layout` says."""
    return cute.make_tensor(
        cute.recast_ptr(pointer, layout.inner, dtype=pointer.value_type), layout.outer
    )


def accumulator(
    mma: cute.TiledMma, tile: tuple[int, int, int], base: cute.Pointer, column: Int32
) -> cute.Tensor:
    """The fp32 accumulator (MMA, 1, 1) of `tile` that starts at TMEM column `column`."""
    fragment = mma.make_fragment_C(mma.partition_shape_C(tile[:2]))
    return cute.make_tensor(base + column, fragment.layout)


@cute.jit
def issue(
    mma: cute.TiledMma,
    d: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: Boolean,
    k_blocks: cutlass.Constexpr = None,
) -> None:
    """Issue D = A B, or D += A B, k block by k block; a commit announces the end of it.

    k_blocks: which, all of them by default.
    """
    if cutlass.const_expr(k_blocks is None):
        k_blocks = range(cute.size(b, mode=[2]))
    for k_block in k_blocks:
        mma.set(tcgen05.Field.ACCUMULATE, accumulate if k_block == k_blocks[0] else True)
        cute.gemm(mma, d, a[None, None, k_block], b[None, None, k_block], d)


# Of a matrix descriptor: version 1, no swizzle, 8 rows of 16 bytes every 128 bytes. The next 16
# bytes of a row would be 16 further on; there are none, but CUTLASS's descriptors say the same.
_DESCRIPTOR = (1 << 46) | (128 >> 4 << 32) | (16 >> 4 << 16)


@cute.jit
def copy_atom(group: cutlass.Constexpr, column: cute.Pointer, source: cute.Pointer) -> None:
    """Start to copy an atom of shared memory to tensor memory, by one elected thread.

    group: CtaGroup; with TWO either CTA of the pair copies its own.
    """
    name = "cta_group::2" if group is tcgen05.CtaGroup.TWO else "cta_group::1"
    start = Int64(source.toint() >> 4 & 0x3FFF)
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            f"tcgen05.cp.{name}.32x128b.warpx4 [{{$r0}}], {{$r1}};",
            read_only_args=[Int32(column.toint()), start | Int64(_DESCRIPTOR)],
        )


# ---- MMAs of one elected thread, by descriptors
#
# `cute.gemm` elects a thread for each MMA, and computes descriptors for that thread alone, in its
# registers. Here the warp computes them, so that they stay in uniform registers: 25 instructions
# fewer for each MMA.

_SWIZZLED = (2 << 61) | (1 << 46)  # swizzle of 128 bytes, version 1


@dataclass(frozen=True)
class Step:
    """One MMA of a run.

    d: columns of tensor memory from the run's accumulator on.
    a, b: bytes from the run's operands on.
    adds: whether it adds to D; None if a run decides.
    """

    d: int
    a: int
    b: int
    adds: bool | None = True


def bf16_instruction(m: int, n: int, b_is_k_major: bool) -> int:
    """The descriptor of an MMA of bf16 into fp32, with a K-major A."""
    formats = 1 << 4 | 1 << 7 | 1 << 10  # D in fp32, A and B in bf16
    return m >> 4 << 24 | n >> 3 << 17 | (not b_is_k_major) << 16 | formats


@cute.jit
def operand_at(address: Int32, lead: cutlass.Constexpr, stride: cutlass.Constexpr) -> Int64:
    """The descriptor of an operand in lines of 128 swizzled bytes.

    stride: bytes between groups of eight lines.
    lead: bytes between panels of a MN-major operand, as many columns wide as a line; 16 if K-major.
    """
    fixed = _SWIZZLED | stride >> 4 << 32 | lead >> 4 << 16
    return Int64(address >> 4 & 0x3FFF) | Int64(fixed)


@cute.jit
def issue_run(
    pair: cutlass.Constexpr,
    instruction: cutlass.Constexpr,
    d: Int32,
    a: Int64,
    b: Int64,
    steps: cutlass.Constexpr,
    adds: Boolean,
) -> None:
    """Issue MMAs of bf16 operands in shared memory, by one thread of a warp.

    Args:
        pair: whether they are of a pair of CTAs.
        instruction: see `bf16_instruction`.
        d: address in tensor memory.
        a, b: see `operand_at`.
        steps: tuple of Step.
        adds: whether steps that do not say so themselves add to D.
    """
    group = "cta_group::2" if pair else "cta_group::1"
    lines = []
    for step in steps:
        given = "given" if step.adds is None else "yes" if step.adds else "no"
        lines.append(
            f"add.u32 d, {{$r0}}, {step.d}; add.s64 a, {{$r1}}, {step.a >> 4}; "
            f"add.s64 b, {{$r2}}, {step.b >> 4}; "
            f"@one tcgen05.mma.{group}.kind::f16.collector::a::discard [d], a, b, {{$r3}}, {given};"
        )
    cute.arch.inline_ptx(
        "{ .reg .pred one, given, yes, no; .reg .b32 d; .reg .b64 a, b; "
        "elect.sync _|one, 0xffffffff; setp.ne.s32 given, {$r4}, 0; "
        "setp.eq.s32 yes, 0, 0; setp.ne.s32 no, 0, 0; " + " ".join(lines) + " }",
        read_only_args=[d, a, b, Int32(instruction), Int32(adds)],
    )
