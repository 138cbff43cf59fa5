"""mma.sp: A has zeros, and keeps only its other elements. PTX ISA "Matrix multiply-accumulate
operation using mma.sp instruction with sparse matrix A".

Of every four neighbouring elements of a row two are kept, of 4-bit types of every four pairs two,
of tf32 one of two. Two indices of two bits each, the first in the low bits, say which; tf32 has
those of its halves, 0b0100 or 0b1110.

Where the metadata lie among the lanes 4 g ... 4 g + 3 of rows g and g + 8, by the bits of a row:
16: one lane, which the selector names, has row g in its low half and row g + 8 in the other. 32: a
pair, which the selector names: of types with 16 and 32 bits each lane has half of both rows, of
narrower ones the first has row g. 64: lanes 0 and 1 have the first half of the two rows, 2 and 3
the second. The manual shows that in figures; CUTLASS's reorder_meta (tools/util/host_reorder.h)
says the same, and no GPU has been asked.
"""

from __future__ import annotations

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value
from ptxemu.errors import HardwareRefusal
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
        f"sparse_multiply({{rows}}, {(len(a), len(b))}, {f.types!r}, {how})",
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
    most = 64 // _row_bits(a_type, k)  # choices: 4, 2 or 1
    if not isinstance(selector, Imm) or selector.value not in range(most):
        raise refused(i)


# -- metadata ---------------------------------------------------------------------------------


def _row_bits(type_: str, k: int) -> int:
    """Bits of metadata of a row of A with k columns: four for each four elements (or pairs)."""
    return {4: k // 2, 32: 2 * k}.get(BITS[type_], k)


def metadata_of(words: np.ndarray, selector: int, type_: str, k: int) -> np.ndarray:
    """[row, group, which of the two]: indices of what is kept of each group. words: [lane]."""
    quads, bits = words.reshape(8, 4), _row_bits(type_, k)
    halves = np.ascontiguousarray(quads).view(np.uint16).reshape(8, 4, 2)  # [g, lane, half]
    if bits == 16:
        rows = halves[:, selector].T[..., None]
    elif bits == 32 and BITS[type_] >= 16:
        rows = halves[:, 2 * selector : 2 * selector + 2].transpose(2, 0, 1)
    elif bits == 32:
        rows = halves[:, 2 * selector : 2 * selector + 2].transpose(1, 0, 2)
    elif selector == 0:
        rows = halves.reshape(8, 2, 2, 2).transpose(2, 0, 1, 3)
    else:
        raise HardwareRefusal(f"sparsity selector {selector}; this shape has only 0")
    image = np.ascontiguousarray(rows).reshape(16, -1).view(np.uint8)
    codes = np.stack([image & 0xF, image >> 4], axis=-1).reshape(16, -1)
    return np.stack([codes & 3, codes >> 2], axis=-1).astype(np.intp)


def expanded(kept: np.ndarray, indices: np.ndarray, ordered: bool = True) -> np.ndarray:
    """A with its zeros, [row, column], of what it keeps. Raises HardwareRefusal for indices with
    which the manual leaves the result undefined."""
    first, second = indices[..., 0], indices[..., 1]
    if (first == second).any() or (ordered and (first > second).any()):
        raise HardwareRefusal(
            "sparsity metadata with equal indices of a group, or of ordered ones that fall"
        )
    groups = indices.shape[1]
    unit = kept.shape[1] // (2 * groups)
    if unit == 0:
        return _expanded_halves(kept, first, second)
    values = kept.reshape(16, groups, 2, unit)
    dense = np.zeros((16, groups, 4, unit), kept.dtype)
    where = np.broadcast_to(indices[..., None], values.shape)
    np.put_along_axis(dense, where, values, axis=2)
    return dense.reshape(16, -1)


def _expanded_halves(kept: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Of tf32, whose indices are those of 16-bit halves: one element of two."""
    if (first % 2).any() or (second != first + 1).any():
        raise HardwareRefusal("sparsity metadata of tf32 other than 0b0100 and 0b1110")
    dense = np.zeros((*kept.shape, 2), kept.dtype)
    np.put_along_axis(dense, first[..., None] // 2, kept[..., None], axis=2)
    return dense.reshape(16, -1)


@runtime
def sparse_multiply(
    words: np.ndarray,
    counts: tuple[int, int],
    types: tuple[str, ...],
    how: tuple[int, bool, bool],
) -> np.ndarray:
    """[register, lane] of D = A B + C. counts: registers of A and B; how: the sparsity selector,
    whether the metadata are ordered, whether sums saturate."""
    words = np.ascontiguousarray(words).view(np.uint32)
    a_count, b_count = counts
    a, b, rest = np.split(words, (a_count, a_count + b_count))
    selector, ordered, saturate = how
    right = columns_of_b(b, types[2])
    indices = metadata_of(rest[-1], selector, types[1], right.shape[1])
    left = expanded(rows_of_a(a, types[1], 2), indices, ordered)
    with np.errstate(all="ignore"):
        return accumulated(left @ right.T, rest[:-1], types, saturate)
