"""mma.sync and movmatrix: matrices whose fragments are registers of a warp. PTX ISA "mma",
"movmatrix". How the fragments lie, `warp_fragments` says; m8n8k4 of f16 is in `warp_mma_quads`,
block scales in `warp_mma_scaled`, sparse matrices in `warp_mma_sparse`.
"""

from __future__ import annotations

import re

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value
from ptxemu.errors import UnsupportedPtx
from ptxemu.machine.state import Warp
from ptxemu.machine.sums import sums_of
from ptxemu.numerics.accumulation import Types, accumulate
from ptxemu.numerics.arith import fma_f64
from ptxemu.ops.warp_fragments import (
    COLUMNS,
    accumulated,
    accumulator,
    by_lane,
    columns_of_b,
    matrix_of,
    registers,
    registers_of,
    rows_of_a,
)
from ptxemu.syntax.tree import Instr

_FP8 = "e4m3 e5m2"
_NARROW = f"{_FP8} e2m1 e2m3 e3m2"
_INT8, _INT4 = "s8 u8", "s4 u4"
_KIND = "kind::f8f6f4"
_VARIANTS: tuple[tuple[tuple[str, ...], str], ...] = (
    # types of D, A, B, C and the operation on bits; the shapes, and what else an opcode may say
    (("f32", "f16", "f16", "f32"), "m16n8k8 m16n8k16"),
    (("f16", "f16", "f16", "f16"), "m16n8k8 m16n8k16"),
    (("f32", "bf16", "bf16", "f32"), "m16n8k8 m16n8k16"),
    (("f32", "tf32", "tf32", "f32"), "m16n8k4 m16n8k8"),
    (("f32", _FP8, _FP8, "f32"), "m16n8k16 m16n8k32"),
    (("f16", _FP8, _FP8, "f16"), "m16n8k16 m16n8k32"),
    (("f32", _NARROW, _NARROW, "f32"), f"m16n8k32 {_KIND}"),
    (("f16", _NARROW, _NARROW, "f16"), f"m16n8k32 {_KIND}"),
    (("s32", _INT8, _INT8, "s32"), "m8n8k16 m16n8k16 m16n8k32 satfinite"),
    (("s32", _INT4, _INT4, "s32"), "m8n8k32 m16n8k32 m16n8k64 satfinite"),
    (("s32", "b1", "b1", "s32", "xor and", "popc"), "m8n8k128 m16n8k128 m16n8k256"),
    (("f64", "f64", "f64", "f64"), "m8n8k4 m16n8k4 m16n8k8 m16n8k16 rn rz rm rp"),
)
_SHAPE = re.compile(r"m(\d+)n8k(\d+)$")


def multiply(c: Lower, i: Instr, f: Match) -> list[Value]:
    d, *sources = (c.each(operand) for operand in i.operands)
    halves = require_fragments(i, f, [len(part) for part in (d, *sources)])
    a, b, _ = sources
    held, word = ("f64", "u64") if f.types[0] == "f64" else (f.types[0], "u32")
    rows = tuple(c.srcs((item for part in sources for item in part), word))
    how = f.pick("satfinite", "rz", "rm", "rp", default="rn" if held == "f64" else "")
    how = f.types[4] if len(f.types) > 4 else how
    name = "fragments_multiply_f64" if held == "f64" else "fragments_multiply"
    return c.effect(
        f"{name}(w, {{rows}}, {(len(a), len(b), halves)}, {f.types[:4]!r}, {how!r})",
        results=[("u32" if held == "f16" else held, False)] * len(d),
        matrix=True,
        rows=rows,
    )


for _types, _flags in _VARIANTS:
    op("mma.sync", types=_types, flags=f"aligned row col {_flags}", section="mma")(multiply)


def shape_of(f: Match) -> tuple[int, int]:
    """Rows and columns of A; zeros where the opcode does not name one shape."""
    found = [match for flag in f.flags if (match := _SHAPE.match(flag))]
    return (int(found[0][1]), int(found[0][2])) if len(found) == 1 else (0, 0)


def refused(i: Instr) -> UnsupportedPtx:
    """The error of a form that there is not."""
    return UnsupportedPtx(
        f"unsupported form of {i.root}.{i.parts[1]} {i.opcode!r}", line=i.line, text=i.text
    )


def require_fragments(i: Instr, f: Match, given: list[int]) -> int:
    """One shape, as many registers of D, A, B and C as its fragments need, and a kind where types
    of fewer than 8 bits ask for it. Returns how many times A has 8 rows."""
    (m, k), (d_type, a_type, b_type, c_type) = shape_of(f), f.types[:4]
    wanted = [
        registers(d_type, m * COLUMNS),
        registers(a_type, m * k),
        registers(b_type, k * COLUMNS),
        registers(c_type, m * COLUMNS),
    ]
    kinds = {a_type, b_type}.isdisjoint(("e2m1", "e2m3", "e3m2")) or _KIND in f.flags
    rounds = len(f.flags.intersection(("rn", "rz", "rm", "rp"))) < 2
    if not (m and kinds and rounds and "aligned" in f.flags and ".row.col." in i.opcode):
        raise refused(i)
    if given != wanted:
        raise refused(i)
    return m // 8


@runtime
def fragments_multiply(
    w: Warp,
    words: np.ndarray,
    counts: tuple[int, int, int],
    types: tuple[str, ...],
    how: str,
) -> np.ndarray:
    """[register, lane] of D = A B + C. counts: registers of A and of B, halves of A's rows; how:
    satfinite, or the operation on bits. The order of the sums is free by the manual, and here is
    the BLAS's unless the launch wants them aligned; integers are exact."""
    words = np.ascontiguousarray(words).view(np.uint32)
    a_count, b_count, halves = counts
    end = a_count + b_count
    a, b, c = (
        words[:a_count],
        words[a_count:end],
        words[end:],
    )  # np.split takes longer than the rest
    left, right = rows_of_a(a, types[1], halves), columns_of_b(b, types[2])
    sums = sums_of(w.machine, "mma.sync", *types[:3])
    with np.errstate(all="ignore"):
        if sums is not None:
            before, kinds = matrix_of(c, types[3]), Types(*types[:3])
            return registers_of(accumulate(left, right, before, kinds, sums), types[0])
        product = left @ right.T
        if how == "xor":  # bits that are set in one of the two
            product = left.sum(1)[:, None] + right.sum(1) - 2 * product
        return accumulated(product, c, types, how == "satfinite")


@runtime
def fragments_multiply_f64(
    w: Warp,
    words: np.ndarray,
    counts: tuple[int, int, int],
    types: tuple[str, ...],
    how: str,
) -> np.ndarray:
    """The same on f64: each product is added with one rounding, in the order of K, which is our
    choice. how: the rounding."""
    words = np.ascontiguousarray(words).view(np.uint64)
    a_count, b_count, halves = counts
    a, b, c = np.split(words, (a_count, a_count + b_count))
    left, right = rows_of_a(a, "f64", halves), columns_of_b(b, "f64")
    total = accumulator(c, "f64")
    for x, y in zip(left.T, right.T, strict=True):
        x_parts, y_parts = (by_lane(z) for z in np.broadcast_arrays(x[:, None], y[None]))
        total = fma_f64(x_parts, y_parts, total, how)
    return total.reshape(-1, 32)


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
