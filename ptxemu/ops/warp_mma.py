"""mma.sync and movmatrix: matrices whose fragments are registers of a warp. PTX ISA "mma",
"movmatrix".

Lane t = 4 g + i. A register of A holds neighbouring elements of row g, one of its lower half of
row g + 8, at columns that start with those of i; the next two registers go on four lanes further.
A register of B holds neighbouring rows of column g, and D has columns 2 i and 2 i + 1.
"""

from __future__ import annotations

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value
from ptxemu.errors import UnsupportedPtx
from ptxemu.machine.operand_format import decode
from ptxemu.numerics import formats
from ptxemu.syntax.tree import TYPE_BITS, Instr

_FP8 = "e4m3 e5m2"
_INT8 = "s8 u8"
_VARIANTS = (  # types of D, A, B, C; how many columns A has, and what else an opcode may say
    (("f32", "f16", "f16", "f32"), "m16n8k8 m16n8k16"),
    (("f16", "f16", "f16", "f16"), "m16n8k8 m16n8k16"),
    (("f32", "bf16", "bf16", "f32"), "m16n8k8 m16n8k16"),
    (("f32", "tf32", "tf32", "f32"), "m16n8k4 m16n8k8"),
    (("f32", _FP8, _FP8, "f32"), "m16n8k16 m16n8k32"),
    (("f16", _FP8, _FP8, "f16"), "m16n8k16 m16n8k32"),
    (("s32", _INT8, _INT8, "s32"), "m16n8k16 m16n8k32 satfinite"),
)
_LANES = (8, 4)  # g, i


def multiply(c: Lower, i: Instr, f: Match) -> list[Value]:
    d, *sources = (c.each(operand) for operand in i.operands)
    _require_fragments(i, f, [len(part) for part in (d, *sources)])
    a, b, _ = sources
    rows = tuple(c.srcs((item for part in sources for item in part), "u32"))
    held = "u32" if f.types[0] == "f16" else f.types[0]
    return c.effect(
        f"fragments_multiply({{rows}}, {len(a)}, {len(b)}, {f.types!r}, {'satfinite' in f.flags})",
        results=[(held, False)] * len(d),
        matrix=True,
        rows=rows,
    )


for _types, _flags in _VARIANTS:
    op("mma.sync", types=_types, flags=f"aligned row col {_flags}", section="mma")(multiply)


def _require_fragments(i: Instr, f: Match, given: list[int]) -> None:
    """One shape, and as many registers of D, A, B and C as its fragments need."""
    shapes = [flag for flag in f.flags if flag.startswith("m16n8k")]
    if len(shapes) == 1 and "aligned" in f.flags and ".row.col." in i.opcode:
        k = int(shapes[0].removeprefix("m16n8k"))
        b_count = k * TYPE_BITS[f.types[1]] // 128  # four lanes hold a column
        d_count = 2 if f.types[0] == "f16" else 4
        if given == [d_count, 2 * b_count, b_count, d_count]:
            return
    raise UnsupportedPtx(f"unsupported form of mma.sync {i.opcode!r}", line=i.line, text=i.text)


@runtime
def fragments_multiply(
    registers: np.ndarray, a_count: int, b_count: int, types: tuple[str, ...], saturate: bool
) -> np.ndarray:
    """[register, lane] of D = A B + C. The order of the sums is free on hardware and here is the
    BLAS's; integers are exact."""
    registers = np.ascontiguousarray(registers).view(np.uint32)
    a, b, c = np.split(registers, (a_count, a_count + b_count))
    a_values, b_values = _elements(a, types[1]), _elements(b, types[2])
    columns = a_values.shape[-1]
    a_rows = a_values.reshape(-1, 2, *_LANES, columns).transpose(1, 2, 0, 3, 4).reshape(16, -1)
    b_rows = b_values.reshape(-1, *_LANES, columns).transpose(1, 0, 2, 3).reshape(8, -1)
    with np.errstate(all="ignore"):
        product = (a_rows @ b_rows.T).reshape(2, *_LANES, 2).transpose(0, 3, 1, 2)
        return _ACCUMULATE[types[0]](product, _accumulator(c, types[3]), saturate)


def _elements(registers: np.ndarray, type_: str) -> np.ndarray:
    """float32 [register, lane, element]; integers of 8 bits and their sums of 32 are exact."""
    if type_ in ("s8", "u8"):
        values = registers.view({"s8": np.int8, "u8": np.uint8}[type_]).astype(np.float32)
    else:
        values = decode(type_, registers.view(np.uint8))
    return values.reshape(*registers.shape, -1)


def _accumulator(c: np.ndarray, type_: str) -> np.ndarray:
    """[half, column, g, i]."""
    if type_ == "f16":
        halves = formats.f16_to_f32(c.view(np.uint16)).reshape(2, *_LANES, 2)
        return halves.transpose(0, 3, 1, 2)
    return c.view(np.float32 if type_ == "f32" else np.int32).reshape(2, 2, *_LANES)


def _sum_f32(product: np.ndarray, c: np.ndarray, saturate: bool) -> np.ndarray:
    return (product + c).reshape(4, 32)


def _sum_f16(product: np.ndarray, c: np.ndarray, saturate: bool) -> np.ndarray:
    bits = formats.f32_to_f16(product + c).astype(np.uint16).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(bits).reshape(2, 64).view(np.uint32)


def _sum_s32(product: np.ndarray, c: np.ndarray, saturate: bool) -> np.ndarray:
    total = product.astype(np.int64) + c
    if saturate:
        total = total.clip(-(1 << 31), (1 << 31) - 1)
    return total.astype(np.int32).reshape(4, 32)


_ACCUMULATE = {"f32": _sum_f32, "f16": _sum_f16, "s32": _sum_s32}


@op("movmatrix.sync.aligned.m8n8.trans", types="b16", section="movmatrix")
def transpose(c: Lower, i: Instr, f: Match) -> list[Value]:
    source = c.src(i.operands[1], "u32")
    text = "full({0}, U32)" if source.uniform else "{0}"
    return c.effect(f"fragment_transpose({text})", source, results=[("u32", False)])


@runtime
def fragment_transpose(register: np.ndarray) -> np.ndarray:
    """8 x 8 elements of 16 bits, two a lane."""
    matrix = np.ascontiguousarray(register).view(np.uint16).reshape(8, 8)
    return np.ascontiguousarray(matrix.T).reshape(64).view(np.uint32)
