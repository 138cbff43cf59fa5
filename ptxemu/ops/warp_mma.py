"""mma.sync and movmatrix: matrices whose fragments are registers of a warp. PTX ISA "mma",
"movmatrix". Fragments come first, then dense products, m8n8k4 of f16, sparse A, block scales.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np

from ptxemu.codegen.flow import METADATA_AT
from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.state import Warp
from ptxemu.machine.tensor_core import (
    DIFFERENT,
    RISING,
    codes_of_lanes,
    contributing,
    decode,
    expanded,
    product,
    require_free_order,
    row_bits,
    selectors,
    sums_of,
)
from ptxemu.numerics import formats
from ptxemu.numerics.accumulation import Types, accumulate
from ptxemu.numerics.arith import fma_f64
from ptxemu.syntax.tree import Imm, Instr

# Fragments of the warp's matrix multiply: registers of 32 lanes to rows of numbers and back.
#
# Lane t = 4 g + i. A register of A holds neighbouring elements of row g or, of matrices with 16
# rows, in every other register of row g + 8, at columns that start with those of i; the next
# registers of a row go on four lanes further. A register of B holds neighbouring rows of column g,
# and D has columns 2 i and 2 i + 1. PTX ISA: "Matrix Fragments for mma.m8n8k16" and those around
# it.

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
    """Return the number of registers of a lane for a matrix of so many elements.

    A register of f64 has 64 bits.
    """
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
            f"an element in {type_} with bits set outside it; it has bits {lowest} to"
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
    """Return [register, lane, element] as float32, or float64 for f64.

    Integers and sums of their products are exact in float32.
    """
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
    """Return [row, column] of A, which has 8 rows for each of the halves."""
    values = elements(words, type_)
    parts = values.reshape(-1, halves, *LANES, values.shape[-1])
    return parts.transpose(1, 2, 0, 3, 4).reshape(8 * halves, -1)


def columns_of_b(words: np.ndarray, type_: str) -> np.ndarray:
    """Return [column, row] of B."""
    values = elements(words, type_)
    parts = values.reshape(-1, *LANES, values.shape[-1])
    return parts.transpose(1, 0, 2, 3).reshape(COLUMNS, -1)


# -- accumulators -----------------------------------------------------------------------------


def by_lane(matrix: np.ndarray) -> np.ndarray:
    """Rearrange [row, column] of D to [half, which of the two columns, g, i]."""
    return matrix.reshape(-1, *LANES, 2).transpose(0, 3, 1, 2)


def accumulator(c: np.ndarray, type_: str) -> np.ndarray:
    """Return [half, which, g, i] of C's registers."""
    if type_ == "f16":
        halves = formats.f16_to_f32(c.view(np.uint16)).reshape(-1, *LANES, 2)
        return halves.transpose(0, 3, 1, 2)
    kind = {"f32": np.float32, "s32": np.int32, "f64": np.float64}[type_]
    return c.view(kind).reshape(-1, 2, *LANES)


def matrix_of(c: np.ndarray, type_: str) -> np.ndarray:
    """Return [row, column] of C's registers: the inverse of `by_lane`."""
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
    """Return D = product + C as [register, lane].

    Args:
        product: [row, column].
        c: registers of C.
        types: the first is that of D, the last that of C.
        saturate: whether the sums saturate.
    """
    return _SUMS[types[0]](by_lane(product), accumulator(c, types[-1]), saturate)


def registers_of(d: np.ndarray, type_: str) -> np.ndarray:
    """Return [register, lane] of D [row, column], which has its type's values."""
    return _SUMS[type_](by_lane(d), np.zeros(1, np.float32), False)


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
    """Return rows and columns of A; zeros unless the opcode names exactly one shape."""
    found = [match for flag in f.flags if (match := _SHAPE.match(flag))]
    return (int(found[0][1]), int(found[0][2])) if len(found) == 1 else (0, 0)


def refused(i: Instr) -> UnsupportedPtx:
    """The error of a form that there is not."""
    return UnsupportedPtx(
        f"unsupported form of {i.root}.{i.parts[1]} {i.opcode!r}", line=i.line, text=i.text
    )


