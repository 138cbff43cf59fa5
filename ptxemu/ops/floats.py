"""Floating-point arithmetic: PTX ISA "Floating Point", "Half Precision" and "Mixed Precision"
instructions.

Every result is rounded once and NaNs are canonical; the arithmetic itself is `ptxemu.numerics`.
Packed f32x2 is two f32 operations on the halves of a 64-bit register.
"""

from __future__ import annotations

from ptxemu.codegen.lower import Lower, fields
from ptxemu.codegen.registry import Match, op
from ptxemu.codegen.values import Value
from ptxemu.errors import UnsupportedPtx
from ptxemu.ops.convert import as_float
from ptxemu.syntax.tree import Instr

_ROUND = "rn rz rm rp"
_ARITH = f"{_ROUND} ftz sat"
_F16, _BF16 = "f16 f16x2", "bf16 bf16x2"
_HALF = f"{_F16} {_BF16}"
# uniform templates of the plain rn forms; anything else runs the array function on one element
_SCALAR = {
    "add": "round32({0} + {1})",
    "sub": "round32({0} - {1})",
    "mul": "round32({0} * {1})",
    "neg": "(-{0} if {0} == {0} else NAN)",
    "abs": "(abs({0}) if {0} == {0} else NAN)",
}


def _keywords(f: Match) -> str:
    """Return the arguments of the numerics function in addition to the operands."""
    rounding = f.pick("rz", "rm", "rp")
    text = f", '{rounding}'" if rounding else ""
    text += f.keywords("ftz", "sat", "relu")
    if "NaN" in f.flags:
        text += ", nan=True"
    if "xorsign" in f.flags:
        text += ", xorsign_abs=True"
    elif "abs" in f.flags:
        text += ", absolute=True"
    return text


def _f32(c: Lower, name: str, values: list[Value], keywords: str) -> Value:
    scalar = None if keywords else _SCALAR.get(name)
    return c.pure("f32", scalar, f"arith.{name}_f32({fields(values)}{keywords})", *values)


@op("add sub mul fma", types="f32", flags=_ARITH)
@op("mad", types="f32", flags=_ARITH)
@op("min max", types="f32", flags="ftz NaN xorsign abs")
@op("neg abs", types="f32", flags="ftz")
def arithmetic(c: Lower, i: Instr, f: Match) -> Value:
    name = f.form.name.replace("mad", "fma")
    return _f32(c, name, c.srcs(i.operands[1:], "f32"), _keywords(f))


@op("add sub mul fma", types="f32x2", flags=f"{_ROUND} ftz", section="add, sub, mul, fma (f32x2)")
def packed_arithmetic(c: Lower, i: Instr, f: Match) -> tuple[Value, Value]:
    pairs = [c.halves(operand, "f32") for operand in i.operands[1:]]
    low, high = (_f32(c, f.form.name, [*half], _keywords(f)) for half in zip(*pairs, strict=True))
    return low, high


@op("add sub mul fma", types="f64", flags=_ROUND, section="add, sub, mul, fma (f64)")
@op("mad", types="f64", flags=_ROUND, section="mad (f64)")
def double_arithmetic(c: Lower, i: Instr, f: Match) -> Value:
    values, name = c.srcs(i.operands[1:], "f64"), f.form.name.replace("mad", "fma")
    return c.call("f64", f"arith.{name}_f64", values, _keywords(f))


@op("min max", types="f64")
@op("neg abs", types="f64")
@op("div rcp sqrt", types="f64", flags=_ROUND, section="div, rcp, sqrt (f64)")
def double_function(c: Lower, i: Instr, f: Match) -> Value:
    if f.pick("rz", "rm", "rp"):
        values = c.srcs(i.operands[1:], "f64")
        return c.call("f64", f"arith.{f.form.name}_f64", values, _keywords(f))
    text = {
        "min": "arith.minmax_f64('min', {t0}, {t1})",
        "max": "arith.minmax_f64('max', {t0}, {t1})",
        "neg": "arith.neg_f64({t0})",
        "abs": "arith.abs_f64({t0})",
        "div": "{t0} / {t1}",
        "rcp": "1 / {t0}",
        "sqrt": "np.sqrt({t0})",
    }[f.form.name]
    return c.pure("f64", None, text, *c.srcs(i.operands[1:], "f64"))


@op("rcp rsqrt", types="f64", flags="approx ftz", section="rcp.approx.ftz.f64, rsqrt")
def upper_approximation(c: Lower, i: Instr, f: Match) -> Value:
    """Start of an iteration in f64, such as that of a division in libdevice."""
    if "approx" not in f.flags or (f.form.name == "rcp" and "ftz" not in f.flags):
        raise UnsupportedPtx(f"unsupported form of {i.root} {i.opcode!r}", line=i.line, text=i.text)
    value = c.src(i.operands[1], "f64")
    if "ftz" not in f.flags:  # software on a GPU, which is as good as f64 is
        return c.pure("f64", None, "1 / np.sqrt({t0})", value)
    return c.call("f64", f"approx.upper_{f.form.name}_f64", [value])


