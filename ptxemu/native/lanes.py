"""Primitives of what the lanes of a warp do together: shuffles, reductions, masks."""

from __future__ import annotations

from dataclasses import dataclass

from ptxemu.native.ir import LANES, NAN, Body, Key, f32_literal, vector

_WORDS = vector("U32")
_MODES = ("up", "down", "bfly", "idx")
_INTEGER = {"add": "add", "and": "and", "or": "or", "xor": "xor", "min": "min", "max": "max"}


def _word(number: int) -> str:
    return "<" + ", ".join([f"i32 {number}"] * LANES) + ">"


def _numbers() -> str:
    return "<" + ", ".join(f"i32 {lane}" for lane in range(LANES)) + ">"


@dataclass(frozen=True)
class Shuffle:
    """ops.warp.shuffle_lanes. Operands: the result, the value, the lane, the clamp, and whether the
    source was in range."""

    mode: str

    @property
    def key(self) -> Key:
        return f"shuffle_lanes {self.mode}", ()

    def build(self, b: Body) -> None:
        lane, clamp = (b.load(b.place(k), "U32") for k in (2, 3))
        step, bound = (b.do(f"and {_WORDS} {x}, {_word(31)}") for x in (lane, clamp))
        segment = b.do(f"lshr {_WORDS} {clamp}, {_word(8)}")
        segment = b.do(f"and {_WORDS} {segment}, {_word(31)}")
        outside = b.do(f"xor {_WORDS} {segment}, {_word(-1)}")
        low = b.do(f"and {_WORDS} {segment}, {_numbers()}")
        high = b.do(f"or {_WORDS} {low}, {b.do(f'and {_WORDS} {bound}, {outside}')}")
        if self.mode == "idx":
            source = b.do(f"or {_WORDS} {low}, {b.do(f'and {_WORDS} {step}, {outside}')}")
        else:
            operation = {"up": "sub", "down": "add", "bfly": "xor"}[self.mode]
            source = b.do(f"{operation} {_WORDS} {_numbers()}, {step}")
        relation = "sge" if self.mode == "up" else "sle"
        valid = b.do(f"icmp {relation} {_WORDS} {source}, {high}")
        source = b.select(valid, source, _numbers(), "U32")
        source = b.do(f"and {_WORDS} {source}, {_word(31)}")
        where = b.do(f"getelementptr i32, ptr {b.place(1)}, {_WORDS} {source}")
        found = b.gather(where, "U32")
        b.store(found, b.place(0), "U32")
        b.store(valid, b.place(4), "BOOL")


@dataclass(frozen=True)
class Reduction:
    """ops.warp.reduce_lanes of a value that differs between lanes. Operands: a cell for the result,
    the value, the lanes that take part."""

    mode: str
    dtype: str
    absolute: bool = False
    nan: bool = False

    @property
    def key(self) -> Key:
        return f"reduce_lanes {self.mode} {self.absolute} {self.nan}", (self.dtype,)

    def build(self, b: Body) -> None:
        value, mask = b.load(b.place(1), self.dtype), b.load(b.place(2), "BOOL")
        cell = self._float(b, value, mask) if self.dtype == "F32" else self._integer(b, value, mask)
        b.lines.append(f"  store {cell}, ptr {b.place(0)}")

    def _integer(self, b: Body, value: str, mask: str) -> str:
        signed, mode = self.dtype == "I32", self.mode
        least, most = (-(2**31), 2**31 - 1) if signed else (0, -1)
        neutral = {"and": -1, "min": most, "max": least}.get(mode, 0)
        value = b.select(mask, value, _word(neutral), "U32")
        operation = f"{'s' if signed else 'u'}{mode}" if mode in ("min", "max") else mode
        out = b.reduce(operation, "i32", value)
        widened = "sext" if signed else "zext"
        return f"i64 {b.do(f'{widened} i32 {out} to i64')}"

    def _float(self, b: Body, value: str, mask: str) -> str:
        """Pairs, then pairs of pairs: no rounding, so the order is free."""
        floats = vector("F32")
        if self.absolute:
            value = b.call("llvm.fabs.v32f32", floats, value)
        infinity = 0x7F800000 if self.mode == "min" else 0xFF800000
        neutral = b.splat(f32_literal(infinity if self.nan else NAN), "F32")
        value = b.select(mask, value, neutral, "F32")
        for step in (16, 8, 4, 2, 1):
            order = ", ".join(f"i32 {lane ^ step}" for lane in range(LANES))
            other = b.do(f"shufflevector {floats} {value}, {floats} poison, <32 x i32> <{order}>")
            value = b.extreme(self.mode, value, other, nan=self.nan)
        one = b.do(f"extractelement {floats} {b.canonical(value)}, i32 0")
        return f"double {b.do(f'fpext float {one} to double')}"


@dataclass(frozen=True)
class Ballot:
    """A predicate to its 32 bits, in a cell."""

    key: Key = ("ballot", ("BOOL",))

    def build(self, b: Body) -> None:
        bits = b.do(f"bitcast <{LANES} x i1> {b.load(b.place(1), 'BOOL')} to i32")
        b.lines.append(f"  store i64 {b.do(f'zext i32 {bits} to i64')}, ptr {b.place(0)}")


@dataclass(frozen=True)
class Lanes:
    """The 32 bits in a cell to a predicate."""

    key: Key = ("lanes", ("BOOL",))

    def build(self, b: Body) -> None:
        bits = b.do(f"trunc i64 {b.do(f'load i64, ptr {b.place(1)}')} to i32")
        b.store(b.do(f"bitcast i32 {bits} to <{LANES} x i1>"), b.place(0), "BOOL")


OPERATIONS: tuple[Shuffle | Reduction | Ballot | Lanes, ...] = (
    Ballot(),
    Lanes(),
    *(Shuffle(mode) for mode in _MODES),
    *(Reduction(mode, dtype) for mode in _INTEGER for dtype in ("U32", "I32")),
    *(
        Reduction(mode, "F32", absolute, nan)
        for mode in ("min", "max")
        for absolute in (False, True)
        for nan in (False, True)
    ),
)
