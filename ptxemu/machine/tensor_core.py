"""Operand formats, sparsity of A and rules of sums, for tensor cores of all generations."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from ptxemu.codegen.program import Program
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.tmem import POISON
from ptxemu.numerics import formats
from ptxemu.numerics.accumulation import Rule, Types, rule, unknown
from ptxemu.options import ALIGNED, Options

# The element formats of tcgen05 operands: bytes as the tensor core finds them, to float32.
#
# In shared and tensor memory an element of kind f16, tf32, f8f6f4, mxf8f6f4 or i8 occupies a
# container of 1, 2 or 4 bytes. The 4- and 6-bit formats of f8f6f4 and mxf8f6f4 come as 16-byte
# chunks of 16 elements, whose data fill the first 8 or 12 bytes, lowest bits first; the rest of the
# chunk is padding; in tensor memory every element has a byte of its own. The kinds of 4-bit
# operands alone, mxf4 and mxf4nvf4, have them packed, two to a byte, the lower nibble first.
# Sources: PTX ISA, tcgen05 packing formats of matrix elements. Which bits of its byte an element in
# tensor memory has, the manual shows in pictures only. 4 bits are in the middle: CUTLASS's
# primitives/tcgen05/cp_narrow_a_to_tmem_mma.py. 6 bits are the lowest ones: CUTLASS on mma.sync
# (cute/atom/mma_traits_sm120.hpp), TVM's tests of tcgen05.cp on GPUs; that example speaks of bits 1
# to 6, which makes no difference between a copy and an MMA.

CHUNK = 16  # bytes, and elements
_LOWEST_BIT = {4: 2, 6: 0}  # in tensor memory, of an element of so many bits


class OperandFormat(NamedTuple):
    """Format of an operand.

    bits: size of an element's container.
    decode: function from uint8 (..., bytes) to float32 (..., elements).
    """

    bits: int
    decode: Callable[[np.ndarray], np.ndarray]


def line_bytes(fmt: str, elements: int) -> int:
    """Return the number of bytes of so many elements along a line of an operand."""
    return elements * FORMATS[fmt].bits // 8


def data_bytes(fmt: str) -> int:
    """Return how many of every 16 bytes in shared memory are not padding."""
    return 2 * _NARROW[fmt][0] if fmt in _NARROW else CHUNK


def decode(fmt: str, image: np.ndarray) -> np.ndarray:
    """Decode C-contiguous bytes, uint8 (lines, bytes), to float32 (lines, elements)."""
    return FORMATS[fmt].decode(image)


def decode_in_tmem(fmt: str, image: np.ndarray) -> np.ndarray:
    """Decode elements in tensor memory to float32; poison is NaN.

    Raises UnsupportedPtx if bits next to an element of 4 or 6 bits are set: whether an MMA uses
    them is unknown.
    """
    if fmt not in _NARROW:
        return decode(fmt, image)
    bits, to_f32 = _NARROW[fmt]
    lowest = _LOWEST_BIT[bits]
    values = to_f32(image >> np.uint8(lowest) & np.uint8((1 << bits) - 1))
    beside = image & np.uint8(0xFF ^ ((1 << bits) - 1) << lowest) != 0
    if not beside.any():
        return values
    poison = np.repeat(image.view(np.uint32) == POISON, 4, axis=-1)
    if (beside & ~poison).any():
        raise UnsupportedPtx(
            f"A in {fmt} in TMEM has bits set outside its elements, which are bits {lowest} to"
            f" {lowest + bits - 1} of their bytes"
        )
    return np.where(poison, np.float32(np.nan), values)


def widened(bits: int, image: np.ndarray) -> np.ndarray:
    """Chunks of elements of 4 or 6 bits as tcgen05.cp brings them to tensor memory; same shape."""
    return chunk_codes(bits, image) << np.uint8(_LOWEST_BIT[bits])


def chunk_codes(bits: int, image: np.ndarray) -> np.ndarray:
    """The elements of chunks, each in the lowest bits of a byte; same shape."""
    data = image.reshape(*image.shape[:-1], -1, CHUNK)[..., : 2 * bits].astype(np.uint32)
    fours = data.reshape(*data.shape[:-1], 4, bits // 2)  # bytes of four elements
    word = (fours << np.arange(0, 4 * bits, 8, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    codes = word[..., None] >> np.arange(0, 4 * bits, bits, dtype=np.uint32) & (1 << bits) - 1
    return codes.reshape(image.shape).astype(np.uint8)


# of a byte both values, the lower nibble's first, as one word
_BYTES = np.arange(256, dtype=np.uint8)
_E2M1_PAIRS = formats.e2m1_to_f32(np.stack([_BYTES & 0xF, _BYTES >> 4], axis=-1)).view(np.uint64)


def _decode_packed_e2m1(image: np.ndarray) -> np.ndarray:
    return _E2M1_PAIRS.take(image).view(np.float32)


def _chunked(bits: int, to_f32: Callable[[np.ndarray], np.ndarray]) -> OperandFormat:
    return OperandFormat(8, lambda image: to_f32(chunk_codes(bits, image)))


# bits of an element, and its value
_NARROW: dict[str, tuple[int, Callable[[np.ndarray], np.ndarray]]] = {
    "e2m1": (4, formats.e2m1_to_f32),
    "e2m3": (6, formats.e2m3_to_f32),
    "e3m2": (6, formats.e3m2_to_f32),
}
FORMATS: dict[str, OperandFormat] = {
    "f16": OperandFormat(16, lambda image: formats.f16_to_f32(image.view(np.uint16))),
    "bf16": OperandFormat(16, lambda image: formats.bf16_to_f32(image.view(np.uint16))),
    "tf32": OperandFormat(32, lambda image: formats.tf32_to_f32(image.view(np.uint32))),
    "e4m3": OperandFormat(8, formats.e4m3_to_f32),
    "e5m2": OperandFormat(8, formats.e5m2_to_f32),
    "packed e2m1": OperandFormat(4, _decode_packed_e2m1),
    "s8": OperandFormat(8, lambda image: image.view(np.int8).astype(np.float32)),
    "u8": OperandFormat(8, lambda image: image.astype(np.float32)),
    **{fmt: _chunked(*how) for fmt, how in _NARROW.items()},
}


# Structured sparsity of A: half of the elements of a row are kept, and metadata say which.
#
# Of every four neighbouring elements two are kept, of packed 4-bit types of every four pairs two,
# of tf32 one of two. Each such group has four bits of metadata, two indices of two bits, the first
# in the low bits; a group of tf32 has those of the halves of the element that is kept, 0b0100 or
# 0b1110. Zeros that a dense A would hold take no part in products of wgmma: on an H100 a NaN in B
# reaches those rows of D alone that store an element for it (conformance/questions.py). mma.sp is
# taken to do the same, tcgen05.mma.sp, of which nobody could be asked, to multiply them.
#
# Which metadata the manual gives a meaning, and where they lie, depends on the instruction. A group
# of zeros means zeros whatever its metadata say: CUTLASS's compressors for sm_90 and sm_100
# (transform/kernel/sm90_sparse_gemm_compressor.hpp) write 0b0000 for it. Sources: PTX ISA, "Sparse
# matrix storage" of mma.sp and wgmma.mma_async.sp, "Sparse Matrices" of tcgen05. Where metadata lie
# among lanes the manual shows in the same figures for mma.sp and wgmma; CUTLASS's reorder_meta
# (tools/util/host_reorder.h) and ELayout (cute/atom/ mma_traits_sm90_gmma_sparse.hpp) say the same,
# and a Triton fork's dot_sparse, right on sm_86, sm_89 and sm_120, has those of f16 with K = 32 and
# of 8 bits with K = 64 so.

_DIFFERENT = frozenset(code for code in range(16) if code & 3 != code >> 2)
# names of what groups of four may say: indices that differ, that rise, and those of tcgen05, whose
# list has one that falls, too
DIFFERENT, RISING, LISTED = "different", "rising", "listed"
_LEGAL: dict[str, frozenset[int]] = {
    DIFFERENT: _DIFFERENT,
    RISING: frozenset(code for code in _DIFFERENT if code & 3 < code >> 2),
    LISTED: frozenset((0x4, 0x8, 0xC, 0x9, 0xD, 0x6, 0xE)),
}
_HALVES = frozenset((0x4, 0xE))  # of tf32


def nibbles(image: np.ndarray) -> np.ndarray:
    """Return uint8 (rows, 2 n) of bytes (rows, n): the lower one first."""
    return np.stack([image & 0xF, image >> 4], axis=-1).reshape(len(image), -1)


def expanded(kept: np.ndarray, codes: np.ndarray, legal: str) -> np.ndarray:
    """Return A with its zeros, (rows, k).

    Args:
        kept: the stored elements, (rows, k / 2).
        codes: metadata, uint8 (rows, groups).
        legal: key of the codes that are legal for groups of four.

    Raises:
        HardwareRefusal: for metadata with which the manual leaves the result undefined.
    """
    rows, groups = codes.shape
    halves = kept.shape[1] == groups
    _require_legal(kept.reshape(rows, groups, -1), codes, _HALVES if halves else _LEGAL[legal])
    if halves:
        dense = np.zeros((rows, groups, 2), kept.dtype)
        where = (codes[..., None] & 3) // 2
        np.put_along_axis(dense, where.astype(np.intp), kept[..., None], axis=2)
        return dense.reshape(rows, -1)
    values = kept.reshape(rows, groups, 2, -1)
    dense = np.zeros((rows, groups, 4, values.shape[3]), kept.dtype)
    indices = np.stack([codes & 3, codes >> 2], axis=-1).astype(np.intp)
    np.put_along_axis(dense, np.broadcast_to(indices[..., None], values.shape), values, axis=2)
    return dense.reshape(rows, -1)


def product(a: np.ndarray, b: np.ndarray, stored: np.ndarray | None) -> np.ndarray:
    """A B^T. stored: which elements of A (m, k) there are, None for all of them or where B has
    nothing but numbers; what is not stored multiplies nothing."""
    if stored is None:
        return a @ b.T
    number = np.isfinite(b)
    total = a @ np.where(number, b, np.float32(0)).T
    for k in np.flatnonzero(~number.all(axis=0)):
        meets = stored[:, k, None] & ~number[:, k]
        total += np.where(meets, a[:, k, None] * b[:, k], np.float32(0))
    return total


def expanded_parts(kept: np.ndarray, codes: np.ndarray, legal: str) -> np.ndarray:
    """Expand one A, or several (parts, rows, k / 2) with equal metadata, as `expanded` does."""
    if kept.ndim == 2:
        return expanded(kept, codes, legal)
    return np.stack([expanded(part, codes, legal) for part in kept])


def _require_legal(kept: np.ndarray, codes: np.ndarray, legal: frozenset[int]) -> None:
    """kept: (rows, groups, elements)."""
    table = np.array([code not in legal for code in range(16)])
    wrong = table[codes]
    if wrong.any():
        wrong &= kept.any(axis=2)
    if wrong.any():
        row, group = (int(x[0]) for x in np.nonzero(wrong))
        told = ", ".join(f"0b{code:04b}" for code in sorted(legal))
        raise HardwareRefusal(
            f"sparsity metadata 0b{codes[row, group]:04b} of row {row}, group {group} of A, which"
            f" has an element other than 0; must be one of {told}"
        )


# -- metadata in registers ----------------------------------------------------------------------


def row_bits(element_bits: int, k: int) -> int:
    """Bits of metadata of a row of A with k columns: four for each four elements, or pairs."""
    return {4: k // 2, 32: 2 * k}.get(element_bits, k)


def selectors(bits: int) -> range:
    """Return the sparsity selectors of a shape whose rows have so many bits of metadata."""
    return range(64 // bits)


def contributing(bits: int, selector: int) -> int:
    """A bit for each lane of a warp that brings metadata."""
    lanes = {16: 1 << selector, 32: 3 << 2 * selector}.get(bits, 0xF)
    return lanes * 0x11111111


def codes_of_lanes(words: np.ndarray, selector: int, bits: int, wide: bool) -> np.ndarray:
    """Return metadata (rows, groups) from the registers of one or four warps with 16 rows each.

    Lanes 4 g ... 4 g + 3 have the metadata of rows g and g + 8. The layout depends on `bits`:
    16: the lane that the selector names has row g in its low half and row g + 8 in its high half.
    32: the selector names a pair. For wide elements each lane has half of both rows; for others
        the first lane has row g.
    64: lanes 0 and 1 have the first half of the two rows, lanes 2 and 3 the second.

    Args:
        words: registers, uint32 (..., 32).
        selector: the sparsity selector.
        bits: bits of metadata in a row.
        wide: whether elements have 16 bits or 32.
    """
    if selector not in selectors(bits):
        raise HardwareRefusal(f"sparsity selector {selector}; this shape has {selectors(bits)}")
    halves = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 8, 4, 2)
    if bits == 16:  # [warp, g, lane, half] -> [warp, which row, g, half of it]
        rows = halves[:, :, selector].transpose(0, 2, 1)
    elif bits == 32:
        pair = halves[:, :, 2 * selector : 2 * selector + 2]
        rows = pair.transpose(0, 3, 1, 2) if wide else pair.transpose(0, 2, 1, 3)
    else:
        rows = halves.reshape(-1, 8, 2, 2, 2).transpose(0, 3, 1, 2, 4)
    count = 16 * len(halves)
    return nibbles(np.ascontiguousarray(rows).reshape(count, -1).view(np.uint8))


class Launch(Protocol):
    """Interface of a machine that this module needs."""

    options: Options
    program: Program


def sums_of(launch: Launch, instruction: str, d: str, a: str, b: str) -> Rule | None:
    """Return the rule of sums for these types of D, A and B.

    The result is None if the order is free or the sums are exact. Raises UnsupportedPtx if the
    rule is unknown.
    """
    if launch.options.accumulation != ALIGNED or d not in ("f16", "f32"):
        return None
    return rule(instruction, launch.program.entry.target, Types(d, a, b))


def require_free_order(launch: Launch, instruction: str, d: str) -> None:
    """Refuse aligned sums of an instruction whose rule no GPU and no publication documents."""
    if launch.options.accumulation == ALIGNED and d in ("f16", "f32"):
        raise unknown(instruction)
