"""Primitives of integers and predicates, and what takes them to other types."""

from __future__ import annotations

from collections.abc import Callable

from ptxemu.native.ir import BITS, INTEGERS, Body, add, vector

# -- integers -------------------------------------------------------------------------------------

_PLAIN = {"+": "add", "-": "sub", "*": "mul", "|": "or", "^": "xor"}
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


def _inverted(dtype: str, ones: str) -> Callable[..., str]:
    return lambda b, x: b.do(f"xor {vector(dtype)} {x}, {b.splat(ones, dtype)}")


def _negated(dtype: str) -> Callable[..., str]:
    return lambda b, x: b.do(f"sub {vector(dtype)} zeroinitializer, {x}")


def _chosen(dtype: str) -> Callable[..., str]:
    return lambda b, mask, x, y: b.select(mask, x, y, dtype)


def _resize(source: str, target: str) -> Callable[..., str]:
    """astype between integers and from predicates."""
    wide, narrow = BITS[target] > BITS[source], BITS[target] < BITS[source]
    operation = "trunc" if narrow else "sext" if source[0] == "I" else "zext"
    if source == "BOOL":
        operation, wide = "zext", True
    if not wide and not narrow:
        return lambda b, x: x
    return lambda b, x: b.do(f"{operation} {vector(source)} {x} to {vector(target)}")


_UNSIGNED = ("U16", "U32", "U64")
_SIGNED = ("I16", "I32", "I64")
for _type in INTEGERS:
    add("&", (_type, _type), _type, _plain("and", _type))
    for _symbol in ("min", "max"):
        add(f"np.{_symbol}imum", (_type, _type), _type, _pick(_symbol, _type))
    for _other in INTEGERS:
        if _other != _type:
            add(f"astype {_type}", (_other,), _type, _resize(_other, _type))
for _type in _UNSIGNED:
    for _symbol, _operation in _PLAIN.items():
        add(_symbol, (_type, _type), _type, _plain(_operation, _type))
    add("<<", (_type, _type), _type, _shift("<<", _type))
    add("~", (_type,), _type, _inverted(_type, "-1"))
    add(f"astype {_type}", ("BOOL",), _type, _resize("BOOL", _type))
for _type in (*_UNSIGNED, "I32", "I64"):
    add(">>", (_type, _type), _type, _shift(">>", _type))
for _type in _SIGNED:
    add("neg", (_type,), _type, _negated(_type))
for _type in ("U16", "U32"):
    add(f"astype {_type}", ("U8",), _type, _resize("U8", _type))
for _type in (*INTEGERS, "F32", "F64"):
    for _symbol, _relation in _COMPARES.items():
        add(_symbol, (_type, _type), "BOOL", _compare(_relation, _type))
for _symbol in "&|^":
    add(_symbol, ("BOOL", "BOOL"), "BOOL", _plain(_PLAIN.get(_symbol, "and"), "BOOL"))
add("~", ("BOOL",), "BOOL", _inverted("BOOL", "true"))
for _type in (*_UNSIGNED, "F32", "F64", "BOOL"):  # of registers
    add("choose", ("BOOL", _type, _type), _type, _chosen(_type))
for _type in (*INTEGERS, "F32", "F64", "BOOL"):
    add("move", (_type,), _type, lambda b, x: x)

# -- conversions ----------------------------------------------------------------------------------


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


add("join64", ("U32", "U32"), "U64", _join)
add("pack16", ("U16", "U16"), "U32", _pack)


# -- functions of numpy and of numerics.integers ---------------------------------------------------


def _product(source: str, target: str) -> Callable[..., str]:
    """np.multiply of both operands in a wider type"""
    wider = _resize(source, target)
    return lambda b, x, y: b.do(f"mul {vector(target)} {wider(b, x)}, {wider(b, y)}")


def _count(b: Body, x: str) -> str:
    many = b.call("llvm.ctpop.v32i32", vector("U32"), x)
    return b.do(f"trunc {vector('U32')} {many} to {vector('U8')}")


def _quotient(signed: bool, remainder: bool) -> Callable[..., str]:
    """integers.div and rem of 32 bits: by zero all ones"""
    type_ = vector("U32")

    def negative(b: Body, x: str) -> str:
        return b.do(f"icmp slt {type_} {x}, zeroinitializer")

    def with_sign(b: Body, x: str, sign: str) -> str:
        return b.select(sign, b.do(f"sub {type_} zeroinitializer, {x}"), x, "U32")

    def build(b: Body, x: str, y: str) -> str:
        zero = b.do(f"icmp eq {type_} {y}, zeroinitializer")
        left, right = x, b.select(zero, b.splat("1", "U32"), y, "U32")
        if signed:
            left, right = (with_sign(b, v, negative(b, v)) for v in (left, right))
        out = b.do(f"{'urem' if remainder else 'udiv'} {type_} {left}, {right}")
        if signed:
            sign = negative(b, x)
            if not remainder:
                sign = b.do(f"xor {vector('BOOL')} {sign}, {negative(b, y)}")
            out = with_sign(b, out, sign)
        return b.select(zero, b.splat("-1", "U32"), out, "U32")

    return build


for _source, _target in (("U16", "U32"), ("I16", "I32"), ("U32", "U64"), ("I32", "I64")):
    add(f"np.multiply dtype={_target}", (_source, _source), _target, _product(_source, _target))
add("np.bitwise_count", ("U32",), "U8", _count)
for _name in ("div", "rem"):
    for _sign in (False, True):
        _key = f"integers.{_name} signed={_sign} width=32"
        add(_key, ("U32", "U32"), "U32", _quotient(_sign, _name == "rem"))
add("integers.shl width=32", ("U32", "U32"), "U32", _shift("<<", "U32"))
