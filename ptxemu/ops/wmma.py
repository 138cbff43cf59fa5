"""wmma.load, wmma.mma and wmma.store, which nvcc's <mma.h> emits. PTX ISA "Warp Level Matrix
Instructions: wmma".

The manual leaves open which element a register holds. Here fragments are those of mma.sync: D and C
one after the other for each eight columns, B likewise, and A for all its rows. Registers beyond
(f16 has more than its elements need) repeat the first ones and are not read by wmma.mma.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value, constant
from ptxemu.machine import access
from ptxemu.machine.state import Warp
from ptxemu.numerics import PerLane
from ptxemu.ops.load_store import address_value, space_of
from ptxemu.ops.warp_mma import BITS, COLUMNS, LANES, refused, registers
from ptxemu.syntax.tree import Instr

_ALL = "m16n16k16 m32n8k16 m8n32k16"
# types of A and B: (shapes, types of D and C)
_SHAPES = {
    "f16": (_ALL, "f16 f32"),
    "bf16": (_ALL, "f32"),
    "s8": (_ALL, "s32"),
    "u8": (_ALL, "s32"),
    "s4": ("m8n8k32", "s32"),
    "u4": ("m8n8k32", "s32"),
    "b1": ("m8n8k128", "s32"),
    "tf32": ("m16n16k8", "f32"),
    "f64": ("m8n8k4", "f64"),
}
_SOME = "m16n16k8 m8n8k4 m8n8k32 m8n8k128"
_F16_REGISTERS = 8  # of A and of B, whatever the shape
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)$")
_LAYOUTS = "row col"
_DENSE = {"a": "row", "b": "col"}  # layouts of types below a byte: neighbours along K
_WHERE = "aligned global shared shared::cta"
_ROUNDINGS = "rn rz rm rp"


@dataclass(frozen=True)
class Fragment:
    """One matrix of a shape: which ("a", "b" or "c", which is D, too), its type, and m, n, k."""

    which: str
    type: str
    shape: tuple[int, int, int]

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns."""
        m, n, k = self.shape
        return {"a": (m, k), "b": (k, n), "c": (m, n)}[self.which]

    @property
    def needed(self) -> int:
        """Registers that hold each element once."""
        rows, columns = self.size
        return registers(self.type, rows * columns)

    @property
    def registers(self) -> int:
        """Registers of the instruction."""
        return _F16_REGISTERS if self.type == "f16" and self.which != "c" else self.needed


def shape_of(i: Instr) -> tuple[int, int, int]:
    """Return m, n and k; UnsupportedPtx unless the opcode names one shape."""
    found = [match for part in i.parts if (match := _SHAPE.match(part))]
    if len(found) != 1:
        raise refused(i)
    m, n, k = map(int, found[0].groups())
    return m, n, k


def _require(i: Instr, kind: str, accumulators: tuple[str, ...]) -> None:
    """The manual has this shape with these types."""
    shapes, types = _SHAPES.get(kind, ("", ""))
    if i.parts[[bool(_SHAPE.match(p)) for p in i.parts].index(True)] not in shapes.split():
        raise refused(i)
    if not set(accumulators) <= set(types.split()):
        raise refused(i)


@cache
def places(fragment: Fragment) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns [register, element of it, lane] of the elements."""
    rows, columns = fragment.size
    per = max(32 // BITS[fragment.type], 1)
    numbers = np.arange(rows * columns).reshape(rows, columns)
    if fragment.which == "c":  # [8 rows, g, 8 columns, i, element]
        parts = numbers.reshape(-1, LANES[0], columns // COLUMNS, LANES[1], 2)
        held = parts.transpose(2, 0, 4, 1, 3).reshape(-1, per, 32)
    elif fragment.which == "a":  # [8 rows, g, columns of a register, i, element]
        parts = numbers.reshape(-1, LANES[0], columns // (4 * per), LANES[1], per)
        held = parts.transpose(2, 0, 4, 1, 3).reshape(-1, per, 32)
    else:
        parts = numbers.T.reshape(-1, LANES[0], rows // (4 * per), LANES[1], per)
        held = parts.transpose(0, 2, 4, 1, 3).reshape(-1, per, 32)
    return held // columns, held % columns


# -- loads and stores ------------------------------------------------------------------------


def _memory(c: Lower, i: Instr, f: Match, which: str, given: int) -> tuple[Fragment, str]:
    """The fragment, and the runtime's description of it; given: registers of the instruction."""
    fragment = Fragment(which, f.type, shape_of(i))
    kinds = [kind for kind, (_, results) in _SHAPES.items() if f.type in results.split()]
    shapes = {shape for kind in kinds for shape in _SHAPES[kind][0].split()}
    if which != "c":
        _require(i, f.type, ())
    elif "m{}n{}k{}".format(*fragment.shape) not in shapes:
        raise refused(i)
    layout = f.pick("row", "col")
    if given != fragment.registers or not layout or "aligned" not in f.flags:
        raise refused(i)
    if BITS[f.type] < 8 and layout != _DENSE[which]:
        raise refused(i)
    what = f"({which!r}, {f.type!r}, {fragment.shape}, {layout!r}, '{space_of(f)}')"
    return fragment, what


