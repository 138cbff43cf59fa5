"""Floating-point arithmetic: PTX ISA "Floating Point", "Half Precision" and "Mixed Precision"
instructions.

Every result is rounded once and NaNs are canonical; the arithmetic itself is `ptxemu.numerics`.
Packed f32x2 is two f32 operations on the halves of a 64-bit register.
"""

from __future__ import annotations

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op
from ptxemu.codegen.values import Value
from ptxemu.syntax.tree import Instr

_ROUND = "rn rz rm rp"
_ARITH = f"{_ROUND} ftz sat"
# uniform templates of the plain rn forms; anything else runs the array function on one element
_SCALAR = {"add": "round32({0} + {1})", "sub": "round32({0} - {1})", "mul": "round32({0} * {1})"}


def _flags(f: Match, *, rounding: bool = True) -> str:
    """Keyword arguments of the numerics function."""
    text = ""
    if rounding and f.pick("rn", "rz", "rm", "rp", default="rn") != "rn":
        text += f", '{f.pick('rz', 'rm', 'rp')}'"
    for flag in ("ftz", "sat", "relu"):
        if flag in f.flags:
            text += f", {flag}=True"
    return text


def _call(
    c: Lower, name: str, type_: str, values: list[Value], flags: str, scalar: str | None = None
) -> Value:
    fields = ", ".join(f"{{{k}}}" for k in range(len(values)))
    return c.pure(type_, None if flags else scalar, f"{name}({fields}{flags})", *values)


@op("add sub mul fma", types="f32", flags=_ARITH, section="add, sub, mul, fma")
def arithmetic(c: Lower, i: Instr, f: Match) -> None:
    name = f.form.name
    values = [c.src(operand, "f32") for operand in i.operands[1:]]
    c.dst(i.operands[0], _call(c, f"arith.{name}_f32", "f32", values, _flags(f), _SCALAR.get(name)))


@op("mad", types="f32", flags=_ARITH, section="mad")
def multiply_add(c: Lower, i: Instr, f: Match) -> None:
    values = [c.src(operand, "f32") for operand in i.operands[1:]]
    c.dst(i.operands[0], _call(c, "arith.fma_f32", "f32", values, _flags(f)))


@op("add sub mul fma", types="f32x2", flags=f"{_ROUND} ftz", section="add, sub, mul, fma (f32x2)")
def packed_arithmetic(c: Lower, i: Instr, f: Match) -> None:
    name = f.form.name
    pairs = [c.halves(operand, "f32") for operand in i.operands[1:]]
    low, high = (
        _call(
            c, f"arith.{name}_f32", "f32", [pair[k] for pair in pairs], _flags(f), _SCALAR.get(name)
        )
        for k in (0, 1)
    )
    c.dst(i.operands[0], (low, high))


@op("add sub mul fma", types="f64", flags=_ROUND, section="add, sub, mul, fma (f64)")
def double_arithmetic(c: Lower, i: Instr, f: Match) -> None:
    name = f.form.name
    values = [c.src(operand, "f64") for operand in i.operands[1:]]
    c.dst(i.operands[0], _call(c, f"arith.{name}_f64", "f64", values, _flags(f)))


@op(
    "add sub mul fma",
    types="f16 bf16",
    flags="rn ftz sat relu",
    section="add, sub, mul, fma (half)",
)
def half_arithmetic(c: Lower, i: Instr, f: Match) -> None:
    values = [c.src(operand, "u16") for operand in i.operands[1:]]
    c.dst(i.operands[0], _call(c, f"half.{f.form.name}_{f.type}", "u16", values, _flags(f)))


@op(
    "add sub mul fma",
    types="f16x2 bf16x2",
    flags="rn ftz sat relu",
    section="add, sub, mul, fma (half)",
)
def packed_half(c: Lower, i: Instr, f: Match) -> None:
    values = [c.src(operand, "u32") for operand in i.operands[1:]]
    fields = ", ".join(f"{{{k}}}" for k in range(len(values)))
    text = f"half.packed(half.{f.form.name}_{f.type[:-2]}, {fields}{_flags(f)})"
    c.dst(i.operands[0], c.pure("u32", None, text, *values))