def require_fragments(i: Instr, f: Match, given: list[int]) -> int:
    """Check shape, number of registers of D, A, B and C, and kind; return how many times A has 8
    rows.

    Types of fewer than 8 bits need a kind.
    """
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
    """Return D = A B + C as [register, lane].

    counts: registers of A and of B, halves of A's rows.
    how: satfinite, or the operation on bits.

    The manual leaves the order of the sums free. Here it is the BLAS's unless the launch wants
    aligned sums. Integers are exact.
    """
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
    """Multiply and add in f64; `how` is the rounding.

    Each product is added with one rounding, in the order of K. This order is our choice.
    """
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
    """Transpose 8 x 8 elements of 16 bits, two in each lane."""
    matrix = np.ascontiguousarray(register).view(np.uint16).reshape(8, 8)
    return np.ascontiguousarray(matrix.T).reshape(64).view(np.uint32)


# mma.sync.m8n8k4 of f16: four products at once, each of two quads of lanes. PTX ISA "Matrix
# Fragments for mma.m8n8k4 with .f16 floating point type".
#
# Lanes 4 q ... 4 q + 3 and 4 q + 16 ... 4 q + 19 hold the matrices of product q; the latter have
# rows 4 to 7 of A and of D in f16, and columns 4 to 7 of B. Of D in f32, lane and register share
# the bits of row and column.

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
    """Return D = A B + C as [register, lane], for four products.

    Args:
        w: the warp.
        words: registers of A, B and C.
        orders: orders of A and B, "row" or "col".
        types: types of D and C.
    """
    require_free_order(w.machine, "mma.sync.m8n8k4", types[0])
    words = np.ascontiguousarray(words).view(np.uint32)
    a = _matrix(words[:2], outer=orders[0] == "row")
    b = _matrix(words[2:4], outer=orders[1] == "col")
    with np.errstate(all="ignore"):
        product = a @ b.transpose(0, 2, 1)
        return _to_registers(product + _accumulator(words[4:], types[1]), types[0])


def _matrix(words: np.ndarray, *, outer: bool) -> np.ndarray:
    """Return [product, row of A or column of B, along K].

    outer: whether a lane's four elements lie along K. Otherwise they are rows 0 to 3 of its
        half, and the lane is the position along K.
    """
    halves = formats.f16_to_f32(words.view(np.uint16)).reshape(2, *_QUADS, 2)
    values = halves.transpose(1, 2, 3, 0, 4).reshape(*_QUADS, 4)  # [half, product, lane, element]
    if not outer:
        values = values.transpose(0, 1, 3, 2)
    return values.transpose(1, 0, 2, 3).reshape(4, 8, 4)


def _accumulator(c: np.ndarray, type_: str) -> np.ndarray:
    """Return [product, row, column]."""
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


# mma.sp: A has zeros, and keeps only its other elements. PTX ISA "Matrix multiply-accumulate
# operation using mma.sp instruction with sparse matrix A".
#
# What metadata mean, and where they lie among the lanes of rows g and g + 8, `machine.tensor_core`
# says.

_ANY_SHAPE = re.compile(r"m\d+n\d+k\d+")
_SPARSE_NAMES = ("mma.sp.sync", "mma.sp::ordered_metadata.sync")
_SPARSE_VARIANTS = (  # types of D, A, B, C; shapes and what else an opcode may say
    (("f32", "f16", "f16", "f32"), "m16n8k16 m16n8k32"),
    (("f16", "f16", "f16", "f16"), "m16n8k16 m16n8k32"),
    (("f32", "bf16", "bf16", "f32"), "m16n8k16 m16n8k32"),
    (("f32", "tf32", "tf32", "f32"), "m16n8k8 m16n8k16"),
    (("s32", _INT8, _INT8, "s32"), "m16n8k32 m16n8k64 satfinite"),
    (("s32", _INT4, _INT4, "s32"), "m16n8k64 m16n8k128 satfinite"),
    (("f32", _FP8, _FP8, "f32"), "m16n8k64"),
    (("f16", _FP8, _FP8, "f16"), "m16n8k64"),
)
_SPARSE_KINDS = (  # of sm_120a, with ordered metadata only
    (("f32", _NARROW, _NARROW, "f32"), f"m16n8k64 {_KIND}"),
    (("f16", _NARROW, _NARROW, "f16"), f"m16n8k64 {_KIND}"),
)


def multiply_sparse(c: Lower, i: Instr, f: Match) -> list[Value]:
    """d, a, b, c, metadata, selector."""
    ordered = i.parts[1] != "sp"
    d, a, b, addend = (c.each(operand) for operand in i.operands[:4])
    _require_sparse(i, f, [len(part) for part in (d, a, b, addend)])
    metadata, selector = i.operands[4:]
    rows = tuple(c.srcs((*a, *b, *addend, metadata), "u32"))
    how = (int(selector.value), ordered, "satfinite" in f.flags)
    return c.effect(
        f"sparse_multiply(w, {{rows}}, {(len(a), len(b))}, {f.types!r}, {how})",
        results=[("u32" if f.types[0] == "f16" else f.types[0], False)] * len(d),
        matrix=True,
        rows=rows,
    )