@op("add sub mul", types=_F16, flags="rn ftz sat", section="add, sub, mul (half)")
@op("add sub mul", types=_BF16, flags="rn", section="add, sub, mul (half)")
@op("fma", types=_F16, flags="rn ftz sat", section="fma (half)")
@op("fma", types=_F16, flags="rn ftz relu", section="fma (half)")
@op("fma", types=_BF16, flags="rn relu", section="fma (half)")
@op("min max", types=_F16, flags="ftz NaN xorsign abs", section="min, max (half)")
@op("min max", types=_BF16, flags="NaN xorsign abs", section="min, max (half)")
@op("neg abs", types=_F16, flags="ftz", section="neg, abs (half)")
@op("neg abs", types=_BF16, section="neg, abs (half)")
def half_arithmetic(c: Lower, i: Instr, f: Match) -> Value:
    """Half arithmetic. bf16 has no .ftz and no .sat; only fma has .relu, without .sat.

    ptxas refuses the other combinations.
    """
    return _half(c, i, f, f"arith.{f.form.name}", _keywords(f))


@op("ex2", types=_F16, flags="approx", section="ex2, tanh (half)")
@op("ex2", types=_BF16, flags="approx ftz", section="ex2, tanh (half)")
@op("tanh", types=_HALF, flags="approx", section="ex2, tanh (half)")
def half_approximation(c: Lower, i: Instr, f: Match) -> Value:
    return _half(c, i, f, f"approx.{f.form.name}_approx", "")


def _half(c: Lower, i: Instr, f: Match, name: str, keywords: str) -> Value:
    """A function of 16-bit codes, for packed types applied to both halves of words."""
    function = f"{name}_{f.type.removesuffix('x2')}"
    if f.type.endswith("x2"):
        values = c.srcs(i.operands[1:], "u32")
        text = f"arith.packed({function}, {fields(values)}{keywords})"
        return c.pure("u32", None, text, *values)
    return c.call("u16", function, c.srcs(i.operands[1:], "u16"), keywords)


@op(
    "add sub fma", types=("f32", "f16 bf16"), flags=_ARITH, section="Mixed Precision: add, sub, fma"
)
def mixed_arithmetic(c: Lower, i: Instr, f: Match) -> Value:
    """add/sub: a narrow operand and an f32 one; fma: two narrow ones and an f32 addend."""
    *narrow, wide = i.operands[1:]
    values = [*(as_float(c, operand, f.types[1]) for operand in narrow), c.src(wide, "f32")]
    return c.call("f32", f"arith.{f.form.name}_f32", values, _keywords(f))


@op("copysign", types="f32")
def copy_sign(c: Lower, i: Instr, f: Match) -> Value:
    """The sign of a with the magnitude of b."""
    text = "{0} & 0x80000000 | {1} & 0x7fffffff"
    return c.pure("u32", f"({text})", text, *c.srcs(i.operands[1:], "u32"))


@op("copysign", types="f64", section="copysign (f64)")
def copy_sign_double(c: Lower, i: Instr, f: Match) -> Value:
    sign, rest = f"{1 << 63:#x}", f"{(1 << 63) - 1:#x}"
    scalar, vector = (
        f"({{0}} & {sign} | {{1}} & {rest})",
        f"{{0}} & U64({sign}) | {{1}} & U64({rest})",
    )
    return c.pure("u64", scalar, vector, *c.srcs(i.operands[1:], "u64"))


@op("div", types="f32", flags=f"{_ROUND} ftz approx full")
@op("rcp sqrt", types="f32", flags=f"{_ROUND} ftz approx")
@op("ex2 lg2 rsqrt sin cos tanh", types="f32", flags="approx ftz")
def approximation(c: Lower, i: Instr, f: Match) -> Value:
    """Emit a function; division, reciprocal and root are exact without .approx and .full."""
    how = f.pick("approx", "full")
    function = f"approx.{f.form.name}_{how or 'approx'}"
    if not how and f.form.name in ("div", "rcp", "sqrt"):
        function = f"arith.{f.form.name}_f32"
    return c.call("f32", function, c.srcs(i.operands[1:], "f32"), _keywords(f))


@op("testp", types="f32 f64", flags="finite infinite number notanumber normal subnormal")
def test_property(c: Lower, i: Instr, f: Match) -> Value:
    least = {"f32": "F32(2.0**-126)", "f64": "F64(2.0**-1022)"}[f.type]
    vector = {
        "finite": "np.isfinite({t0})",
        "infinite": "np.isinf({t0})",
        "number": "~np.isnan({t0})",
        "notanumber": "np.isnan({t0})",
        "normal": f"np.isfinite({{t0}}) & ((np.abs({{t0}}) >= {least}) | ({{t0}} == 0))",
        "subnormal": f"({{t0}} != 0) & (np.abs({{t0}}) < {least})",
    }[next(iter(f.flags))]
    return c.pure("pred", None, vector, c.src(i.operands[1], f.type))
