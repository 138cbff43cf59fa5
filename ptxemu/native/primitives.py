"""The primitives as LLVM IR: one function per operation on 32 lanes.

A primitive is one instruction of a threaded program: 32 bytes with the address of its function,
the places of its result and up to three operands (`Word`), and an immediate. It ends with a tail
call to the function of the next one. A place is an offset in bytes into the registers of a warp, or,
where it is negative, into the scratch of the program (its low 31 bits).
Every one computes the bits of the numpy function that it is named after; tests compare them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ptxemu.numerics import approx

LANES = 32
BITS = {
    "BOOL": 8,
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
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
}
WORD = 32  # bytes of an instruction
SIGNATURE = "i64 (ptr, ptr, ptr, ptr)"
_ELEMENT = {8: "i8", 16: "i16", 32: "i32", 64: "i64"}
_NAN = 0x7FFFFFFF


def element(dtype: str) -> str:
    return {"F32": "float", "F64": "double", "BOOL": "i1"}.get(dtype) or _ELEMENT[BITS[dtype]]


def vector(dtype: str) -> str:
    return f"<{LANES} x {element(dtype)}>"


def f32_literal(bits: int) -> str:
    """LLVM writes a float as the hex of the double with its value; a NaN keeps its payload."""
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    if value != value:
        return f"0x{bits >> 31 << 63 | 0x7FF << 52 | (bits & 0x7FFFFF) << 29:016X}"
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def _f32(value: float) -> str:
    return f32_literal(struct.unpack("<I", struct.pack("<f", value))[0])


def _f64(value: float) -> str:
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


@dataclass
class Body:
    """Instructions of one function, in static single assignment."""

    lines: list[str] = field(default_factory=list)
    declared: set[str] = field(default_factory=set)
    count: int = 0

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

    def load(self, pointer: str, dtype: str) -> str:
        if dtype == "BOOL":
            raw = self.do(f"load <{LANES} x i8>, ptr {pointer}, align 32")
            return self.do(f"icmp ne <{LANES} x i8> {raw}, zeroinitializer")
        return self.do(f"load {vector(dtype)}, ptr {pointer}, align 64")

    def store(self, value: str, pointer: str, dtype: str) -> None:
        type_, align = vector(dtype), 64
        if dtype == "BOOL":
            value, type_ = self.do(f"zext {type_} {value} to <{LANES} x i8>"), f"<{LANES} x i8>"
            align = 32
        self.lines.append(f"  store {type_} {value}, ptr {pointer}, align {align}")

    def call(self, name: str, type_: str, *values: str, extra: str = "") -> str:
        self.declared.add(f"declare {type_} @{name}({', '.join([type_] * len(values))}{extra and ', ' + extra.split()[0]})")
        arguments = ", ".join(f"{type_} {value}" for value in values)
        return self.do(f"call {type_} @{name}({arguments}{extra and ', ' + extra})")

    def splat(self, literal: str, dtype: str) -> str:
        if literal == "0":
            return "zeroinitializer"
        return "<" + ", ".join([f"{element(dtype)} {literal}"] * LANES) + ">"

    def cast(self, value: str, source: str, target: str) -> str:
        """The same bits."""
        if element(source) == element(target):
            return value
        return self.do(f"bitcast {vector(source)} {value} to {vector(target)}")

    def select(self, mask: str, yes: str, no: str, dtype: str) -> str:
        wide = f"<{LANES} x i1>"
        return self.do(f"select {wide} {mask}, {vector(dtype)} {yes}, {vector(dtype)} {no}")

    def unordered(self, value: str, dtype: str = "F32") -> str:
        return self.do(f"fcmp uno {vector(dtype)} {value}, {value}")

    def canonical(self, value: str) -> str:
        """numerics.rounding.canonical_nan_f32"""
        nan = self.splat(f32_literal(_NAN), "F32")
        return self.select(self.unordered(value), nan, value, "F32")

    def flush(self, value: str) -> str:
        """numerics.rounding.flush_f32"""
        size = self.call("llvm.fabs.v32f32", vector("F32"), value)
        least = self.splat(_f32(2.0**-126), "F32")
        small = self.do(f"fcmp olt {vector('F32')} {size}, {least}")
        zero = self.call("llvm.copysign.v32f32", vector("F32"), "zeroinitializer", value)
        return self.select(small, zero, value, "F32")


@dataclass(frozen=True)
class Primitive:
    """What it computes from the types of its operands; `build` takes and gives values."""

    name: str
    types: tuple[str, ...]
    result: str
    build: Callable[..., str]


TABLE: dict[tuple[str, tuple[str, ...]], Primitive] = {}


def _add(name: str, types: tuple[str, ...], result: str, build: Callable[..., str]) -> None:
    TABLE[name, types] = Primitive(name, types, result, build)


# -- integers -------------------------------------------------------------------------------------

_INTEGERS = ("U16", "I16", "U32", "I32", "U64", "I64")
_PLAIN = {"+": "add", "-": "sub", "*": "mul", "&": "and", "|": "or", "^": "xor"}
_COMPARES = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}


def _plain(operation: str, dtype: str) -> Callable[..., str]:
    return lambda b, x, y: b.do(f"{operation} {vector(dtype)} {x}, {y}")


def _shift(symbol: str, dtype: str) -> Callable[..., str]:
    """numpy's: by the width or more, all bits are gone (or copies of the sign)."""
    width, type_ = BITS[dtype], vector(dtype)

    def build(b: Body, x: str, y: str) -> str:
        far = b.do(f"icmp uge {type_} {y}, {b.splat(str(width), dtype)}")
        if symbol == ">>" and dtype[0] == "I":
            y = b.select(far, b.splat(str(width - 1), dtype), y, dtype)
            return b.do(f"ashr {type_} {x}, {y}")
        near = b.select(far, b.splat("0", dtype), y, dtype)
        out = b.do(f"{'shl' if symbol == '<<' else 'lshr'} {type_} {x}, {near}")
        return b.select(far, b.splat("0", dtype), out, dtype)

    return build


