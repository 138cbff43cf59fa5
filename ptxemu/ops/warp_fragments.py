"""Fragments of the warp's matrix multiply: registers of 32 lanes to rows of numbers and back.

Lane t = 4 g + i. A register of A holds neighbouring elements of row g or, of matrices with 16 rows,
in every other register of row g + 8, at columns that start with those of i; the next registers of a
row go on four lanes further. A register of B holds neighbouring rows of column g, and D has columns
2 i and 2 i + 1. PTX ISA: "Matrix Fragments for mma.m8n8k16" and those around it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ptxemu.errors import UnsupportedPtx
from ptxemu.machine.operand_format import decode
from ptxemu.numerics import formats

LANES = (8, 4)  # g, i
COLUMNS = 8  # of B and D
# bits that an element takes in a register
BITS = {
    "b1": 1,
    **dict.fromkeys(("s4", "u4", "packed e2m1"), 4),
    **dict.fromkeys(("s8", "u8", "e4m3", "e5m2", "e2m1", "e2m3", "e3m2"), 8),
    **dict.fromkeys(("f16", "bf16"), 16),
    **dict.fromkeys(("tf32", "f32", "s32"), 32),
    "f64": 64,
}


def registers(type_: str, elements: int) -> int:
    """How many registers of a lane a matrix of so many elements takes; one of f64 has 64 bits."""
    return elements * BITS[type_] // (32 * max(32, BITS[type_]))


# -- elements ---------------------------------------------------------------------------------


def _nibbles(image: np.ndarray) -> np.ndarray:
    """The lower one first."""
    return np.stack([image & 0xF, image >> 4], axis=-1).reshape(*image.shape[:-1], -1)


def _signed_nibbles(image: np.ndarray) -> np.ndarray:
    return ((_nibbles(image) ^ 8).astype(np.float32)) - 8


def _bits(image: np.ndarray) -> np.ndarray:
    return np.unpackbits(image, axis=-1, bitorder="little").astype(np.float32)


# of an element of fewer than 8 bits that has a byte of its own: its bits, the lowest of them
_IN_BYTES = {"e2m1": (4, 2), "e2m3": (6, 0), "e3m2": (6, 0)}
_VALUES = {
    "e2m1": formats.e2m1_to_f32,
    "e2m3": formats.e2m3_to_f32,
    "e3m2": formats.e3m2_to_f32,
}


def _in_bytes(type_: str, image: np.ndarray) -> np.ndarray:
    """4 bits are in the middle of a byte, 6 at its low end (CUTLASS shifts what ldmatrix brought by
    2 where it has 4 bits: cute/atom/mma_traits_sm120.hpp). Raises UnsupportedPtx where other bits
    are set: the manual wants zeros there."""
    bits, lowest = _IN_BYTES[type_]
    if (image & np.uint8(0xFF ^ ((1 << bits) - 1) << lowest)).any():
        raise UnsupportedPtx(
            f"an element of {type_} with bits set beside it; it has bits {lowest} to"
            f" {lowest + bits - 1} of its byte"
        )
    return _VALUES[type_](image >> np.uint8(lowest))


_DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "b1": _bits,
    "s4": _signed_nibbles,
    "u4": lambda image: _nibbles(image).astype(np.float32),
    **{type_: partial(_in_bytes, type_) for type_ in _IN_BYTES},
}


def elements(words: np.ndarray, type_: str) -> np.ndarray:
    """[register, lane, element]: float32, in which integers and sums of their products are exact;
    float64 of f64."""
    words = np.ascontiguousarray(words)
    if type_ == "f64":
        return words.view(np.float64)[..., None]
    if type_ in ("s8", "u8"):
        values = words.view({"s8": np.int8, "u8": np.uint8}[type_]).astype(np.float32)
    elif type_ in _DECODERS:
        values = _DECODERS[type_](words.view(np.uint8).reshape(*words.shape, -1))
    else:
        values = decode(type_, words.view(np.uint8))
    return values.reshape(*words.shape, -1)


def rows_of_a(words: np.ndarray, type_: str, halves: int) -> np.ndarray:
    """[row, column] of A, which has 8 rows for each of the halves."""
    values = elements(words, type_)
    parts = values.reshape(-1, halves, *LANES, values.shape[-1])
    return parts.transpose(1, 2, 0, 3, 4).reshape(8 * halves, -1)


def columns_of_b(words: np.ndarray, type_: str) -> np.ndarray:
    """[column, row] of B."""
    values = elements(words, type_)
    parts = values.reshape(-1, *LANES, values.shape[-1])
    return parts.transpose(1, 0, 2, 3).reshape(COLUMNS, -1)


# -- accumulators -----------------------------------------------------------------------------


def by_lane(matrix: np.ndarray) -> np.ndarray:
    """[row, column] of D to [half, which of the two columns, g, i]."""
    return matrix.reshape(-1, *LANES, 2).transpose(0, 3, 1, 2)


def accumulator(c: np.ndarray, type_: str) -> np.ndarray:
    """[half, which, g, i] of C's registers."""
    if type_ == "f16":
        halves = formats.f16_to_f32(c.view(np.uint16)).reshape(-1, *LANES, 2)
        return halves.transpose(0, 3, 1, 2)
    kind = {"f32": np.float32, "s32": np.int32, "f64": np.float64}[type_]
    return c.view(kind).reshape(-1, 2, *LANES)


def matrix_of(c: np.ndarray, type_: str) -> np.ndarray:
    """[row, column] of C's registers: the inverse of `by_lane`."""
    parts = accumulator(c, type_).transpose(0, 2, 3, 1)
    return parts.reshape(-1, COLUMNS)


def _sum_f32(product: np.ndarray, c: np.ndarray, saturate: bool) -> np.ndarray:
    return (product + c).astype(np.float32, copy=False).reshape(-1, 32)


def _sum_f16(product: np.ndarray, c: np.ndarray, saturate: bool) -> np.ndarray:
    total = (product + c).astype(np.float32, copy=False)
    bits = formats.f32_to_f16(total).astype(np.uint16).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(bits).reshape(-1, 64).view(np.uint32)


def _sum_s32(product: np.ndarray, c: np.ndarray, saturate: bool) -> np.ndarray:
    total = product.astype(np.int64) + c
    if saturate:
        total = total.clip(-(1 << 31), (1 << 31) - 1)
    return total.astype(np.int32).reshape(-1, 32)


_SUMS = {"f32": _sum_f32, "f16": _sum_f16, "s32": _sum_s32}


def accumulated(
    product: np.ndarray, c: np.ndarray, types: tuple[str, ...], saturate: bool = False
) -> np.ndarray:
    """[register, lane] of D = product + C. product: [row, column]; c: its registers; types: of D
    and C, the first and the last."""
    return _SUMS[types[0]](by_lane(product), accumulator(c, types[-1]), saturate)


def registers_of(d: np.ndarray, type_: str) -> np.ndarray:
    """[register, lane] of D [row, column], which has its type's values."""
    return _SUMS[type_](by_lane(d), np.zeros(1, np.float32), False)
