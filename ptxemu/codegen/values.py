"""The values that flow inside a basic block, and the types that they can have.

A value is either *uniform* (one Python int, float or bool for the whole warp) or *varying* (a numpy
array whose last axis is the 32 lanes). Registers are untyped in PTX; a value knows how its bits are
held right now, and conversion between equally wide types is a node like any other.

Uniform conventions: u16/u32/u64 are non-negative ints below 2^width, s16/s32/s64 are signed ints,
f32/f64 are Python floats holding exactly a value of that format, pred is bool.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ptxemu.errors import UnsupportedPtx
from ptxemu.syntax.tree import TYPE_BITS

DTYPE = {
    "pred": "BOOL",
    "u16": "U16",
    "s16": "I16",
    "u32": "U32",
    "s32": "I32",
    "f32": "F32",
    "u64": "U64",
    "s64": "I64",
    "f64": "F64",
}
WIDTH = {name: TYPE_BITS[name] for name in DTYPE}
_F32, _U32 = struct.Struct("<f"), struct.Struct("<I")
_F64, _U64 = struct.Struct("<d"), struct.Struct("<Q")
UNSIGNED = {16: "u16", 32: "u32", 64: "u64"}
VARYING = "varying!"  # a dependence on something that differs between lanes by nature


@dataclass(eq=False, slots=True)
class Late:
    """A tcgen05.ld that may still be pending when its destination is first used."""

    value: Value
    settled: bool = False


@dataclass(eq=False, slots=True)
class Value:
    """SSA value of a block: type, uniformity, and where the scheduler finds it."""

    type: str
    uniform: bool
    deps: frozenset[str] = frozenset()  # registers it depends on (analysis only)
    const: Any = None  # a Python int, float or bool, where it is known
    node: Node | None = None  # producer, until emitted
    index: int = 0  # which result of the producer
    expr: str | None = None  # Python expression once available
    converted: dict[str, Value] | None = None  # the same bits in other types
    late: Late | None = None  # the pending tcgen05.ld behind it, where that is possible


@dataclass(eq=False)
class Node:
    """Step of a block.

    `pure` nodes are elementwise and may be delayed and grouped; the others keep their order.
    `text` is a format string over the operands. {0} is an operand's expression, and {t0} the
    same as an array scalar of its type. {d0} is the target of result 0, and {rows} all operands
    stacked.
    """

    text: str
    srcs: tuple[Value, ...]
    outs: tuple[Value, ...]
    pure: bool = False
    wide: bool = True  # may be grouped into a matrix operation
    view: bool = False  # has to share memory with its operand, which is yet to be filled
    matrix: bool = False  # results are the rows of one array
    rows: tuple[Value, ...] = ()  # operands that are stacked into one array
    parks: bool = False  # returns None when the warp has to wait
    instr: object = None  # where it comes from, for errors
    emitted: bool = False
    lanes: str = ""  # of a result for one lane by arrays: the same for all lanes
    repeatable: bool = False  # a step that depends on its operands alone and changes nothing
    flow: bool = False  # tells a checker of undefined data; no step of the block itself


def bits_of_float(value: float) -> int:
    """The 32 bits of a Python float that holds an f32."""
    if value != value:  # C's conversion would make a signalling NaN quiet
        bits = bits_of_double(value)
        return bits >> 63 << 31 | 0x7F800000 | (bits >> 29 & 0x7FFFFF or 0x400000)
    return _U32.unpack(_F32.pack(value))[0]


def float_of_bits(bits: int) -> float:
    """The f32 with these bits; a NaN keeps its payload, in the upper bits of the double's."""
    value = _F32.unpack(_U32.pack(bits))[0]
    if value != value:
        return double_of_bits(bits >> 31 << 63 | 0x7FF << 52 | (bits & 0x7FFFFF) << 29)
    return value


def bits_of_double(value: float) -> int:
    return _U64.unpack(_F64.pack(value))[0]


def double_of_bits(bits: int) -> float:
    return _F64.unpack(_U64.pack(bits))[0]


def constant(bits: int, type_: str) -> Value:
    """A constant from its raw bits (two's complement), held in `type_`."""
    width = WIDTH[type_]
    bits &= (1 << width) - 1
    if type_ == "pred":
        return Value(type_, True, const=bool(bits))
    if type_ == "f32":
        return Value(type_, True, const=float_of_bits(bits))
    if type_ == "f64":
        return Value(type_, True, const=double_of_bits(bits))
    if type_[0] == "s" and bits >> (width - 1):
        bits -= 1 << width
    return Value(type_, True, const=bits)


def literal(value: Value) -> str:
    """The Python literal of a constant."""
    number = value.const
    if isinstance(number, float):
        if math.isnan(number):
            bits = (bits_of_float if value.type == "f32" else bits_of_double)(number)
            return f"bits_{value.type}({bits:#x})"
        if math.isinf(number):
            return "INF" if number > 0 else "(-INF)"
    text = repr(number)
    return f"({text})" if text.startswith("-") else text


def convert_templates(source: str, target: str) -> tuple[str, str]:
    """Return (scalar, vector) templates that reinterpret the bits of an equally wide type."""
    width = WIDTH[source]
    vector = f"{{0}}.view({DTYPE[target]})"
    if target in ("f32", "f64"):
        masked = "{0}" if source[0] == "u" else f"({{0}} & {(1 << width) - 1})"
        return f"{'bits_f32' if width == 32 else 'bits_f64'}({masked})", vector
    if source in ("f32", "f64"):
        raw = f"{'f32_bits' if width == 32 else 'f64_bits'}({{0}})"
        return (raw if target[0] == "u" else f"signed{width}({raw})"), vector
    if target[0] == "u":
        return f"({{0}} & {(1 << width) - 1})", vector
    return f"signed{width}({{0}})", vector


