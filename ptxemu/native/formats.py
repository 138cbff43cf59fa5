"""Primitives of the storage formats of f32, by the definitions in `numerics.formats`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptxemu.native.ir import NAN_16, Body, add, f32_literal, lookup, vector
from ptxemu.numerics import formats
from ptxemu.numerics.formats import MiniFloat


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
