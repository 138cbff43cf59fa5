"""ldmatrix and stmatrix of 8x8 b16 matrices, stmatrix of 16x8 b8, ldmatrix of 8x16 and 16x16 b8:
PTX ISA "ldmatrix", "stmatrix".

Lane 8 j + r gives the shared address of row r of matrix j, 16 bytes. In registers, lane t holds
elements 2 (t % 4) and 2 (t % 4) + 1 of row t / 4; with .trans, of column t / 4. Of a b8 matrix,
which is stored with .trans only, it holds the same two of row t / 4 and then of row t / 4 + 8
(CUTLASS cute/atom/copy_traits_sm100.hpp, SM100_U8x4_STSM_T).

ldmatrix of b8: lane 4 g + i holds elements 4 i ... 4 i + 3 of row g; of a 16x16 matrix, which is
loaded with .trans only and has the addresses of 16 lanes, of column g and, in a second register, of
column g + 8 (the same, SM100_U8x8_LDSM_T). Elements of 6 and 4 bits are packed at the start of
their 16 bytes and become the low bits of bytes (CUTLASS shifts 4 bits before an MMA).
"""

from __future__ import annotations

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.state import OFFSET_MASK, Warp
from ptxemu.machine.tensor_core import chunk_codes
from ptxemu.syntax.tree import Addr, Instr

_COUNTS = "x1 x2 x4 trans shared shared::cta"
_FLAGS = f"sync aligned m8n8 {_COUNTS}"
_ROW_BYTES = 16
_BYTES = np.arange(_ROW_BYTES)


def _row_addresses(c: Lower, operand: Addr) -> tuple[str, Value]:
    """Return (text of the per-lane addresses, their value)."""
    address = c.address(operand, 32)
    return ("full({0}, U32)" if address.uniform else "{0}"), address


@op("ldmatrix", types="b16", flags=_FLAGS)
def load_matrix(c: Lower, i: Instr, f: Match) -> list[Value]:
    count = len(c.each(i.operands[0]))
    text, address = _row_addresses(c, i.operands[1])
    text = f"matrix_load(w, {text}, {count}, {'trans' in f.flags})"
    return c.effect(text, address, results=[("u32", False)] * count, matrix=True)


_PACKED = {"b8": 8, "b6x16_p32": 6, "b4x16_p64": 4}  # bits of an element in shared memory


@op("ldmatrix", types="b8", flags=f"sync aligned m16n16 {_COUNTS}")
@op(
    "ldmatrix", types=("b8x16", "b6x16_p32 b4x16_p64"), flags=f"sync aligned m8n16 m16n16 {_COUNTS}"
)
def load_byte_matrix(c: Lower, i: Instr, f: Match) -> list[Value]:
    """.x1 and .x2 of m16n16 with .trans, or .x1, .x2 and .x4 of m8n16 without."""
    registers, shape = len(c.each(i.operands[0])), f.pick("m8n16", "m16n16")
    matrices = int((f.pick("x1", "x2", "x4") or "x0")[1])
    tall = shape == "m16n16"
    whole = {"sync", "aligned"} <= f.flags and tall == ("trans" in f.flags)
    if not whole or registers != matrices * (1 + tall) or registers not in (1, 2, 4):
        raise UnsupportedPtx(f"unsupported form of ldmatrix {i.opcode!r}", line=i.line, text=i.text)
    text, address = _row_addresses(c, i.operands[1])
    text = f"byte_matrix_load(w, {text}, {registers}, {_PACKED[f.type]}, {tall})"
    return c.effect(text, address, results=[("u32", False)] * registers, matrix=True)


@op("stmatrix", types="b16", flags=_FLAGS)
@op("stmatrix", types="b8", flags=f"sync aligned m16n8 {_COUNTS}")
def store_matrix(c: Lower, i: Instr, f: Match) -> None:
    if f.type == "b8" and "trans" not in f.flags:
        raise UnsupportedPtx("stmatrix of b8 without .trans")
    text, address = _row_addresses(c, i.operands[0])
    rows = tuple(c.srcs(c.each(i.operands[1]), "u32"))
    if f.type == "b8":
        c.effect(f"byte_matrix_store(w, {text}, {{rows}})", address, rows=rows)
    else:
        c.effect(f"matrix_store(w, {text}, {{rows}}, {'trans' in f.flags})", address, rows=rows)


def _row_index(w: Warp, address: np.ndarray, count: int, write: bool) -> np.ndarray:
    """Return the byte index [matrix, row, byte] into the CTA's shared memory, and report the
    access."""
    offsets = (address[: 8 * count] & OFFSET_MASK).astype(np.int64).reshape(count, 8)
    if int(np.bitwise_or.reduce(offsets, axis=None)) & (_ROW_BYTES - 1):
        raise HardwareRefusal(f"matrix row at {int(offsets.max()):#x}; must be 16-byte aligned")
    w.cta.check(int(offsets.max()), _ROW_BYTES)
    for each in w.listeners:
        each.shared_access(w, w.cta, offsets.ravel(), _ROW_BYTES, np.arange(8 * count), write)
    return offsets[:, :, None] + _BYTES


@runtime
def matrix_load(w: Warp, address: np.ndarray, count: int, transposed: bool) -> np.ndarray:
    """Return uint32 [matrix, lane]."""
    index = _row_index(w, address, count, False)
    rows = w.cta.smem[index].view(np.uint16)  # [matrix, 8, 8]
    if transposed:
        rows = np.ascontiguousarray(rows.transpose(0, 2, 1))
    return rows.reshape(count, 64).view(np.uint32)


@runtime
def byte_matrix_load(
    w: Warp, address: np.ndarray, registers: int, bits: int, transposed: bool
) -> np.ndarray:
    """Return uint32 [register, lane]; bits: of an element in shared memory."""
    rows = w.cta.smem[_row_index(w, address, registers, False)]  # [8 rows, row, byte]
    if bits < 8:
        rows = chunk_codes(bits, rows)
    if transposed:  # [matrix, row, half of a row, byte] to [matrix, half, column, row]
        rows = rows.reshape(-1, 16, 2, 8).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(rows).reshape(registers, 128).view(np.uint32)


@runtime
def matrix_store(w: Warp, address: np.ndarray, values: np.ndarray, transposed: bool) -> None:
    count = len(values)
    rows = np.ascontiguousarray(values).view(np.uint16).reshape(count, 8, 8)
    if transposed:
        rows = np.ascontiguousarray(rows.transpose(0, 2, 1))
    _store_rows(w, address, rows.view(np.uint8).reshape(count, 8, _ROW_BYTES))


@runtime
def byte_matrix_store(w: Warp, address: np.ndarray, values: np.ndarray) -> None:
    count = len(values)
    pairs = np.ascontiguousarray(values).view(np.uint8).reshape(count, 8, 4, 2, 2)
    _store_rows(w, address, pairs.transpose(0, 2, 4, 3, 1).reshape(count, 8, _ROW_BYTES))


def _store_rows(w: Warp, address: np.ndarray, rows: np.ndarray) -> None:
    """rows: uint8 [matrix, row, byte]."""
    index = _row_index(w, address, len(rows), True)
    w.cta.smem[index] = rows
    w.cta.mark_generic(index)
