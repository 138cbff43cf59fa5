"""Building blocks of the primitives: types, literals, and the instructions of LLVM IR."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

LANES = 32
BITS = {
    "BOOL": 8,
    "U8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}
NUMPY = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
}
INTEGERS = ("U16", "I16", "U32", "I32", "U64", "I64")
WORD = 32  # bytes of an instruction
ELEMENT = {8: "i8", 16: "i16", 32: "i32", 64: "i64"}
NAN = 0x7FFFFFFF  # the canonical ones
NAN_16 = 0x7FFF


def element(dtype: str) -> str:
    return {"F32": "float", "F64": "double", "BOOL": "i1"}.get(dtype) or ELEMENT[BITS[dtype]]


def vector(dtype: str) -> str:
    return f"<{LANES} x {element(dtype)}>"


def row_align(dtype: str) -> int:
    return min(LANES * BITS[dtype] // 8, 64)


def row_bytes(dtype: str) -> int:
    """Return the bytes of 32 lanes in a file or scratch, a multiple of all alignments."""
    return max(LANES * BITS[dtype] // 8, 64)


def f32_literal(bits: int) -> str:
    """LLVM writes a float as the hex of the double with its value; a NaN keeps its payload."""
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    if value != value:
        return f"0x{bits >> 31 << 63 | 0x7FF << 52 | (bits & 0x7FFFFF) << 29:016X}"
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def f32(value: float) -> str:
    return f32_literal(struct.unpack("<I", struct.pack("<f", value))[0])


def f64(value: float) -> str:
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


@dataclass
class Body:
    """Instructions of one function, in static single assignment."""

    lines: list[str] = field(default_factory=list)
    declared: set[str] = field(default_factory=set)
    count: int = 0
    block: str = "entry"  # the one that is written to

    def do(self, text: str) -> str:
        self.count += 1
        self.lines.append(f"  %v{self.count} = {text}")
        return f"%v{self.count}"

    def field(self, offset: int, type_: str = "i32") -> str:
        """A field of the instruction."""
        where = self.do(f"getelementptr i8, ptr %ip, i64 {offset}")
        return self.do(f"load {type_}, ptr {where}")

    def place(self, number: int) -> str:
        """The address of the result (0) or of an operand (1, 2, 3)."""
        offset = self.field(8 + 4 * number)
        shared = self.do(f"icmp slt i32 {offset}, 0")
        base = self.do(f"select i1 {shared}, ptr %scratch, ptr %file")
        low = self.do(f"and i32 {offset}, 2147483647")
        return self.do(f"getelementptr i8, ptr {base}, i32 {low}")

    def context(self, number: int) -> str:
        """A field of 8 bytes of the context."""
        where = self.do(f"getelementptr i8, ptr %context, i64 {8 * number}")
        return self.do(f"load i64, ptr {where}")

    def leave_if(self, condition: str) -> None:
        """End the program here with 1."""
        self.count += 1
        leave, stay = f"leave{self.count}", f"stay{self.count}"
        self.lines += [
            f"  br i1 {condition}, label %{leave}, label %{stay}",
            f"{leave}:",
            "  ret i64 1",
            f"{stay}:",
        ]
        self.block = stay

    @contextmanager
    def loop(self, times: int) -> Iterator[str]:
        """Write a loop around the body, which gets the number of the pass."""
        self.count += 1
        body, again, after = (f"{name}{self.count}" for name in ("body", "again", "after"))
        passed, following = f"%k{self.count}", f"%n{self.count}"
        start, self.block = self.block, body
        self.lines += [
            f"  br label %{body}",
            f"{body}:",
            f"  {passed} = phi i64 [ 0, %{start} ], [ {following}, %{again} ]",
        ]
        yield passed
        more = f"%m{passed[2:]}"
        self.lines += [
            f"  br label %{again}",
            f"{again}:",
            f"  {following} = add nuw i64 {passed}, 1",
            f"  {more} = icmp ult i64 {following}, {times}",
            f"  br i1 {more}, label %{body}, label %{after}",
            f"{after}:",
        ]
        self.block = after

    @contextmanager
    def only_if(self, condition: str) -> Iterator[None]:
        """Write a branch around the body, which runs if the condition holds."""
        self.count += 1
        yes, after = f"yes{self.count}", f"after{self.count}"
        self.lines += [f"  br i1 {condition}, label %{yes}, label %{after}", f"{yes}:"]
        yield
        self.lines += [f"  br label %{after}", f"{after}:"]
        self.block = after

    def reduce(self, operation: str, type_: str, value: str) -> str:
        """Reduce all lanes to one element."""
        name, lanes = f"llvm.vector.reduce.{operation}.v32{type_}", f"<{LANES} x {type_}>"
        self.declared.add(f"declare {type_} @{name}({lanes})")
        return self.do(f"call {type_} @{name}({lanes} {value})")

    def load(self, pointer: str, dtype: str) -> str:
        if dtype == "BOOL":
            raw = self.do(f"load <{LANES} x i8>, ptr {pointer}, align 32")
            return self.do(f"icmp ne <{LANES} x i8> {raw}, zeroinitializer")
        return self.do(f"load {vector(dtype)}, ptr {pointer}, align {row_align(dtype)}")

    def gather(self, where: str, dtype: str) -> str:
        """An element from each of 32 addresses."""
        type_, mask = vector(dtype), self.splat("true", "BOOL")
        short = f"{'f' if dtype[0] == 'F' else 'i'}{BITS[dtype]}"
        name = f"llvm.masked.gather.v32{short}.v32p0"
        self.declared.add(f"declare {type_} @{name}(<32 x ptr>, i32, <32 x i1>, {type_})")
        operands = f"<32 x ptr> {where}, i32 {BITS[dtype] // 8}, <32 x i1> {mask}, {type_} poison"
        return self.do(f"call {type_} @{name}({operands})")

    def store(self, value: str, pointer: str, dtype: str) -> None:
        type_ = vector(dtype)
        if dtype == "BOOL":
            value, type_ = self.do(f"zext {type_} {value} to <{LANES} x i8>"), f"<{LANES} x i8>"
        self.lines.append(f"  store {type_} {value}, ptr {pointer}, align {row_align(dtype)}")

    def call(self, name: str, type_: str, *values: str) -> str:
        self.declared.add(f"declare {type_} @{name}({', '.join([type_] * len(values))})")
        arguments = ", ".join(f"{type_} {value}" for value in values)
        return self.do(f"call {type_} @{name}({arguments})")

    def splat(self, literal: str, dtype: str) -> str:
        if literal == "0":
            return "zeroinitializer"
        return "<" + ", ".join([f"{element(dtype)} {literal}"] * LANES) + ">"

    def cast(self, value: str, source: str, target: str) -> str:
        """Cast to another type with the same bits."""
        if element(source) == element(target):
            return value
        return self.do(f"bitcast {vector(source)} {value} to {vector(target)}")

    def select(self, mask: str, yes: str, no: str, dtype: str) -> str:
        wide = f"<{LANES} x i1>"
        return self.do(f"select {wide} {mask}, {vector(dtype)} {yes}, {vector(dtype)} {no}")

    def unordered(self, value: str, dtype: str = "F32") -> str:
        return self.do(f"fcmp uno {vector(dtype)} {value}, {value}")

    def canonical(self, value: str) -> str:
        """numerics.formats.canonical_nan_f32"""
        nan = self.splat(f32_literal(NAN), "F32")
        return self.select(self.unordered(value), nan, value, "F32")

    def extreme(self, which: str, x: str, y: str, *, nan: bool) -> str:
        """min or max with -0 < +0; of a number and a NaN the number, or the canonical NaN."""
        type_ = vector("F32")
        relation, merge = ("olt", "or") if which == "min" else ("ogt", "and")
        first = self.do(f"fcmp {relation} {type_} {x}, {y}")
        out = self.select(first, x, y, "F32")
        left, right = self.cast(x, "F32", "U32"), self.cast(y, "F32", "U32")
        zeros = self.do(f"{merge} {vector('U32')} {left}, {right}")
        same = self.do(f"fcmp oeq {type_} {x}, {y}")
        out = self.select(same, self.cast(zeros, "U32", "F32"), out, "F32")
        if nan:
            bad = self.do(f"fcmp uno {type_} {x}, {y}")
            return self.select(bad, self.splat(f32_literal(NAN), "F32"), out, "F32")
        out = self.select(self.unordered(x), y, out, "F32")
        return self.select(self.unordered(y), x, out, "F32")

    def flush(self, value: str) -> str:
        """numerics.formats.flush_f32"""
        size = self.call("llvm.fabs.v32f32", vector("F32"), value)
        least = self.splat(f32(2.0**-126), "F32")
        small = self.do(f"fcmp olt {vector('F32')} {size}, {least}")
        zero = self.call("llvm.copysign.v32f32", vector("F32"), "zeroinitializer", value)
        return self.select(small, zero, value, "F32")


@dataclass(frozen=True)
class Primitive:
    """Function from the types of its operands to a result; `build` maps operand values to the
    result's."""

    name: str
    types: tuple[str, ...]
    result: str
    build: Callable[..., str]


Key = tuple[str, tuple[str, ...]]  # a name and the types of the operands
TABLE: dict[Key, Primitive] = {}


def add(name: str, types: tuple[str, ...], result: str, build: Callable[..., str]) -> None:
    TABLE[name, types] = Primitive(name, types, result, build)


TABLES: dict[str, np.ndarray] = {}  # constants that primitives read


def lookup(b: Body, values: np.ndarray, name: str, index: str) -> str:
    """Elements of a constant table."""
    dtype = {"float32": "F32", "float64": "F64", "uint32": "U32"}[str(values.dtype)]
    where = b.do(f"getelementptr {element(dtype)}, ptr @{name}, <{LANES} x i32> {index}")
    TABLES[name] = values
    return b.gather(where, dtype)
