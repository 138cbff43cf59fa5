"""mma.sync.m8n8k4 of f16: four products at once, each of two quads of lanes. PTX ISA "Matrix
Fragments for mma.m8n8k4 with .f16 floating point type".

Lanes 4 q ... 4 q + 3 and 4 q + 16 ... 4 q + 19 hold the matrices of product q; the latter have rows
4 to 7 of A and of D in f16, and columns 4 to 7 of B. Of D in f32, lane and register share the bits
of row and column.
"""

from __future__ import annotations

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value
from ptxemu.machine.state import Warp
from ptxemu.machine.sums import require_free_order
from ptxemu.numerics import formats
from ptxemu.ops.warp_mma import refused
from ptxemu.syntax.tree import Instr

_QUADS = (2, 4, 4)  # upper or lower half, product, lane of its quad
_REGISTERS = {"f16": 4, "f32": 8}  # of C and D
_ORDERS = ("row", "col")


@op(
    "mma.sync",
    types=("f16 f32", "f16", "f16", "f16 f32"),
    flags="aligned m8n8k4 row col",
    section="mma",
)
def multiply_quads(c: Lower, i: Instr, f: Match) -> list[Value]:
    d, *sources = (c.each(operand) for operand in i.operands)
    orders = tuple(part for part in i.parts if part in _ORDERS)
    d_type, _, _, c_type = f.types
    given = [len(part) for part in (d, *sources)]
    whole = len(orders) == 2 and "m8n8k4" in f.flags and "aligned" in f.flags
    if not whole or (d_type, c_type) == ("f16", "f32"):
        raise refused(i)
    if given != [_REGISTERS[d_type], 2, 2, _REGISTERS[c_type]]:
        raise refused(i)
    rows = tuple(c.srcs((item for part in sources for item in part), "u32"))
    return c.effect(
        f"quads_multiply(w, {{rows}}, {orders!r}, {(d_type, c_type)!r})",
        results=[("u32" if d_type == "f16" else "f32", False)] * len(d),
        matrix=True,
        rows=rows,
    )


@runtime
def quads_multiply(
    w: Warp, words: np.ndarray, orders: tuple[str, str], types: tuple[str, str]
) -> np.ndarray:
    """[register, lane] of D = A B + C, four times. orders: of A and B; types: of D and C."""
    require_free_order(w.machine, "mma.sync.m8n8k4", types[0])
    words = np.ascontiguousarray(words).view(np.uint32)
    a = _matrix(words[:2], outer=orders[0] == "row")
    b = _matrix(words[2:4], outer=orders[1] == "col")
    with np.errstate(all="ignore"):
        product = a @ b.transpose(0, 2, 1)
        return _to_registers(product + _accumulator(words[4:], types[1]), types[0])


def _matrix(words: np.ndarray, *, outer: bool) -> np.ndarray:
    """[product, row of A or column of B, along K]. outer: a lane's four elements lie along K; else
    they are rows 0 to 3 of its half, and the lane says where along K."""
    halves = formats.f16_to_f32(words.view(np.uint16)).reshape(2, *_QUADS, 2)
    values = halves.transpose(1, 2, 3, 0, 4).reshape(*_QUADS, 4)  # [half, product, lane, element]
    if not outer:
        values = values.transpose(0, 1, 3, 2)
    return values.transpose(1, 0, 2, 3).reshape(4, 8, 4)


def _accumulator(c: np.ndarray, type_: str) -> np.ndarray:
    """[product, row, column]."""
    if type_ == "f16":
        values = formats.f16_to_f32(c.view(np.uint16)).reshape(4, *_QUADS, 2)
        return values.transpose(2, 1, 3, 0, 4).reshape(4, 8, 8)
    # register 4 x + 2 y + z, lane 2 u + v of a quad: row 4 half + 2 y + v, column 4 x + 2 u + z
    values = c.view(np.float32).reshape(2, 2, 2, 2, 4, 2, 2)  # x, y, z, half, product, u, v
    return values.transpose(4, 3, 1, 6, 0, 5, 2).reshape(4, 8, 8)


def _to_registers(d: np.ndarray, type_: str) -> np.ndarray:
    """The inverse of `_accumulator`, rounded."""
    if type_ == "f16":
        bits = formats.f32_to_f16(d).astype(np.uint16).reshape(4, 2, 4, 4, 2)
        ordered = bits.transpose(3, 1, 0, 2, 4)  # [register, half, product, lane, element]
        return np.ascontiguousarray(ordered).reshape(4, 64).view(np.uint32)
    parts = d.astype(np.float32).reshape(4, 2, 2, 2, 2, 2, 2)  # product, half, y, v, x, u, z
    return np.ascontiguousarray(parts.transpose(4, 2, 6, 1, 0, 5, 3)).reshape(8, 32)
