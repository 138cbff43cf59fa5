"""Shared parts of the product's kernel: its tile, numbers in registers, copies (device code).

An mma whose accumulator begins at OFFSET_BITS ends at the bits of the fp32 number OFFSET + I. I is
the sum of 32 products of int8: |I| <= 32 * 128 * 128 < 2^22. So no integer is converted.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernelkit.device.shared_words import operands
from kernelkit.device.words import float_of
from q8_0.product.params import ProductParams


@dataclass(frozen=True)
class Tile:
    """A CTA's. It begins at `token` and `row`, and writes from `first_token` and `first_row` on:
    the last one begins sooner, so that all tokens and rows that it reads are there."""

    token: Int32
    row: Int32
    first_token: Int32
    first_row: Int32


@dataclass(frozen=True)
class Scope:
    """Context of a tile.

    smem: shared base address
    steps: number of stages of K
    blocks: number of blocks of a row
    """

    params: ProductParams
    tile: Tile
    smem: Int32
    steps: Int32
    blocks: Int32


OFFSET = 1.5 * 2**23  # fp32 numbers here are 1 apart, 2^22 to both sides
OFFSET_BITS = 0x4B400000


@cute.jit
def multiply(a: tuple[Uint32, ...], b: tuple[Uint32, ...]) -> tuple[Float32, ...]:
    """OFFSET + A B of int8: four numbers of a fragment 16 x 8, the sum of 32 products each.

    Lane 4 g + i has of A, 16 x 32, the bytes from 4 i on of rows g and g + 8, then from 16 + 4 i on
    of both; of B, 32 x 8, those of column g from 4 i and from 16 + 4 i on; of the result what
    `kernelkit.device.warp_mma` says.
    """
    offset = Uint32(OFFSET_BITS)
    words = cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
        "{{$r6}, {$r6}, {$r6}, {$r6}};",
        write_only_types=[Uint32] * 4,
        read_only_args=[*a, *b, offset],
    )
    return tuple(float_of(word) for word in words)


@cute.jit
def widened(word: Uint32) -> tuple[Float32, Float32]:
    """Two fp16, the low one first."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }",
        write_only_types=[Float32] * 2,
        read_only_args=[word],
    )


@cute.jit
def copy_bytes(target: Int32, source: Int64, valid: Int32) -> None:
    """cp.async of a chunk to shared memory, zeros behind its first `valid` bytes."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[target, source, valid],
    )


@cute.jit
def copy_whole(target: Int32, source: Int64) -> None:
    """cp.async of a chunk to shared memory."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[target, source]
    )


@cute.jit
def load_half(address: Int32) -> Uint32:
    """Two bytes of shared memory, zeros above."""
    return cute.arch.inline_ptx(
        "ld.shared.u16 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address]
    )


@cute.jit
def store_words(address: Int64, words: tuple[Uint32, ...]) -> None:
    """Words to global memory, aligned to all their bytes."""
    vector, names = operands("r", 1, len(words))
    cute.arch.inline_ptx(
        f"st.global{vector}.b32 [{{$r0}}], {names};", read_only_args=[address, *words]
    )


@cute.jit
def fused(x: Float32, y: Float32, z: Float32) -> Float32:
    """x y + z, rounded once on every architecture."""
    return cute.math.fma(x, y, z)


def swizzle_of(row: Int32) -> Int32:
    """Return the mask that a chunk's index in a row of a stage is XORed with, against bank
    conflicts.

    Conflict-free are eight consecutive rows, for ldmatrix and for splitting blocks. So are two rows
    each of four groups of eight, as fragments of weights have them.
    """
    return (row >> 3 ^ row >> 1) & 3