def _compare(relation: str, dtype: str) -> Callable[..., str]:
    if dtype in ("F32", "F64"):
        code = "fcmp " + ("une" if relation == "ne" else f"o{relation}")
    else:
        sign = "" if relation in ("eq", "ne") else "s" if dtype[0] == "I" else "u"
        code = f"icmp {sign}{relation}"
    return lambda b, x, y: b.do(f"{code} {vector(dtype)} {x}, {y}")


def _pick(which: str, dtype: str) -> Callable[..., str]:
    name = f"llvm.{'s' if dtype[0] == 'I' else 'u'}{which}.v32i{BITS[dtype]}"
    return lambda b, x, y: b.call(name, vector(dtype), x, y)


def _resize(source: str, target: str) -> Callable[..., str]:
    """astype between integers and from predicates."""
    wide, narrow = BITS[target] > BITS[source], BITS[target] < BITS[source]
    operation = "trunc" if narrow else "sext" if source[0] == "I" else "zext"
    if source == "BOOL":
        operation, wide = "zext", True
    if not wide and not narrow:
        return lambda b, x: x
    return lambda b, x: b.do(f"{operation} {vector(source)} {x} to {vector(target)}")


for _type in _INTEGERS:
    for _symbol, _operation in _PLAIN.items():
        _add(_symbol, (_type, _type), _type, _plain(_operation, _type))
    for _symbol in ("<<", ">>"):
        _add(_symbol, (_type, _type), _type, _shift(_symbol, _type))
    for _symbol in ("min", "max"):
        _add(f"np.{_symbol}imum", (_type, _type), _type, _pick(_symbol, _type))
    _add("~", (_type,), _type, lambda b, x, t=_type: b.do(f"xor {vector(t)} {x}, {b.splat('-1', t)}"))
    _add("neg", (_type,), _type, lambda b, x, t=_type: b.do(f"sub {vector(t)} zeroinitializer, {x}"))
    for _other in (*_INTEGERS, "BOOL"):
        _add(f"astype {_type}", (_other,), _type, _resize(_other, _type))
