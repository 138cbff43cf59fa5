"""Primitives of one element at a time: integers, predicates, f32, and its storage formats.

Floats follow the definitions in `numerics`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptxemu.native.ir import (
    BITS,
    INTEGERS,
    LANES,
    NAN,
    NAN_16,
    Body,
    add,
    f32,
    f32_literal,
    f64,
    lookup,
    vector,
)
from ptxemu.numerics import approx, formats
from ptxemu.numerics.formats import MiniFloat

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


# -- floats ---------------------------------------------------------------------------------------


def _rounded(operation: str, ftz: bool) -> Callable[..., str]:
    """arith.add_f32, sub_f32, mul_f32 and div_f32 to nearest"""

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
    """arith.min_f32 and max_f32"""

    def build(b: Body, *values: str) -> str:
        if ftz:
            values = tuple(b.flush(x) for x in values)
        out = values[0]
        for value in values[1:]:
            out = b.extreme(which, out, value, nan=nan)
        return b.canonical(out)

    return build


def _ex2(ftz: bool) -> Callable[..., str]:
    """approx.ex2_approx, operation by operation"""
    table, type_ = (approx._EXP.normal if ftz else approx._EXP.full), vector("F32")

    def build(b: Body, x: str) -> str:
        low, high = b.splat(f32(-151.0), "F32"), b.splat(f32(128.0), "F32")
        # select, not an intrinsic: a NaN has to stay one, as in numpy
        s = b.select(b.do(f"fcmp olt {type_} {x}, {low}"), low, x, "F32")
        s = b.select(b.do(f"fcmp ogt {type_} {s}, {high}"), high, s, "F32")
        s = b.do(f"fmul {type_} {s}, {b.splat(f32(64.0), 'F32')}")
        whole = b.call("llvm.floor.v32f32", type_, s)
        s = b.do(f"fsub {type_} {s}, {whole}")
        whole = b.do(f"fsub {type_} {whole}, {b.splat(f32(-151.0 * 64), 'F32')}")
        b.declared.add("declare <32 x i32> @llvm.fptosi.sat.v32i32.v32f32(<32 x float>)")
        index = b.do(f"call <32 x i32> @llvm.fptosi.sat.v32i32.v32f32({type_} {whole})")
        value = lookup(b, table, "exp_normal" if ftz else "exp_full", index)
        q = b.do(f"fmul {type_} {s}, {b.splat(f32(float(approx._EXP.c2)), 'F32')}")
        q = b.do(f"fadd {type_} {q}, {b.splat(f32(float(approx._EXP.c1)), 'F32')}")
        q = b.do(f"fmul {type_} {q}, {s}")
        q = b.do(f"fadd {type_} {b.do(f'fmul {type_} {q}, {value}')}, {value}")
        infinity = b.splat(f32_literal(0x7F800000), "F32")
        nan = b.splat(f32_literal(NAN), "F32")
        rest = b.select(b.unordered(x), nan, infinity, "F32")
        return b.select(b.unordered(q), rest, q, "F32")

    return build


def _lg2(ftz: bool) -> Callable[..., str]:
    """approx.lg2_approx, operation by operation"""
    type_, words = vector("F64"), vector("I64")
    origin = int(np.float64(approx._LOG_ORIGIN).view(np.int64))

    def build(b: Body, x: str) -> str:
        def number(value: float) -> str:
            return b.splat(f64(float(value)), "F64")

        def whole(value: int) -> str:
            return b.splat(str(value), "I64")

        x = b.flush(x) if ftz else x
        wide = b.do(f"fpext {vector('F32')} {x} to {type_}")
        bits = b.do(f"bitcast {type_} {wide} to {words}")
        offset = b.do(f"sub {words} {bits}, {whole(origin)}")
        exponent = b.do(f"ashr {words} {offset}, {whole(52)}")
        index = b.do(f"ashr {words} {offset}, {whole(46)}")
        index = b.do(f"and {words} {index}, {whole(approx._LOG_STEPS - 1)}")
        index = b.do(f"trunc {words} {index} to {vector('U32')}")
        mantissa = b.do(f"sub {words} {bits}, {b.do(f'shl {words} {exponent}, {whole(52)}')}")
        mantissa = b.do(f"bitcast {words} {mantissa} to {type_}")
        r = b.do(f"fmul {type_} {mantissa}, {lookup(b, approx._LOG.inverse, 'log_inverse', index)}")
        r = b.do(f"fsub {type_} {r}, {number(1.0)}")
        poly = number(approx._LOG.series[0])
        for coefficient in approx._LOG.series[1:]:
            poly = b.do(f"fmul {type_} {poly}, {r}")
            poly = b.do(f"fadd {type_} {poly}, {number(coefficient)}")
        poly = b.do(f"fmul {type_} {poly}, {r}")
        poly = b.do(f"fadd {type_} {poly}, {lookup(b, approx._LOG.log2, 'log_log2', index)}")
        poly = b.do(f"fadd {type_} {poly}, {b.do(f'sitofp {words} {exponent} to {type_}')}")
        result = b.do(f"fptrunc {type_} {poly} to {vector('F32')}")
        return _unless_special(b, x, result)

    return build


def _unless_special(b: Body, x: str, result: str) -> str:
    """The result, or the logarithm of 0, infinity, NaN or a number below 0."""
    type_, infinity = vector("F32"), b.splat(f32_literal(0x7F800000), "F32")
    minus = b.splat(f32_literal(0xFF800000), "F32")
    above = b.do(f"fcmp ogt {type_} {x}, zeroinitializer")
    special = b.select(above, x, b.splat(f32_literal(NAN), "F32"), "F32")
    zero = b.do(f"fcmp oeq {type_} {x}, zeroinitializer")
    special = b.select(zero, minus, special, "F32")
    finite = b.do(f"fcmp olt {type_} {x}, {infinity}")
    regular = b.do(f"and <{LANES} x i1> {above}, {finite}")
    return b.select(regular, result, special, "F32")


def _rcp(b: Body, x: str) -> str:
    """approx.rcp_approx with ftz"""
    one = b.splat(f32(1.0), "F32")
    return b.canonical(b.flush(b.do(f"fdiv {vector('F32')} {one}, {b.flush(x)}")))


def _rcp_ieee(b: Body, x: str) -> str:
    return b.canonical(b.do(f"fdiv {vector('F32')} {b.splat(f32(1.0), 'F32')}, {x}"))


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
        add(f"arith.{_name}_f32{_flag}", ("F32", "F32"), "F32", _rounded(_operation, _ftz))
    for _name in ("neg", "abs"):
        add(f"arith.{_name}_f32{_flag}", ("F32",), "F32", _unary(_name, _ftz))
    for _name in ("min", "max"):
        for _arity in (2, 3):
            for _nan in ("", " nan=True"):
                add(
                    f"arith.{_name}_f32{_nan}{_flag}",
                    ("F32",) * _arity,
                    "F32",
                    _extreme(_name, bool(_nan), _ftz),
                )
    add(f"approx.ex2_approx{_flag}", ("F32",), "F32", _ex2(_ftz))
    add(f"approx.lg2_approx{_flag}", ("F32",), "F32", _lg2(_ftz))
add("arith.div_f32", ("F32", "F32"), "F32", _rounded("fdiv", False))
add("arith.mul_f32", ("F32", "F32"), "F32", _rounded("fmul", False))
add("arith.fma_f32", ("F32", "F32", "F32"), "F32", _fma)
add("approx.rcp_approx ftz=True", ("F32",), "F32", _rcp)
add("approx.rcp_approx", ("F32",), "F32", _rcp_ieee)


def _to_bf16(b: Body, x: str) -> str:
    """f32_to_bf16 to nearest even"""
    type_ = vector("U32")
    bits = b.cast(x, "F32", "U32")
    odd = b.do(f"lshr {type_} {bits}, {b.splat('16', 'U32')}")
    odd = b.do(f"and {type_} {odd}, {b.splat('1', 'U32')}")
    code = b.do(f"add {type_} {b.do(f'add {type_} {odd}, {bits}')}, {b.splat('32767', 'U32')}")
    code = b.do(f"lshr {type_} {code}, {b.splat('16', 'U32')}")
    code = b.select(b.unordered(x), b.splat(str(NAN_16), "U32"), code, "U32")
    return b.do(f"trunc {type_} {code} to {vector('U16')}")


def _from_bf16(b: Body, x: str) -> str:
    wide = b.do(f"zext {vector('U16')} {x} to {vector('U32')}")
    return b.cast(b.do(f"shl {vector('U32')} {wide}, {b.splat('16', 'U32')}"), "U32", "F32")


def _to_f16(b: Body, x: str) -> str:
    """f32_to_f16 to nearest even"""
    half = b.do(f"fptrunc {vector('F32')} {x} to <32 x half>")
    code = b.do(f"bitcast <32 x half> {half} to {vector('U16')}")
    return b.select(b.unordered(x), b.splat(str(NAN_16), "U16"), code, "U16")


def _from_f16(b: Body, x: str) -> str:
    half = b.do(f"bitcast {vector('U16')} {x} to <32 x half>")
    return b.canonical(b.do(f"fpext <32 x half> {half} to {vector('F32')}"))


def _to_mini(form: MiniFloat) -> Callable[..., str]:
    """_encode: adding 2^23 quanta lets the f32 adder round."""
    largest = np.float32(form.value(form.largest)).view(np.uint32).item()
    lowest, shift = 128 - form.bias << 23, 23 - form.mantissa_bits
    words, floats = vector("U32"), vector("F32")

    def build(b: Body, x: str) -> str:
        def constant(number: int) -> str:
            return b.splat(str(number), "U32")

        bits, most = b.cast(x, "F32", "U32"), b.splat(f32_literal(largest), "F32")
        size = b.call("llvm.fabs.v32f32", floats, x)
        size = b.select(b.do(f"fcmp olt {floats} {size}, {most}"), size, most, "F32")
        field = b.do(f"and {words} {b.cast(size, 'F32', 'U32')}, {constant(0x7F800000)}")
        field = b.call("llvm.umax.v32i32", words, field, constant(lowest))
        magic = b.do(f"add {words} {field}, {constant(shift << 23)}")
        total = b.do(f"fadd {floats} {size}, {b.cast(magic, 'U32', 'F32')}")
        quanta = b.do(f"sub {words} {b.cast(total, 'F32', 'U32')}, {magic}")
        code = b.do(f"sub {words} {field}, {constant(lowest)}")
        code = b.do(f"lshr {words} {code}, {constant(shift)}")
        code = b.do(f"add {words} {code}, {quanta}")
        sign = b.do(f"lshr {words} {bits}, {constant(31)}")
        sign = b.do(f"shl {words} {sign}, {constant(form.sign_bit)}")
        code = b.do(f"or {words} {code}, {sign}")
        code = b.select(b.unordered(x), constant(form.nan), code, "U32")
        return b.do(f"trunc {words} {code} to {vector('U8')}")

    return build


def _mini_to_f16(name: str) -> Callable[..., str]:
    """minifloat_to_f16 of codes of 8 bits"""
    codes = formats.minifloat_to_f16(np.arange(256), name).astype(np.uint32)

    def build(b: Body, x: str) -> str:
        index = b.do(f"zext {vector('U16')} {x} to {vector('U32')}")
        index = b.do(f"and {vector('U32')} {index}, {b.splat('255', 'U32')}")
        found = lookup(b, codes, f"f16_of_{name}", index)
        return b.do(f"trunc {vector('U32')} {found} to {vector('U16')}")

    return build


add("formats.f32_to_bf16 'rn'", ("F32",), "U16", _to_bf16)
add("formats.bf16_to_f32", ("U16",), "F32", _from_bf16)
add("formats.f32_to_f16 'rn'", ("F32",), "U16", _to_f16)
add("formats.f16_to_f32", ("U16",), "F32", _from_f16)
for _name, _form in formats.FORMS.items():
    add(f"formats.f32_to_{_name}", ("F32",), "U8", _to_mini(_form))
    add(f"formats.minifloat_to_f16 '{_name}'", ("U16",), "U16", _mini_to_f16(_name))
