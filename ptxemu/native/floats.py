"""Primitives of f32, by the definitions in `numerics`."""

from __future__ import annotations

from collections.abc import Callable

from ptxemu.native.ir import NAN, Body, add, f32, f32_literal, lookup, vector
from ptxemu.numerics import approx

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
        for _count in (2, 3):
            for _nan in ("", " nan=True"):
                add(
                    f"arith.{_name}_f32{_nan}{_flag}",
                    ("F32",) * _count,
                    "F32",
                    _extreme(_name, bool(_nan), _ftz),
                )
    add(f"approx.ex2_approx{_flag}", ("F32",), "F32", _ex2(_ftz))
add("arith.div_f32", ("F32", "F32"), "F32", _rounded("fdiv", False))
add("arith.mul_f32", ("F32", "F32"), "F32", _rounded("fmul", False))
add("arith.fma_f32", ("F32", "F32", "F32"), "F32", _fma)
add("approx.rcp_approx ftz=True", ("F32",), "F32", _rcp)
add("approx.rcp_approx", ("F32",), "F32", _rcp_ieee)