def _stride(c: Lower, fragment: Fragment, f: Match, given: tuple[Any, ...]) -> Value:
    """Elements from one row (of layout col: column) to the next."""
    if given:
        return c.src(given[0], "u32")
    rows, columns = fragment.size
    return constant(columns if "row" in f.flags else rows, "u32")


def _load(which: str, c: Lower, i: Instr, f: Match) -> list[Value]:
    targets = c.each(i.operands[0])
    fragment, what = _memory(c, i, f, which, len(targets))
    address = address_value(c, i.operands[1], space_of(f))
    stride = _stride(c, fragment, f, i.operands[2:])
    word = "u64" if f.type == "f64" else "u32"
    return c.effect(
        f"wmma_load(w, {what}, {{0}}, {{1}}, <m>)",
        address,
        stride,
        results=[(word, False)] * len(targets),
        matrix=True,
    )


for _which, _kinds in (
    ("a", "f16 bf16 s8 u8 s4 u4 b1 tf32 f64"),
    ("b", "f16 bf16 s8 u8 s4 u4 b1 tf32 f64"),
    ("c", "f16 f32 s32 f64"),
):

    @op(
        f"wmma.load.{_which}.sync",
        types=_kinds,
        flags=f"{_WHERE} {_LAYOUTS} {_ALL} {_SOME}",
        section="wmma.load",
    )
    def load(c: Lower, i: Instr, f: Match, which: str = _which) -> list[Value]:
        """A fragment from memory, whose address and stride all lanes have alike."""
        return _load(which, c, i, f)


@op(
    "wmma.store.d.sync",
    types="f16 f32 s32 f64",
    flags=f"{_WHERE} {_LAYOUTS} {_ALL} {_SOME}",
    section="wmma.store",
)
def store(c: Lower, i: Instr, f: Match) -> None:
    sources = c.each(i.operands[1])
    fragment, what = _memory(c, i, f, "c", len(sources))
    address = address_value(c, i.operands[0], space_of(f))
    stride = _stride(c, fragment, f, i.operands[2:])
    rows = tuple(c.srcs(sources, "u64" if f.type == "f64" else "u32"))
    c.effect(f"wmma_store(w, {what}, {{0}}, {{1}}, {{rows}}, <m>)", address, stride, rows=rows)


What = tuple[str, str, tuple[int, int, int], str, str]  # which, type, shape, layout, space