for _name in _SPARSE_NAMES:
    for _types, _flags in (
        *_SPARSE_VARIANTS,
        *(_SPARSE_KINDS if _name == _SPARSE_NAMES[1] else ()),
    ):
        op(_name, types=_types, flags=f"aligned row col {_flags}", section="mma.sp")(
            multiply_sparse
        )


def _require_sparse(i: Instr, f: Match, given: list[int]) -> None:
    """Check shape and number of registers, and that the shape has the selector."""
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
    """Return the lanes whose metadata an mma.sp or a wgmma.mma_async.sp reads, as a bit mask."""
    selector = instr.operands[METADATA_AT[instr.root] + 1]
    if not isinstance(selector, Imm):
        return 0xFFFFFFFF
    shape = next(part for part in instr.parts if _ANY_SHAPE.fullmatch(part))
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
    """Return D = A B + C as [register, lane], for a sparse A.

    Args:
        w: the warp.
        words: registers of A, B, C and the metadata.
        counts: number of registers of A and B.
        types: of D, A, B and C.
        how: the sparsity selector, whether the metadata are ordered, whether sums saturate.
    """
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


# mma.sync with block scales: kind::mxf8f6f4, mxf4 and mxf4nvf4 of sm_120a. PTX ISA "mma", "Block
# Scaling for mma.sync".
#
# A row of A and a column of B have a scale factor, one byte, for each of their 1, 2 or 4 parts
# along K. Of the four lanes 4 g ... 4 g + 3, two neighbouring ones hold the factors of rows g and g
# + 8, one those of column g: the thread ids say which. The byte id is that of the first factor in
# the 32-bit operand.

_VECTORS = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4}
# kind, type of the factors: how many a row may have; the first is meant where the opcode is silent
_FACTORS: dict[tuple[str, str], tuple[int, ...]] = {
    ("mxf8f6f4", "ue8m0"): (1,),
    ("mxf4", "ue8m0"): (2,),
    ("mxf4nvf4", "ue8m0"): (0, 2),
    ("mxf4nvf4", "ue4m3"): (0, 4),
}
_FLAGS = f"aligned row col block_scale {' '.join(_VECTORS)}"
_SPARSE = "mma.sp::ordered_metadata.sync"


def multiply_scaled(c: Lower, i: Instr, f: Match) -> list[Value]:
    """d, a, b, c, {metadata, selector,} factors of A, {byte, thread}, factors of B, {...}."""
    sparse = i.parts[1] != "sync"
    d, a, b, addend = (c.each(operand) for operand in i.operands[:4])
    kind, count = _require_scaled(i, f, sparse, [len(part) for part in (d, a, b, addend)])
    factors = i.operands[-4:]
    metadata, selector = i.operands[4:6] if sparse else (None, None)
    words = [*a, *b, *addend, *_word(c, i, factors[0]), *_word(c, i, factors[2])]
    if metadata is not None:
        words.append(metadata)
    rows = tuple(c.srcs(words, "u32"))
    ids = c.srcs((*c.each(factors[1]), *c.each(factors[3])), "u16")
    if selector is not None:
        ids.append(c.src(selector, "u32"))
    chosen = ", ".join(f"{{{k}}}" for k in range(len(ids)))
    packed = kind != "mxf8f6f4"
    types = tuple("packed e2m1" if packed and t == "e2m1" else t for t in f.types)
    return c.effect(
        f"scaled_multiply(w, {{rows}}, {(len(a), len(b))}, {types!r}, {count}, ({chosen}))",
        *ids,
        results=[("f32", False)] * 4,
        matrix=True,
        rows=rows,
    )


def _word(c: Lower, i: Instr, operand: object) -> tuple[object, ...]:
    """The register with scale factors, which compilers also write as a vector of one."""
    words = c.each(operand)
    if len(words) != 1:
        raise refused(i)
    return words


for _kind, _ab, _factor, _dense, _sparse in (
    ("mxf8f6f4", _NARROW, "ue8m0", "m16n8k32", "m16n8k64"),
    ("mxf4", "e2m1", "ue8m0", "m16n8k64", "m16n8k128"),
    ("mxf4nvf4", "e2m1", "ue8m0 ue4m3", "m16n8k64", "m16n8k128"),
):
    for _name, _shape in (("mma.sync", _dense), (_SPARSE, _sparse)):
        op(
            _name,
            types=("f32", _ab, _ab, "f32", _factor),
            flags=f"{_FLAGS} {_shape} kind::{_kind}",
            section="mma" if _name == "mma.sync" else "mma.sp",
        )(multiply_scaled)