@op(
    "add sub fma", types=("f32", "f16 bf16"), flags=_ARITH, section="Mixed Precision: add, sub, fma"
)
def mixed_arithmetic(c: Lower, i: Instr, f: Match) -> None:
    """add/sub: a narrow operand and an f32 one; fma: two narrow ones and an f32 addend."""
    narrow, name = f.types[1], f.form.name
    count = 2 if name == "fma" else 1
    values = []
    for k, operand in enumerate(i.operands[1:]):
        if k < count:
            values.append(
                c.pure("f32", None, f"formats.{narrow}_to_f32({{0}})", c.src(operand, "u16"))
            )
        else:
            values.append(c.src(operand, "f32"))
    c.dst(i.operands[0], _call(c, f"arith.{name}_f32", "f32", values, _flags(f)))


@op("min max", types="f32", flags="ftz NaN xorsign abs", section="min, max")
def extreme(c: Lower, i: Instr, f: Match) -> None:
    values = [c.src(operand, "f32") for operand in i.operands[1:]]
    flags = "".join(
        f", {name}=True" for flag, name in (("ftz", "ftz"), ("NaN", "nan")) if flag in f.flags
    )
    if "xorsign" in f.flags:
        flags += ", xorsign_abs=True"
    elif "abs" in f.flags:
        flags += ", absolute=True"
    c.dst(i.operands[0], _call(c, f"arith.{f.form.name}_f32", "f32", values, flags))


@op("min max", types="f64", section="min, max")
def double_extreme(c: Lower, i: Instr, f: Match) -> None:
    values = [c.src(operand, "f64") for operand in i.operands[1:]]
    text = f"arith.minmax_f64('{f.form.name}', {{t0}}, {{t1}})"
    c.dst(i.operands[0], c.pure("f64", None, text, *values))


@op("div rcp sqrt", types="f64", flags="rn", section="div, rcp, sqrt (f64)")
def double_root(c: Lower, i: Instr, f: Match) -> None:
    """Round to nearest only."""
    text = {"div": "{t0} / {t1}", "rcp": "1 / {t0}", "sqrt": "np.sqrt({t0})"}[f.form.name]
    values = [c.src(operand, "f64") for operand in i.operands[1:]]
    c.dst(i.operands[0], c.pure("f64", None, text, *values))


@op(
    "min max", types="f16 bf16 f16x2 bf16x2", flags="ftz NaN xorsign abs", section="min, max (half)"
)
def half_extreme(c: Lower, i: Instr, f: Match) -> None:
    base = f.type.removesuffix("x2")
    flags = "".join(
        f", {name}=True"
        for flag, name in (("ftz", "ftz"), ("NaN", "nan"), ("xorsign", "xorsign_abs"))
        if flag in f.flags
    )
    wide = f.type.endswith("x2")
    values = [c.src(operand, "u32" if wide else "u16") for operand in i.operands[1:]]
    fields = ", ".join(f"{{{k}}}" for k in range(len(values)))
    inner = f"half.minmax_{base}('{f.form.name}', {fields}{flags})"
    if wide:
        inner = (
            f"half.packed(lambda *h, **k: half.minmax_{base}('{f.form.name}', *h, **k), "
            f"{fields}{flags})"
        )
    c.dst(i.operands[0], c.pure("u32" if wide else "u16", None, inner, *values))


@op("neg abs", types="f32", flags="ftz", section="neg, abs")
def sign(c: Lower, i: Instr, f: Match) -> None:
    value = c.src(i.operands[1], "f32")
    size = "-{0}" if f.form.name == "neg" else "abs({0})"
    scalar = f"({size} if {{0}} == {{0}} else NAN)"
    c.dst(i.operands[0], _call(c, f"arith.{f.form.name}_f32", "f32", [value], _flags(f), scalar))