# How each virtual register is kept between blocks: its type, its slots, and whether it may be
# scalar.
#
# PTX registers are untyped, so the analysis counts how each one is used and keeps it in the form
# that needs fewest conversions: b32 as u32 or f32, b64 as u64 or as a pair of 32-bit halves (packed
# f32x2). Any choice is correct. A register that depends on the lane by nature is always an array;
# any other is a Python scalar until a write under a partial mask makes it differ between lanes.


class RegisterFile:
    """The registers of one entry. Filled by the analysis pass, then read-only after `settle()`."""

    # What `ptxemu.plain` keeps of one that is settled.
    PLAIN = (
        *("_width", "_float_votes", "_pair_votes", "_alias", "_deps", "_varying", "_slots"),
        *("slot_count", "frozen"),
    )

    def __init__(self, declared: dict[str, str]) -> None:
        self._width = {
            name: max(TYPE_BITS[type_], 16) if type_ != "pred" else 1
            for name, type_ in declared.items()
        }
        self._float_votes: dict[str, int] = defaultdict(int)
        self._pair_votes: dict[str, int] = defaultdict(int)
        self._alias: dict[str, str] = {}
        self._deps: dict[str, set[str]] = defaultdict(set)
        self._varying: set[str] = set()
        self._slots: dict[str, tuple[tuple[int, str], ...]] = {}
        self.slot_count = 0
        self.frozen = False

    def width(self, name: str) -> int:
        return self._width[name]

    @cached_property
    def wide(self) -> frozenset[str]:
        """Registers of 64 bits and more."""
        return frozenset(name for name, width in self._width.items() if width >= 64)

    # -- recorded by the analysis pass ------------------------------------------------------

    def vote(self, name: str, type_: str, count: int = 1) -> None:
        """An operand asked for this register as `type_`."""
        if self.frozen:
            return
        if type_ == "pair":
            self._pair_votes[name] += count
        elif type_ in ("f32", "f64"):
            self._float_votes[name] += count
        else:
            self._float_votes[name] -= count
            self._pair_votes[name] -= count

    def define(self, name: str, value: Value | tuple[Value, Value]) -> None:
        if self.frozen:
            return
        for part in value if isinstance(value, tuple) else (value,):
            self._deps[name] |= part.deps
            if part.type in ("f32", "f64"):
                self._float_votes[name] += 1

    def alias(self, target: str, source: str) -> None:
        """A move: both registers should be kept alike."""
        if not self.frozen and self._width[target] == self._width[source]:
            a, b = self.root(target), self.root(source)
            if a != b:
                self._alias[a] = b

    def root(self, name: str) -> str:
        """Return the name that represents all registers connected with `name` by moves."""
        while name in self._alias:
            name = self._alias[name]
        return name

    def vary(self, names: set[str]) -> None:
        """Registers whose contents differ between lanes by nature: those of recursive functions."""
        for name in names:
            self._deps[name].add(VARYING)

    # -- decided once -----------------------------------------------------------------------

    def settle(self) -> None:
        """Decide kinds, slots and uniformity from what was recorded."""
        self.frozen = True
        floats: dict[str, int] = defaultdict(int)
        pairs: dict[str, int] = defaultdict(int)
        for name in self._width:
            floats[self.root(name)] += self._float_votes[name]
            pairs[self.root(name)] += self._pair_votes[name]
        for name, width in self._width.items():
            root = self.root(name)
            self._slots[name] = self._layout(name, width, floats[root], pairs[root])
        self._spread_varying()
        self._float_votes, self._pair_votes, self._deps = {}, {}, {}  # they have done their duty

    def _layout(
        self, name: str, width: int, floats: int, pairs: int
    ) -> tuple[tuple[int, str], ...]:
        types: tuple[str, ...]
        if width == 128:
            types = ("u64", "u64")
        elif width == 64 and pairs > 0:
            types = ("f32", "f32")
        elif width in (32, 64) and floats > 0:
            types = (f"f{width}",)
        elif width == 1:
            types = ("pred",)
        else:
            types = (f"u{width}",)
        first = self.slot_count
        self.slot_count += len(types)
        return tuple((first + k, type_) for k, type_ in enumerate(types))

    def put_first(self, names: set[str]) -> None:
        """Give these registers the lowest slots."""
        self.slot_count = 0
        for name in sorted(self._slots, key=lambda name: name not in names):
            first, types = self.slot_count, [type_ for _, type_ in self._slots[name]]
            self._slots[name] = tuple((first + k, type_) for k, type_ in enumerate(types))
            self.slot_count += len(types)

    def _spread_varying(self) -> None:
        """Registers that depend, through any definition, on what differs between lanes."""
        users: dict[str, list[str]] = defaultdict(list)
        for name, deps in self._deps.items():
            for dep in deps:
                users[dep].append(name)
        pending = [VARYING]
        while pending:
            for user in users.get(pending.pop(), ()):
                if user not in self._varying:
                    self._varying.add(user)
                    pending.append(user)

    def slots(self, name: str) -> tuple[tuple[int, str], ...]:
        if not self.frozen:
            width = self._width.get(name)
            if width is None:
                raise UnsupportedPtx(f"undeclared register {name}")
            if width == 128:
                return ((0, "u64"), (0, "u64"))
            return ((0, "pred" if width == 1 else f"u{width}"),)
        return self._slots[name]

    def always_varying(self, name: str) -> bool:
        return name in self._varying