def _addresses(
    w: Warp, what: What, address: PerLane, stride: PerLane
) -> tuple[np.ndarray, Fragment]:
    """Return an address for each [register, piece of it, lane]."""
    which, type_, shape, layout, space = what
    fragment = Fragment(which, type_, shape)
    base, step = w.agreed(address, "the address of wmma"), w.agreed(stride, "the stride of wmma")
    rows, columns = places(fragment)
    offsets = rows * step + columns if layout == "row" else columns * step + rows
    kind = np.uint32 if space in ("shared", "cluster") else np.uint64
    if BITS[type_] < 8:  # a register is one piece of memory
        offsets = offsets[:, :1]
    return (offsets * BITS[type_] // 8 + base).astype(kind), fragment


@runtime
def wmma_load(
    w: Warp, what: What, address: PerLane, stride: PerLane, mask: np.ndarray | None
) -> np.ndarray:
    """Return the registers of a fragment, [register, lane]."""
    where, fragment = _addresses(w, what, address, stride)
    nbytes = BITS[fragment.type] // 8 or 4
    word = np.uint64 if nbytes == 8 else np.uint32
    out = np.zeros((where.shape[0], 32), word)
    for register, parts in enumerate(where):
        for k, each in enumerate(parts):
            loaded = access.load_vector(w, what[4], each, nbytes, 1, mask)[0]
            out[register] |= loaded.astype(word) << word(8 * nbytes * k)
    return np.tile(out, (-(-fragment.registers // len(out)), 1))[: fragment.registers]


@runtime
def wmma_store(
    w: Warp,
    what: What,
    address: PerLane,
    stride: PerLane,
    registers_: np.ndarray,
    mask: np.ndarray | None,
) -> None:
    """Store the registers of D, [register, lane]."""
    where, fragment = _addresses(w, what, address, stride)
    nbytes = BITS[fragment.type] // 8
    for parts, held in zip(where, np.ascontiguousarray(registers_), strict=True):
        for k, each in enumerate(parts):
            value = (held >> held.dtype.type(8 * nbytes * k)).astype(f"u{nbytes}")
            access.store_vector(w, what[4], each, nbytes, value[None], mask)


# -- products --------------------------------------------------------------------------------


def _types(i: Instr, f: Match) -> tuple[str, str, str, str]:
    """Types of D, A, B and C; the opcode of f16 names D and C alone."""
    named = [part for part in i.parts if part in BITS]
    if len(named) == 2:
        return named[0], "f16", "f16", named[1]
    if len(named) != 4:
        raise refused(i)
    return named[0], named[1], named[2], named[3]


@op(
    "wmma.mma.sync",
    flags=f"aligned {_LAYOUTS} {_ALL} {_SOME} satfinite {_ROUNDINGS} "
    "f16 bf16 tf32 f32 f64 s8 u8 s4 u4 s32",
    section="wmma.mma",
)
@op(
    "wmma.mma.xor.popc.sync wmma.mma.and.popc.sync",
    flags=f"aligned {_LAYOUTS} m8n8k128 b1 s32",
    section="wmma.mma",
)
def multiply(c: Lower, i: Instr, f: Match) -> list[Value]:
    """D = A B + C, eight columns at a time; the layouts of A and B have done their duty."""
    d_type, a_type, b_type, c_type = types = _types(i, f)
    _require(i, a_type, (d_type, c_type))
    if a_type != b_type or "aligned" not in f.flags:
        raise refused(i)
    m, n, _ = shape = shape_of(i)
    a, b, before = (
        Fragment(which, kind, shape) for which, kind in zip("abc", types[1:], strict=True)
    )
    after = Fragment("c", d_type, shape)
    lists = [c.each(operand) for operand in i.operands]
    if [len(each) for each in lists] != [x.registers for x in (after, a, b, before)]:
        raise refused(i)
    word = "u64" if d_type == "f64" else "u32"
    left, right, sums = (c.srcs(each, word) for each in lists[1:])
    groups = n // COLUMNS
    if BITS[a_type] < 8 and ".row.col." not in i.opcode:
        raise refused(i)
    how = f.pick("satfinite", "rz", "rm", "rp", default="rn" if d_type == "f64" else "")
    how = next((part for part in i.parts if part in ("xor", "and")), how)
    name = "fragments_multiply_f64" if d_type == "f64" else "fragments_multiply"
    out: list[Value] = []
    for group in range(groups):
        columns = _part(right[: b.needed], group, groups)
        rows = (*left[: a.needed], *columns, *_part(sums, group, groups))
        counts = (a.needed, len(columns), m // COLUMNS)
        out += c.effect(
            f"{name}(w, {{rows}}, {counts}, {types!r}, {how!r})",
            results=[("u32" if d_type == "f16" else d_type, False)] * (after.needed // groups),
            matrix=True,
            rows=tuple(rows),
        )
    return out


def _part(values: list[Value], group: int, groups: int) -> list[Value]:
    size = len(values) // groups
    return values[group * size : (group + 1) * size]
