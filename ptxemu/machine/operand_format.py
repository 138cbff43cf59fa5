"""The element formats of tcgen05 operands: bytes as the tensor core finds them, to float32.

In shared and tensor memory an element of kind f16, tf32, f8f6f4, mxf8f6f4 or i8 occupies a
container of 1, 2 or 4 bytes. The 4- and 6-bit formats of f8f6f4 and mxf8f6f4 come as 16-byte chunks
of 16 elements, whose data fill the first 8 or 12 bytes, lowest bits first; the rest of the chunk is
padding; in tensor memory every element has a byte of its own. The kinds of 4-bit operands alone,
mxf4 and mxf4nvf4, have them packed, two to a byte, the lower nibble first.
Sources: PTX ISA, tcgen05 packing formats of matrix elements. Which bits of its byte an element in
tensor memory has, the manual shows in pictures only. 4 bits are in the middle: CUTLASS's
primitives/tcgen05/cp_narrow_a_to_tmem_mma.py. 6 bits are the lowest ones: CUTLASS on mma.sync
(cute/atom/mma_traits_sm120.hpp), TVM's tests of tcgen05.cp on GPUs; that example speaks of bits 1
to 6, which makes no difference between a copy and an MMA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ptxemu.errors import UnsupportedPtx
from ptxemu.machine.tmem import POISON
from ptxemu.numerics import formats

CHUNK = 16  # bytes, and elements
_LOWEST_BIT = {4: 2, 6: 0}  # in tensor memory, of an element of so many bits


class OperandFormat(NamedTuple):
    """bits: of an element's container; decode: uint8 (..., bytes) to float32 (..., elements)."""

    bits: int
    decode: Callable[[np.ndarray], np.ndarray]


def line_bytes(fmt: str, elements: int) -> int:
    """That so many elements along a line of an operand take."""
    return elements * FORMATS[fmt].bits // 8


def data_bytes(fmt: str) -> int:
    """Of every 16 bytes in shared memory those that are no padding."""
    return 2 * _NARROW[fmt][0] if fmt in _NARROW else CHUNK


def decode(fmt: str, image: np.ndarray) -> np.ndarray:
    """Decode C-contiguous bytes, uint8 (lines, bytes), to float32 (lines, elements)."""
    return FORMATS[fmt].decode(image)


def decode_in_tmem(fmt: str, image: np.ndarray) -> np.ndarray:
    """The same of elements in tensor memory; poison is NaN. Raises UnsupportedPtx where bits beside
    an element of 4 or 6 bits are set: whether an MMA looks at them is not known."""
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
            f"A of {fmt} in TMEM has bits set beside its elements, which are bits {lowest} to"
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