def _require_scaled(i: Instr, f: Match, sparse: bool, given: list[int]) -> tuple[str, int]:
    """The kind, and the scale factors of a row."""
    (m, k), kind = shape_of(f), f.pick("kind::mxf8f6f4", "kind::mxf4", "kind::mxf4nvf4")[6:]
    bits = "e2m1" if kind == "mxf8f6f4" else "packed e2m1"  # so many as any type of the kind
    vector = [n for name, n in _VECTORS.items() if name in f.flags]
    allowed = _FACTORS.get((kind, f.type), ())
    count = vector[0] if len(vector) == 1 else 0 if vector else next(iter(allowed), 0)
    wanted = [4, registers(bits, m * k >> sparse), registers(bits, k * COLUMNS), 4]
    whole = "block_scale" in f.flags and "aligned" in f.flags and ".row.col." in i.opcode
    if not whole or not count or count not in allowed or given != wanted:
        raise refused(i)
    if len(i.operands) != (10 if sparse else 8):
        raise refused(i)
    return kind, count


@runtime
def scaled_multiply(
    w: Warp,
    words: np.ndarray,
    counts: tuple[int, int],
    types: tuple[str, ...],
    factors: int,
    ids: tuple[int, ...],
) -> np.ndarray:
    """Return D = (A times its factors) (B times its factors) + C as [register, lane].

    Args:
        w: the warp.
        words: registers of A, B, C, the factors of A and B, and the metadata if A is sparse.
        counts: number of registers of A and B.
        types: of D, A, B, C and the scale factors.
        factors: number of scale factors of a row.
        ids: byte and thread of A, byte and thread of B, and the sparsity selector.
    """
    require_free_order(w.machine, "mma.sync with block scales", types[0])
    words = np.ascontiguousarray(words).view(np.uint32)
    a_count, b_count = counts
    a, b, c, scale_a, scale_b, metadata = np.split(words, np.cumsum((a_count, b_count, 4, 1, 1)))
    byte_a, thread_a, byte_b, thread_b = (_id(value) for value in ids[:4])
    _require_ids((byte_a, byte_b), (thread_a, thread_b), factors)
    left, right = rows_of_a(a, types[1], 2), columns_of_b(b, types[2])
    if len(metadata):
        left = with_zeros(left, metadata[0], _id(ids[4]), types[1])
    lanes_a = scale_a.reshape(8, 4)[:, 2 * thread_a : 2 * thread_a + 2].T.ravel()
    lanes_b = scale_b.reshape(8, 4)[:, thread_b]
    with np.errstate(all="ignore"):
        product = _scaled(left, lanes_a, byte_a, factors, types[4]) @ (
            _scaled(right, lanes_b, byte_b, factors, types[4]).T
        )
        return accumulated(product, c, types[:4])


def _id(value: object) -> int:
    """A selector, which has to be equal in all lanes."""
    lanes = np.unique(np.asarray(value))
    if lanes.size != 1:
        raise HardwareRefusal(f"a selector of mma that differs between lanes: {lanes.tolist()}")
    return int(lanes[0])


def _require_ids(bytes_: tuple[int, int], threads: tuple[int, int], factors: int) -> None:
    """Factors may not cross the end of the 32 bits, and begin at a multiple of their number."""
    if any(byte % factors or byte not in range(4) for byte in bytes_):
        raise HardwareRefusal(f"byte ids {bytes_} of {factors} scale factors")
    if threads[0] not in range(2) or threads[1] not in range(4):
        raise HardwareRefusal(f"thread ids {threads}; limits are 1 of A and 3 of B")


def _scaled(
    matrix: np.ndarray, lanes: np.ndarray, first: int, count: int, type_: str
) -> np.ndarray:
    """Return lines times their scale factors, float64 [line, along K].

    lanes: the word with the factors of each line; each of the `count` parts of a line has one.
    float64 is needed, as the product of two powers of two may exceed f32 while the other factor
    is small.
    """
    codes = np.ascontiguousarray(lanes).view(np.uint8).reshape(-1, 4)[:, first : first + count]
    if type_ == "ue8m0":
        factors = formats.ue8m0_to_f32(codes)
    else:
        factors = formats.e4m3_to_f32(codes & 0x7F)
    blocks = matrix.reshape(len(matrix), count, -1).astype(np.float64)
    return (blocks * factors[:, :, None]).reshape(matrix.shape)