for _type in (*_INTEGERS, "F32", "F64"):
    for _symbol, _relation in _COMPARES.items():
        _add(_symbol, (_type, _type), "BOOL", _compare(_relation, _type))
for _symbol in "&|^":
    _add(_symbol, ("BOOL", "BOOL"), "BOOL", _plain(_PLAIN[_symbol], "BOOL"))
_add("~", ("BOOL",), "BOOL", lambda b, x: b.do(f"xor {vector('BOOL')} {x}, {b.splat('true', 'BOOL')}"))
for _symbol, _relation in (("==", "eq"), ("!=", "ne")):
    _add(_symbol, ("BOOL", "BOOL"), "BOOL", _compare(_relation, "BOOL"))
for _type in (*_INTEGERS, "F32", "F64", "BOOL"):
    _add(
        "choose",
        ("BOOL", _type, _type),
        _type,
        lambda b, m, x, y, t=_type: b.select(m, x, y, t),
    )
    _add("move", (_type,), _type, lambda b, x: x)

# -- conversions ----------------------------------------------------------------------------------

for _type, _how in (("U32", "ui"), ("I32", "si"), ("U64", "ui"), ("I64", "si"), ("U16", "ui"), ("I16", "si")):
    for _target in ("F32", "F64"):
        _add(
            f"astype {_target}",
            (_type,),
            _target,
            lambda b, x, h=_how, s=_type, t=_target: b.do(f"{h}tofp {vector(s)} {x} to {vector(t)}"),
        )


def _join(b: Body, low: str, high: str) -> str:
    """namespace.join64"""
    low = b.do(f"zext {vector('U32')} {low} to {vector('U64')}")
    high = b.do(f"zext {vector('U32')} {high} to {vector('U64')}")
    high = b.do(f"shl {vector('U64')} {high}, {b.splat('32', 'U64')}")
    return b.do(f"or {vector('U64')} {low}, {high}")


def _pack(b: Body, low: str, high: str) -> str:
    """namespace.pack16"""
    low = b.do(f"zext {vector('U16')} {low} to {vector('U32')}")
    high = b.do(f"zext {vector('U16')} {high} to {vector('U32')}")
    high = b.do(f"shl {vector('U32')} {high}, {b.splat('16', 'U32')}")
    return b.do(f"or {vector('U32')} {low}, {high}")


def _to_bf16(b: Body, x: str) -> str:
    """formats.f32_to_bf16 to nearest even"""
    type_ = vector("U32")
    bits = b.cast(x, "F32", "U32")
    odd = b.do(f"lshr {type_} {bits}, {b.splat('16', 'U32')}")
    odd = b.do(f"and {type_} {odd}, {b.splat('1', 'U32')}")
    code = b.do(f"add {type_} {b.do(f'add {type_} {odd}, {bits}')}, {b.splat('32767', 'U32')}")
    code = b.do(f"lshr {type_} {code}, {b.splat('16', 'U32')}")
    code = b.select(b.unordered(x), b.splat(str(0x7FFF), "U32"), code, "U32")
    return b.do(f"trunc {type_} {code} to {vector('U16')}")


def _from_bf16(b: Body, x: str) -> str:
    wide = b.do(f"zext {vector('U16')} {x} to {vector('U32')}")
    return b.cast(b.do(f"shl {vector('U32')} {wide}, {b.splat('16', 'U32')}"), "U32", "F32")


