"""The element formats of tcgen05 operands: bytes as the tensor core finds them, to float32.

In shared and tensor memory an element of kind f16, tf32, f8f6f4, mxf8f6f4 or i8 occupies a
container of 1, 2 or 4 bytes. The 4- and 6-bit formats of f8f6f4 and mxf8f6f4 come as 16-byte chunks
of 16 elements, whose data fill the first 8 or 12 bytes, lowest bits first; the rest of the chunk is
padding. The kinds of 4-bit operands alone, mxf4 and mxf4nvf4, have them packed, two to a byte, the
lower nibble first.
Source: PTX ISA, tcgen05 packing formats of matrix elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ptxemu.numerics import formats

_CHUNK = 16


class OperandFormat(NamedTuple):
    """bits: of an element's container; decode: uint8 (..., bytes) to float32 (..., elements)."""

    bits: int
    decode: Callable[[np.ndarray], np.ndarray]
    chunked: bool = False


def line_bytes(fmt: str, elements: int) -> int:
    """That so many elements along a line of an operand take."""
    return elements * FORMATS[fmt].bits // 8


def decode(fmt: str, image: np.ndarray) -> np.ndarray:
    """Decode C-contiguous bytes, uint8 (lines, bytes), to float32 (lines, elements)."""
    return FORMATS[fmt].decode(image)


def _decode_4bit(to_f32: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    def decode_chunks(image: np.ndarray) -> np.ndarray:
        data = image.reshape(*image.shape[:-1], -1, _CHUNK)[..., :8]
        codes = np.stack([data & 0xF, data >> 4], axis=-1)
        return to_f32(codes.reshape(image.shape))

    return decode_chunks


def _decode_packed_e2m1(image: np.ndarray) -> np.ndarray:
    codes = np.stack([image & 0xF, image >> 4], axis=-1)
    return formats.e2m1_to_f32(codes.reshape(*image.shape[:-1], 2 * image.shape[-1]))


def _decode_6bit(to_f32: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    def decode_chunks(image: np.ndarray) -> np.ndarray:
        data = image.reshape(*image.shape[:-1], -1, _CHUNK)[..., :12].astype(np.uint32)
        triples = data.reshape(*data.shape[:-1], 4, 3)
        word = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
        codes = word[..., None] >> np.arange(0, 24, 6, dtype=np.uint32) & 0x3F
        return to_f32(codes.reshape(image.shape).astype(np.uint8))

    return decode_chunks


FORMATS: dict[str, OperandFormat] = {
    "f16": OperandFormat(16, lambda image: formats.f16_to_f32(image.view(np.uint16))),
    "bf16": OperandFormat(16, lambda image: formats.bf16_to_f32(image.view(np.uint16))),
    "tf32": OperandFormat(32, lambda image: formats.tf32_to_f32(image.view(np.uint32))),
    "e4m3": OperandFormat(8, formats.e4m3_to_f32),
    "e5m2": OperandFormat(8, formats.e5m2_to_f32),
    "e2m1": OperandFormat(8, _decode_4bit(formats.e2m1_to_f32), chunked=True),
    "packed e2m1": OperandFormat(4, _decode_packed_e2m1),
    "e2m3": OperandFormat(8, _decode_6bit(formats.e2m3_to_f32), chunked=True),
    "e3m2": OperandFormat(8, _decode_6bit(formats.e3m2_to_f32), chunked=True),
    "s8": OperandFormat(8, lambda image: image.view(np.int8).astype(np.float32)),
    "u8": OperandFormat(8, lambda image: image.astype(np.float32)),
}