@op("neg abs", types="f64", section="neg, abs")
def double_sign(c: Lower, i: Instr, f: Match) -> None:
    value = c.src(i.operands[1], "f64")
    c.dst(i.operands[0], c.pure("f64", None, f"arith.{f.form.name}_f64({{t0}})", value))


@op("neg abs", types="f16 bf16 f16x2 bf16x2", flags="ftz", section="neg, abs (half)")
def half_sign(c: Lower, i: Instr, f: Match) -> None:
    """The canonical NaN of a NaN."""
    wide = f.type.endswith("x2")
    name = f"half.{f.form.name}_{f.type.removesuffix('x2')}"
    value = c.src(i.operands[1], "u32" if wide else "u16")
    text = f"half.packed({name}, {{0}}{_flags(f)})" if wide else f"{name}({{0}}{_flags(f)})"
    c.dst(i.operands[0], c.pure(value.type, None, text, value))


@op("copysign", types="f32", section="copysign")
def copy_sign(c: Lower, i: Instr, f: Match) -> None:
    """The sign of a with the magnitude of b."""
    a, b = (c.src(operand, "u32") for operand in i.operands[1:])
    text = "{0} & 0x80000000 | {1} & 0x7fffffff"
    c.dst(i.operands[0], c.pure("u32", f"({text})", text, a, b))


@op("div", types="f32", flags=f"{_ROUND} ftz approx full", section="div")
def divide(c: Lower, i: Instr, f: Match) -> None:
    values = [c.src(operand, "f32") for operand in i.operands[1:]]
    how = f.pick("approx", "full")
    name = f"approx.div_{how}" if how else "arith.div_f32"
    c.dst(i.operands[0], _call(c, name, "f32", values, _flags(f, rounding=not how)))


@op("rcp sqrt", types="f32", flags=f"{_ROUND} ftz approx", section="rcp, sqrt")
def root(c: Lower, i: Instr, f: Match) -> None:
    near = "approx" in f.flags
    name = f"approx.{f.form.name}_approx" if near else f"arith.{f.form.name}_f32"
    value = c.src(i.operands[1], "f32")
    c.dst(i.operands[0], _call(c, name, "f32", [value], _flags(f, rounding=not near)))


@op(
    "ex2 lg2 rsqrt sin cos tanh",
    types="f32",
    flags="approx ftz",
    section="ex2, lg2, rsqrt, sin, cos, tanh",
)
def approximation(c: Lower, i: Instr, f: Match) -> None:
    value = c.src(i.operands[1], "f32")
    c.dst(
        i.operands[0],
        _call(c, f"approx.{f.form.name}_approx", "f32", [value], _flags(f, rounding=False)),
    )


@op("ex2 tanh", types="f16 bf16 f16x2 bf16x2", flags="approx ftz", section="ex2, tanh (half)")
def half_approximation(c: Lower, i: Instr, f: Match) -> None:
    wide = f.type.endswith("x2")
    name = f"approx.{f.form.name}_approx_{f.type.removesuffix('x2')}"
    value = c.src(i.operands[1], "u32" if wide else "u16")
    text = f"half.packed({name}, {{0}})" if wide else f"{name}({{0}})"
    c.dst(i.operands[0], c.pure(value.type, None, text, value))


@op(
    "testp",
    types="f32",
    flags="finite infinite number notanumber normal subnormal",
    section="testp",
)
def test_property(c: Lower, i: Instr, f: Match) -> None:
    value = c.src(i.operands[1], "f32")
    vector = {
        "finite": "np.isfinite({t0})",
        "infinite": "np.isinf({t0})",
        "number": "~np.isnan({t0})",
        "notanumber": "np.isnan({t0})",
        "normal": "np.isfinite({t0}) & ((np.abs({t0}) >= F32(2.0**-126)) | ({t0} == 0))",
        "subnormal": "({t0} != 0) & (np.abs({t0}) < F32(2.0**-126))",
    }[next(iter(f.flags))]
    c.dst(i.operands[0], c.pure("pred", None, vector, value))