_add("join64", ("U32", "U32"), "U64", _join)
_add("pack16", ("U16", "U16"), "U32", _pack)
_add("formats.f32_to_bf16 'rn'", ("F32",), "U16", _to_bf16)
_add("formats.bf16_to_f32", ("U16",), "F32", _from_bf16)

# -- floats ---------------------------------------------------------------------------------------


def _rounded(operation: str, ftz: bool) -> Callable[..., str]:
    """arith.add_f32, sub_f32 and mul_f32 to nearest"""

    def build(b: Body, x: str, y: str) -> str:
        if ftz:
            x, y = b.flush(x), b.flush(y)
        out = b.do(f"{operation} {vector('F32')} {x}, {y}")
        return b.canonical(b.flush(out) if ftz else out)

    return build


def _fma(b: Body, x: str, y: str, z: str) -> str:
    """arith.fma_f32"""
    return b.canonical(b.call("llvm.fma.v32f32", vector("F32"), x, y, z))


def _extreme(which: str, nan: bool, ftz: bool) -> Callable[..., str]:
    """arith.min_f32 and max_f32: -0 < +0"""
    type_ = vector("F32")

    def two(b: Body, x: str, y: str) -> str:
        relation, merge = ("olt", "or") if which == "min" else ("ogt", "and")
        first = b.do(f"fcmp {relation} {type_} {x}, {y}")
        out = b.select(first, x, y, "F32")
        zeros = b.do(f"{merge} {vector('U32')} {b.cast(x, 'F32', 'U32')}, {b.cast(y, 'F32', 'U32')}")
        same = b.do(f"fcmp oeq {type_} {x}, {y}")
        out = b.select(same, b.cast(zeros, "U32", "F32"), out, "F32")
        if nan:
            bad = b.do(f"fcmp uno {type_} {x}, {y}")
            return b.select(bad, b.splat(f32_literal(_NAN), "F32"), out, "F32")
        out = b.select(b.unordered(x), y, out, "F32")
        return b.select(b.unordered(y), x, out, "F32")

    def build(b: Body, *values: str) -> str:
        if ftz:
            values = tuple(b.flush(x) for x in values)
        out = values[0]
        for value in values[1:]:
            out = two(b, out, value)
        return b.canonical(out)

    return build


def _table(b: Body, values: np.ndarray, name: str, index: str) -> str:
    """Elements of a constant table."""
    dtype = {"float32": "F32", "float64": "F64"}[str(values.dtype)]
    where = b.do(f"getelementptr {element(dtype)}, ptr @{name}, <{LANES} x i32> {index}")
    TABLES[name] = values
    type_, short = vector(dtype), "f32" if dtype == "F32" else "f64"
    mask = b.splat("true", "BOOL")
    intrinsic = f"llvm.masked.gather.v32{short}.v32p0"
    b.declared.add(f"declare {type_} @{intrinsic}(<32 x ptr>, i32, <32 x i1>, {type_})")
    return b.do(
        f"call {type_} @{intrinsic}(<32 x ptr> {where}, i32 {BITS[dtype] // 8}, <32 x i1> {mask}, {type_} poison)"
    )


TABLES: dict[str, np.ndarray] = {}


