"""wgmma.mma_async: D = A B, or D + A B, of a warpgroup: descriptors, fragments and arithmetic.

Matrices in shared memory have tcgen05's canonical layouts; their descriptor differs in its upper
half. Fragments are uint32 [warp, register, lane]; warp w of the four has rows 16 w and up. Lane
4 g + t holds neighbouring elements of rows g and g + 8: of D columns 2 t and 2 t + 1 of every
eight, of A a register's worth, 32 bits, at t of each half of K. Sums of floating-point numbers have
an order that the manual leaves free, and here that of the BLAS unless the launch wants them as the
tensor core makes them; integers are exact. Of a sparse A half of each row is stored, and the other
matrices are as they would be with all of it.
Source: PTX ISA, "Asynchronous warpgroup level matrix instructions".
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine import tensor_core
from ptxemu.machine.umma_desc import SmemDesc, matrix_bytes
from ptxemu.numerics import formats, swizzle
from ptxemu.numerics.accumulation import Rule, Types, accumulate

M = 64
ROWS = 16  # of one warp
_LANES = (8, 4)  # g, t
_LAYOUTS = (swizzle.NONE, swizzle.SWIZZLE_128B, swizzle.SWIZZLE_64B, swizzle.SWIZZLE_32B)
_RESERVED = 0x3FF1_C000_C000_C000


class Form(NamedTuple):
    """Decoded opcode and immediates.

    n, k: shape; M is 64.
    d, a, b: types.
    a_in_registers: A is then K-major.
    negate: whether exactly one of A and B is multiplied by -1.
    selector: selector of sparse metadata; None for a dense A.
    """

    n: int
    k: int
    d: str
    a: str
    b: str
    a_in_registers: bool
    a_mn_major: bool
    b_mn_major: bool
    negate: bool
    saturate: bool
    selector: int | None = None

    @property
    def a_k(self) -> int:
        """Elements of a row of A that are stored."""
        return self.k if self.selector is None else self.k // 2

    @property
    def row_bits(self) -> int:
        """Number of bits of metadata in a row of a sparse A."""
        return tensor_core.row_bits(_bits(self.a), self.k)

    def a_lines(self, rows: int) -> tuple[int, int]:
        """Return (lines, bytes of a line) of so many rows of A in shared memory."""
        return _lines(rows, self.a_k, self.a, self.a_mn_major)

    def b_lines(self) -> tuple[int, int]:
        """Return the lines of B."""
        return _lines(self.n, self.k, self.b, self.b_mn_major)

    @property
    def d_count(self) -> int:
        """Registers of D that a lane has."""
        return self.n // 4 if self.d == "f16" else self.n // 2

    @property
    def label(self) -> str:
        sparse = "" if self.selector is None else ".sp"
        return f"wgmma{sparse} m{M}n{self.n}k{self.k} {self.d} {self.a} {self.b}"


@lru_cache(maxsize=1 << 14)
def smem_desc(value: int) -> SmemDesc:
    """Decode a 64-bit matrix descriptor of sm_90.

    Raises HardwareRefusal where reserved bits are set, UnsupportedPtx for a base offset.
    """
    if value & _RESERVED:
        raise HardwareRefusal(f"wgmma descriptor {value:#018x}: reserved bits are set")
    if value >> 49 & 0x7:
        raise UnsupportedPtx(f"wgmma descriptor {value:#018x}: base offset")
    return SmemDesc(
        start=(value & 0x3FFF) << 4,
        leading=(value >> 16 & 0x3FFF) << 4,
        stride=(value >> 32 & 0x3FFF) << 4,
        swizzle=_LAYOUTS[value >> 62],
    )


def _bits(type_: str) -> int:
    return 1 if type_ == "b1" else tensor_core.FORMATS[type_].bits


def _lines(rows: int, k: int, type_: str, mn_major: bool) -> tuple[int, int]:
    """Return (lines, bytes of a line); only types of 16 bits are MN-major."""
    return (k, 2 * rows) if mn_major else (rows, k * _bits(type_) // 8)


def read_a(smem: np.ndarray, desc: SmemDesc, form: Form) -> np.ndarray:
    """A in shared memory, float32 (64, what is stored of k)."""
    return _read(smem, desc, form.a_lines(M), form.a, form.a_mn_major)


def read_b(smem: np.ndarray, desc: SmemDesc, form: Form) -> np.ndarray:
    """B, float32 (n, k)."""
    return _read(smem, desc, form.b_lines(), form.b, form.b_mn_major)


def _read(
    smem: np.ndarray, desc: SmemDesc, lines: tuple[int, int], type_: str, mn_major: bool
) -> np.ndarray:
    values = _decode(type_, matrix_bytes(smem, desc, lines, mn_major))
    return values.T if mn_major else values


def with_zeros(form: Form, kept: np.ndarray, metadata: np.ndarray) -> np.ndarray:
    """A sparse A, (64, k), of what is stored of it, and of the metadata, uint32 (4, 32)."""
    assert form.selector is not None, "A is sparse"
    wide = _bits(form.a) >= 16
    codes = tensor_core.codes_of_lanes(metadata, form.selector, form.row_bits, wide)
    return tensor_core.expanded(kept, codes, tensor_core.DIFFERENT)


def _decode(type_: str, image: np.ndarray) -> np.ndarray:
    """Elements along the last axis of bytes, as float32."""
    if type_ == "b1":
        return np.unpackbits(image, axis=-1, bitorder="little").astype(np.float32)
    return tensor_core.decode(type_, image)


def a_of_fragments(registers: np.ndarray, type_: str) -> np.ndarray:
    """Return A, float32 (64, stored part of k), from its registers.

    The four registers are both halves of the rows, then those of K.
    """
    values = _decode(type_, np.ascontiguousarray(registers).view(np.uint8).reshape(-1, 4))
    split = values.reshape(4, 2, 2, *_LANES, -1)  # [warp, half of K, half of rows, g, t, element]
    return split.transpose(0, 2, 3, 1, 4, 5).reshape(M, -1)


def d_of_fragments(registers: np.ndarray, type_: str) -> np.ndarray:
    """D (64, n) as float32 or int32."""
    if type_ == "f16":
        halves = np.ascontiguousarray(registers).view(np.uint16).reshape(4, -1, 2, *_LANES, 2)
        ordered = halves.transpose(0, 2, 3, 1, 4, 5)  # [warp, half, g, columns of eight, t, which]
        return formats.f16_to_f32(np.ascontiguousarray(ordered)).reshape(M, -1)
    words = registers.reshape(4, -1, 2, 2, *_LANES).transpose(0, 2, 4, 1, 5, 3).reshape(M, -1)
    return words.view(np.float32 if type_ == "f32" else np.int32)


def fragments_of_d(d: np.ndarray, type_: str) -> np.ndarray:
    """The inverse, of float32, or of int64 whose lower halves count."""
    if type_ == "f16":
        halves = formats.f32_to_f16(np.ascontiguousarray(d)).astype(np.uint16)
        ordered = halves.reshape(4, 2, 8, -1, 4, 2).transpose(0, 3, 1, 2, 4, 5)
        return np.ascontiguousarray(ordered).reshape(4, -1, 64).view(np.uint32)
    words = d.view(np.uint32) if type_ == "f32" else d.astype(np.uint32)
    return words.reshape(4, 2, 8, -1, 4, 2).transpose(0, 3, 1, 5, 2, 4).reshape(4, -1, 32)


def product(
    form: Form,
    a: np.ndarray,
    b: np.ndarray,
    d: np.ndarray | None,
    sums: Rule | None = None,
    stored: np.ndarray | None = None,
) -> np.ndarray:
    """Return the fragments of A B^T + D.

    Args:
        form: the decoded opcode.
        a: float32 (64, k).
        b: float32 (n, k).
        d: fragments; None if D is not read.
        sums: rule for the order and rounding of sums; None if free.
        stored: see `tensor_core.product`.
    """
    with np.errstate(all="ignore"):
        if sums is not None:
            before = None if d is None else d_of_fragments(d, form.d)
            types = Types(form.d, form.a, form.b)
            signed = -b if form.negate else b
            return fragments_of_d(accumulate(a, signed, before, types, sums), form.d)
        total = tensor_core.product(a, -b if form.negate else b, stored)
        if form.d != "s32":
            return fragments_of_d(total if d is None else total + d_of_fragments(d, form.d), form.d)
    exact = total.astype(np.int64)  # sums of 32 products of 8 bits, or of 256 bits: below 2**24
    if d is not None:
        exact += d_of_fragments(d, form.d)
    if form.saturate:
        exact = exact.clip(-(1 << 31), (1 << 31) - 1)
    return fragments_of_d(exact, form.d)
