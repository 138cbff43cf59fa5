"""mma.sp: A has zeros, and keeps only its other elements. PTX ISA "Matrix multiply-accumulate
operation using mma.sp instruction with sparse matrix A".

What metadata mean, and where they lie among the lanes of rows g and g + 8, `machine.sparsity` says.
"""

from __future__ import annotations

import re

import numpy as np

from ptxemu.codegen.flow import METADATA_AT
from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value
from ptxemu.machine.sparsity import (
    DIFFERENT,
    RISING,
    codes_of_lanes,
    contributing,
    expanded,
    product,
    row_bits,
    selectors,
)
from ptxemu.machine.state import Warp
from ptxemu.machine.sums import require_free_order
from ptxemu.ops.warp_fragments import (
    BITS,
    COLUMNS,
    accumulated,
    columns_of_b,
    registers,
    rows_of_a,
)
from ptxemu.ops.warp_mma import refused, shape_of
from ptxemu.syntax.tree import Imm, Instr

_FP8, _INT8, _INT4 = "e4m3 e5m2", "s8 u8", "s4 u4"
_NARROW = f"{_FP8} e2m1 e2m3 e3m2"
_KIND = "kind::f8f6f4"
_SHAPE = re.compile(r"m\d+n\d+k\d+")
_NAMES = ("mma.sp.sync", "mma.sp::ordered_metadata.sync")
_VARIANTS = (  # types of D, A, B, C; shapes and what else an opcode may say
    (("f32", "f16", "f16", "f32"), "m16n8k16 m16n8k32"),
    (("f16", "f16", "f16", "f16"), "m16n8k16 m16n8k32"),
    (("f32", "bf16", "bf16", "f32"), "m16n8k16 m16n8k32"),
    (("f32", "tf32", "tf32", "f32"), "m16n8k8 m16n8k16"),
    (("s32", _INT8, _INT8, "s32"), "m16n8k32 m16n8k64 satfinite"),
    (("s32", _INT4, _INT4, "s32"), "m16n8k64 m16n8k128 satfinite"),
    (("f32", _FP8, _FP8, "f32"), "m16n8k64"),
    (("f16", _FP8, _FP8, "f16"), "m16n8k64"),
)
_KINDS = (  # of sm_120a, with ordered metadata only
    (("f32", _NARROW, _NARROW, "f32"), f"m16n8k64 {_KIND}"),
    (("f16", _NARROW, _NARROW, "f16"), f"m16n8k64 {_KIND}"),
)


def multiply_sparse(c: Lower, i: Instr, f: Match) -> list[Value]:
    """d, a, b, c, metadata, selector."""
    ordered = i.parts[1] != "sp"
    d, a, b, addend = (c.each(operand) for operand in i.operands[:4])
    _require(i, f, [len(part) for part in (d, a, b, addend)])
    metadata, selector = i.operands[4:]
    rows = tuple(c.srcs((*a, *b, *addend, metadata), "u32"))
    how = (int(selector.value), ordered, "satfinite" in f.flags)
    return c.effect(
        f"sparse_multiply(w, {{rows}}, {(len(a), len(b))}, {f.types!r}, {how})",
        results=[("u32" if f.types[0] == "f16" else f.types[0], False)] * len(d),
        matrix=True,
        rows=rows,
    )


for _name in _NAMES:
    for _types, _flags in (*_VARIANTS, *(_KINDS if _name == _NAMES[1] else ())):
        op(_name, types=_types, flags=f"aligned row col {_flags}", section="mma.sp")(
            multiply_sparse
        )


def _require(i: Instr, f: Match, given: list[int]) -> None:
    """One shape, its registers, and a selector that the shape has."""
    (m, k), (d_type, a_type, b_type, c_type) = shape_of(f), f.types
    wanted = [
        registers(d_type, m * COLUMNS),
        registers(a_type, m * k // 2),
        registers(b_type, k * COLUMNS),
        registers(c_type, m * COLUMNS),
    ]
    whole = m and "aligned" in f.flags and ".row.col." in i.opcode and len(i.operands) == 6
    narrow = not {a_type, b_type}.isdisjoint(("e2m1", "e2m3", "e3m2"))
    if not whole or given != wanted or (narrow and _KIND not in f.flags):
        raise refused(i)
    selector = i.operands[5]
    choices = selectors(row_bits(BITS[a_type], k))
    if not isinstance(selector, Imm) or selector.value not in choices:
        raise refused(i)


def metadata_lanes(instr: Instr) -> int:
    """A bit for each lane whose metadata an mma.sp or a wgmma.mma_async.sp reads."""
    selector = instr.operands[METADATA_AT[instr.root] + 1]
    if not isinstance(selector, Imm):
        return 0xFFFFFFFF
    shape = next(part for part in instr.parts if _SHAPE.fullmatch(part))
    a_type = [part for part in instr.parts if part in BITS][1]
    packed = a_type == "e2m1" and not {"kind::mxf4", "kind::mxf4nvf4"}.isdisjoint(instr.parts)
    bits = 4 if packed else BITS[a_type]
    return contributing(row_bits(bits, int(shape.rpartition("k")[2])), int(selector.value))


# -- what it does -----------------------------------------------------------------------------


def with_zeros(
    kept: np.ndarray, words: np.ndarray, selector: int, type_: str, ordered: bool = True
) -> np.ndarray:
    """A [row, column] of what it keeps. words: the metadata [lane]."""
    bits = row_bits(BITS[type_], 2 * kept.shape[1])
    codes = codes_of_lanes(words, selector, bits, BITS[type_] >= 16)
    return expanded(kept, codes, RISING if ordered else DIFFERENT)


@runtime
def sparse_multiply(
    w: Warp,
    words: np.ndarray,
    counts: tuple[int, int],
    types: tuple[str, ...],
    how: tuple[int, bool, bool],
) -> np.ndarray:
    """[register, lane] of D = A B + C. counts: registers of A and B; how: the sparsity selector,
    whether the metadata are ordered, whether sums saturate."""
    require_free_order(w.machine, "mma.sp", types[0])
    words = np.ascontiguousarray(words).view(np.uint32)
    a_count, b_count = counts
    a, b, rest = np.split(words, (a_count, a_count + b_count))
    selector, ordered, saturate = how
    right = columns_of_b(b, types[2])
    kept, stored = rows_of_a(a, types[1], 2), None
    left = with_zeros(kept, rest[-1], selector, types[1], ordered)
    if not np.isfinite(right).all():
        ones = with_zeros(np.ones_like(kept), rest[-1], selector, types[1], ordered)
        stored = ones != 0
    with np.errstate(all="ignore"):
        return accumulated(product(left, right, stored), rest[:-1], types, saturate)