def _ex2(ftz: bool) -> Callable[..., str]:
    """approx.ex2_approx, operation by operation"""
    table, type_ = (approx._EXP.normal if ftz else approx._EXP.full), vector("F32")

    def build(b: Body, x: str) -> str:
        low, high = b.splat(_f32(-151.0), "F32"), b.splat(_f32(128.0), "F32")
        # select, not an intrinsic: a NaN has to stay one, as in numpy
        s = b.select(b.do(f"fcmp olt {type_} {x}, {low}"), low, x, "F32")
        s = b.select(b.do(f"fcmp ogt {type_} {s}, {high}"), high, s, "F32")
        s = b.do(f"fmul {type_} {s}, {b.splat(_f32(64.0), 'F32')}")
        whole = b.call("llvm.floor.v32f32", type_, s)
        s = b.do(f"fsub {type_} {s}, {whole}")
        whole = b.do(f"fsub {type_} {whole}, {b.splat(_f32(-151.0 * 64), 'F32')}")
        b.declared.add("declare <32 x i32> @llvm.fptosi.sat.v32i32.v32f32(<32 x float>)")
        index = b.do(f"call <32 x i32> @llvm.fptosi.sat.v32i32.v32f32({type_} {whole})")
        value = _table(b, table, "exp_normal" if ftz else "exp_full", index)
        q = b.do(f"fmul {type_} {s}, {b.splat(_f32(float(approx._EXP.c2)), 'F32')}")
        q = b.do(f"fadd {type_} {q}, {b.splat(_f32(float(approx._EXP.c1)), 'F32')}")
        q = b.do(f"fmul {type_} {q}, {s}")
        q = b.do(f"fadd {type_} {b.do(f'fmul {type_} {q}, {value}')}, {value}")
        infinity = b.splat(f32_literal(0x7F800000), "F32")
        nan = b.splat(f32_literal(_NAN), "F32")
        rest = b.select(b.unordered(x), nan, infinity, "F32")
        return b.select(b.unordered(q), rest, q, "F32")

    return build


def _rcp(b: Body, x: str) -> str:
    """approx.rcp_approx with ftz"""
    one = b.splat(_f32(1.0), "F32")
    return b.canonical(b.flush(b.do(f"fdiv {vector('F32')} {one}, {b.flush(x)}")))


def _rcp_ieee(b: Body, x: str) -> str:
    return b.canonical(b.do(f"fdiv {vector('F32')} {b.splat(_f32(1.0), 'F32')}, {x}"))


def _unary(name: str, ftz: bool) -> Callable[..., str]:
    """arith.neg_f32, abs_f32"""

    def build(b: Body, x: str) -> str:
        if ftz:
            x = b.flush(x)
        if name == "neg":
            return b.canonical(b.do(f"fneg {vector('F32')} {x}"))
        return b.canonical(b.call("llvm.fabs.v32f32", vector("F32"), x))

    return build


for _flag, _ftz in (("", False), (" ftz=True", True)):
    for _name, _operation in (("add", "fadd"), ("sub", "fsub")):
        _add(f"arith.{_name}_f32{_flag}", ("F32", "F32"), "F32", _rounded(_operation, _ftz))
    for _name in ("neg", "abs"):
        _add(f"arith.{_name}_f32{_flag}", ("F32",), "F32", _unary(_name, _ftz))
    for _name in ("min", "max"):
        for _count in (2, 3):
            for _nan in ("", " nan=True"):
                _add(
                    f"arith.{_name}_f32{_nan}{_flag}",
                    ("F32",) * _count,
                    "F32",
                    _extreme(_name, bool(_nan), _ftz),
                )
    _add(f"approx.ex2_approx{_flag}", ("F32",), "F32", _ex2(_ftz))
_add("arith.mul_f32", ("F32", "F32"), "F32", _rounded("fmul", False))
_add("arith.fma_f32", ("F32", "F32", "F32"), "F32", _fma)
_add("approx.rcp_approx ftz=True", ("F32",), "F32", _rcp)
_add("approx.rcp_approx", ("F32",), "F32", _rcp_ieee)

# -- functions ------------------------------------------------------------------------------------

_NEXT = """\
  %next = getelementptr i8, ptr %ip, i64 32
  %follow = load ptr, ptr %next
  %after = musttail call i64 %follow(ptr %next, ptr %file, ptr %scratch, ptr %context)
  ret i64 %after
}
"""


def _head(number: int) -> str:
    parameters = "ptr %ip, ptr noalias %file, ptr noalias %scratch, ptr noalias %context"
    return f"define i64 @op_{number}({parameters}) #0 {{\n"


