"""Primitives of integers and predicates, and what takes them to other types."""

from __future__ import annotations

from collections.abc import Callable

from ptxemu.native.ir import BITS, INTEGERS, Body, add, vector

# -- integers -------------------------------------------------------------------------------------

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


def _inverted(dtype: str, ones: str) -> Callable[..., str]:
    return lambda b, x: b.do(f"xor {vector(dtype)} {x}, {b.splat(ones, dtype)}")


def _negated(dtype: str) -> Callable[..., str]:
    return lambda b, x: b.do(f"sub {vector(dtype)} zeroinitializer, {x}")


def _chosen(dtype: str) -> Callable[..., str]:
    return lambda b, mask, x, y: b.select(mask, x, y, dtype)


def _to_float(source: str, target: str) -> Callable[..., str]:
    operation = "sitofp" if source[0] == "I" else "uitofp"
    return lambda b, x: b.do(f"{operation} {vector(source)} {x} to {vector(target)}")


def _resize(source: str, target: str) -> Callable[..., str]:
    """astype between integers and from predicates."""
    wide, narrow = BITS[target] > BITS[source], BITS[target] < BITS[source]
    operation = "trunc" if narrow else "sext" if source[0] == "I" else "zext"
    if source == "BOOL":
        operation, wide = "zext", True
    if not wide and not narrow:
        return lambda b, x: x
    return lambda b, x: b.do(f"{operation} {vector(source)} {x} to {vector(target)}")


for _type in INTEGERS:
    for _symbol, _operation in _PLAIN.items():
        add(_symbol, (_type, _type), _type, _plain(_operation, _type))
    for _symbol in ("<<", ">>"):
        add(_symbol, (_type, _type), _type, _shift(_symbol, _type))
    for _symbol in ("min", "max"):
        add(f"np.{_symbol}imum", (_type, _type), _type, _pick(_symbol, _type))
    add("~", (_type,), _type, _inverted(_type, "-1"))
    add("neg", (_type,), _type, _negated(_type))
    for _other in (*INTEGERS, "BOOL"):
        add(f"astype {_type}", (_other,), _type, _resize(_other, _type))
for _type in (*INTEGERS, "F32", "F64"):
    for _symbol, _relation in _COMPARES.items():
        add(_symbol, (_type, _type), "BOOL", _compare(_relation, _type))
for _symbol in "&|^":
    add(_symbol, ("BOOL", "BOOL"), "BOOL", _plain(_PLAIN[_symbol], "BOOL"))
add("~", ("BOOL",), "BOOL", _inverted("BOOL", "true"))
for _symbol, _relation in (("==", "eq"), ("!=", "ne")):
    add(_symbol, ("BOOL", "BOOL"), "BOOL", _compare(_relation, "BOOL"))
for _type in (*INTEGERS, "F32", "F64", "BOOL"):
    add("choose", ("BOOL", _type, _type), _type, _chosen(_type))
    add("move", (_type,), _type, lambda b, x: x)

# -- conversions ----------------------------------------------------------------------------------

for _type in INTEGERS:
    for _target in ("F32", "F64"):
        add(f"astype {_target}", (_type,), _target, _to_float(_type, _target))


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


add("join64", ("U32", "U32"), "U64", _join)
add("pack16", ("U16", "U16"), "U32", _pack)
add("formats.f32_to_bf16 'rn'", ("F32",), "U16", _to_bf16)
add("formats.bf16_to_f32", ("U16",), "F32", _from_bf16)