def _function(number: int, primitive: Primitive, declared: set[str]) -> str:
    body = Body(declared=declared)
    values = [body.load(body.place(1 + k), dtype) for k, dtype in enumerate(primitive.types)]
    body.store(primitive.build(body, *values), body.place(0), primitive.result)
    return _head(number) + "\n".join(body.lines) + "\n" + _NEXT


def _end(number: int) -> str:
    return _head(number) + "  ret i64 0\n}\n"


def _splat(number: int, dtype: str, declared: set[str]) -> str:
    """A cell of 8 bytes in the scratch to all lanes; an f32 is held as Python's double."""
    b = Body(declared=declared)
    bits = b.do(f"load i64, ptr {b.place(1)}")
    if dtype == "F32":
        double = b.do(f"bitcast i64 {bits} to double")
        single = b.do(f"bitcast float {b.do(f'fptrunc double {double} to float')} to i32")
        sign = b.do(f"trunc i64 {b.do(f'lshr i64 {bits}, 32')} to i32")
        sign = b.do(f"and i32 {sign}, -2147483648")
        low = b.do(f"trunc i64 {b.do(f'lshr i64 {bits}, 29')} to i32")
        nan = b.do(f"or i32 {b.do(f'and i32 {low}, 8388607')}, {b.do(f'or i32 {sign}, 2139095040')}")
        bad = b.do(f"fcmp uno double {double}, {double}")
        one = b.do(f"select i1 {bad}, i32 {nan}, i32 {single}")
        type_ = "i32"
    elif dtype == "BOOL":
        one, type_ = b.do(f"trunc i64 {bits} to i8"), "i8"
    else:
        type_ = _ELEMENT[BITS[dtype]]
        one = bits if type_ == "i64" else b.do(f"trunc i64 {bits} to {type_}")
    many = f"<{LANES} x {type_}>"
    first = b.do(f"insertelement {many} poison, {type_} {one}, i32 0")
    all_ = b.do(f"shufflevector {many} {first}, {many} poison, <32 x i32> zeroinitializer")
    b.lines.append(f"  store {many} {all_}, ptr {b.place(0)}, align {32 if type_ == 'i8' else 64}")
    return _head(number) + "\n".join(b.lines) + "\n" + _NEXT


def _ballot(number: int, declared: set[str]) -> str:
    """A predicate to its 32 bits, in a cell."""
    b = Body(declared=declared)
    mask = b.load(b.place(1), "BOOL")
    bits = b.do(f"bitcast <32 x i1> {mask} to i32")
    b.lines.append(f"  store i64 {b.do(f'zext i32 {bits} to i64')}, ptr {b.place(0)}")
    return _head(number) + "\n".join(b.lines) + "\n" + _NEXT


Key = tuple[str, tuple[str, ...]]


def module() -> tuple[str, list[Key]]:
    """(the IR of all primitives, what each is, by number)."""
    declared: set[str] = set()
    keys: list[Key] = [("end", ())]
    parts = [_end(0)]
    for dtype in (*_INTEGERS, "F32", "F64", "BOOL"):
        parts.append(_splat(len(keys), dtype, declared))
        keys.append(("splat", (dtype,)))
    parts.append(_ballot(len(keys), declared))
    keys.append(("ballot", ("BOOL",)))
    for key, primitive in TABLE.items():
        parts.append(_function(len(keys), primitive, declared))
        keys.append(key)
    return "\n".join((*_tables(), *sorted(declared), *parts)), keys


def _tables() -> list[str]:
    texts = []
    for name, values in TABLES.items():
        dtype = "float" if values.dtype == np.float32 else "double"
        literal = f32_literal if dtype == "float" else (lambda bits: f"0x{bits:016X}")
        bits = values.view(np.uint32 if dtype == "float" else np.uint64).tolist()
        items = ", ".join(f"{dtype} {literal(x)}" for x in bits)
        texts.append(f"@{name} = private constant [{len(values)} x {dtype}] [{items}], align 64")
    return texts
