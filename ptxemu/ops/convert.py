"""cvt and its packed narrow-float forms: PTX ISA "cvt", "cvt.pack", "szext"."""

from __future__ import annotations

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op
from ptxemu.codegen.values import DTYPE, Value, constant
from ptxemu.syntax.tree import TYPE_BITS, Instr

_INT = "u8 s8 u16 s16 u32 s32 u64 s64"
_ROUND_INT = "rni rzi rmi rpi"
_INTEGRAL = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}
_ROUND = "rn rz rm rp rna"
_NARROW = "e4m3x2 e5m2x2 e2m1x2 e2m3x2 e3m2x2"
SIGN_8 = "(({0} & 0xff ^ 0x80) - 0x80)", "{0}.astype(np.int8).astype(I16)"


def narrow_source(c: Lower, operand: object, ptx_type: str) -> Value:
    """Return an integer operand, truncated to 8 bits if it has an 8-bit type."""
    if ptx_type == "u8":
        return c.low_byte(c.src(operand, "u16"))
    if ptx_type == "s8":
        return c.pure("s16", *SIGN_8, c.src(operand, "u16"))
    return c.src(operand, ptx_type)


def _range(ptx_type: str) -> tuple[int, int]:
    """The least and the greatest value of an integer type."""
    width = int(ptx_type[1:])
    if ptx_type[0] == "s":
        return -(1 << width - 1), (1 << width - 1) - 1
    return 0, (1 << width) - 1


@op("cvt", types=(_INT, _INT), flags="sat")
def integer_to_integer(c: Lower, i: Instr, f: Match) -> Value:
    target, source = f.types
    value = narrow_source(c, i.operands[1], source)
    width, signed = TYPE_BITS[target], target[0] == "s"
    if "sat" in f.flags:
        low, high = _range(target)
        value = c.pure(
            value.type, f"max(min({{0}}, {high}), {low})", f"clip_int({{0}}, {low}, {high})", value
        )
    if width == 8 and signed:
        return c.pure("s16", *SIGN_8, value)
    if width == 8:
        return c.pure("u16", "({0} & 0xff)", "({0} & 0xff).astype(U16)", value)
    masked = f"({{0}} & {(1 << width) - 1:#x})"
    scalar = f"signed{width}{masked}" if signed else masked
    return c.pure(target, scalar, f"{{0}}.astype({DTYPE[target]})", value)


@op("cvt", types=("f32 f64 f16 bf16", _INT), flags=_ROUND)
def integer_to_float(c: Lower, i: Instr, f: Match) -> Value:
    target, source = f.types
    value = narrow_source(c, i.operands[1], source)
    rounding = f.pick("rn", "rz", "rm", "rp", default="rn")
    kind = "u16" if target in ("f16", "bf16") else target
    return c.call(kind, f"formats.int_to_{target}", [value], f", '{rounding}'")


@op("cvt", types=(_INT, "f32 f64 f16 bf16"), flags=f"{_ROUND_INT} ftz sat")
def float_to_integer(c: Lower, i: Instr, f: Match) -> Value:
    target, source = f.types
    value = as_float(c, i.operands[1], source)
    if "ftz" in f.flags and value.type == "f32":
        value = c.pure("f32", None, "flush_f32({t0})", value)
    width = TYPE_BITS[target]
    rounding = f.pick(*_ROUND_INT.split(), default="rzi")
    kind = f"{target[0]}{max(width, 16)}"
    text = f"formats.float_to_int({{t0}}, {width}, {target[0] == 's'}, '{rounding}')"
    return c.pure(kind, None, f"{text}.astype({DTYPE[kind]})", value)


def as_float(c: Lower, operand: object, ptx_type: str) -> Value:
    """A float operand as f32, or f64 if it is one."""
    if ptx_type in ("f16", "bf16"):
        return c.call("f32", f"formats.{ptx_type}_to_f32", [c.src(operand, "u16")])
    return c.src(operand, ptx_type)


@op(
    "cvt",
    types=("f32 f64 f16 bf16 tf32", "f32 f64 f16 bf16"),
    flags=f"{_ROUND} {_ROUND_INT} ftz sat relu satfinite",
)
def float_to_float(c: Lower, i: Instr, f: Match) -> Value:
    """.ftz does nothing to an f16 result (neither F2F.F16.F32 of sm_90 nor that of sm_100 flushes),
    and gives an f32 or f64 one the canonical NaN, as the FADD.FTZ does that it stands for."""
    target, source = f.types
    if f.types == ("f64", "f16"):
        value = c.call("f64", "formats.f16_to_f64", [c.src(i.operands[1], "u16")])
    else:
        value = as_float(c, i.operands[1], source)
    if "ftz" in f.flags and value.type == "f64":
        rounding = f.pick(*_ROUND.split())
        value = c.pure("f64", None, f"arith.flush_result({{t0}}, '{rounding}')", value)
    if "ftz" in f.flags and value.type == "f32" and target != "f16":
        value = c.pure("f32", None, "formats.canonical_nan_f32(flush_f32({t0}))", value)
    whole = f.pick(*_ROUND_INT.split())
    if whole:
        text = f"formats.round_f32({{t0}}, '{whole}')"
        if value.type == "f64":
            text = f"{_INTEGRAL[whole]}({{t0}})"
        value = c.pure(value.type, None, text, value)
    if "sat" in f.flags:
        text = "np.where({0} > 0, np.minimum({0}, 1), 0).astype(np.asarray({0}).dtype)"
        value = c.pure(value.type, None, text, value)
    rounding = f.pick(*_ROUND.split(), default="rn")
    return _encode(c, value, target, rounding, f.keywords("relu", "satfinite"))


def _encode(c: Lower, value: Value, target: str, rounding: str, flags: str) -> Value:
    """f32 or f64 -> the target format."""
    if target == value.type:
        return value
    if target == "f64":
        return c.pure("f64", None, "{t0}.astype(F64)", value)
    if target == "f32":
        return c.pure("f32", None, f"formats.f64_to_f32({{t0}}, '{rounding}')", value)
    if value.type == "f64":
        return c.call("u16", f"formats.f64_to_{target}", [value], f", '{rounding}'")
    kind = "u32" if target == "tf32" else "u16"
    return c.call(kind, f"formats.f32_to_{target}", [value], f", '{rounding}'{flags}")


@op("cvt", types=("f16x2 bf16x2", "f32"), flags="rn rz relu satfinite")
def pack_halves(c: Lower, i: Instr, f: Match) -> Value:
    """d = {a, b}: the first source goes to the upper half."""
    name, flags = f.types[0].removesuffix("x2"), f.keywords("relu", "satfinite")
    call = f"formats.f32_to_{name}({{}}, '{f.pick('rn', 'rz')}'{flags})"
    text = f"pack16({call.format('{1}')}, {call.format('{0}')})"
    return c.pure("u32", None, text, *c.srcs(i.operands[1:3], "f32"))


@op("cvt", types=(_NARROW, "f32"), flags="rn satfinite relu")
def pack_narrow(c: Lower, i: Instr, f: Match) -> Value:
    """Two f32 -> two 8-bit codes in 16 bits (e2m1: two nibbles in 8); the first source is upper."""
    name, flag = f.types[0].removesuffix("x2"), f.keywords("relu")
    shift = 4 if name == "e2m1" else 8
    text = (
        f"(formats.f32_to_{name}({{1}}{flag}).astype(U16)"
        f" | formats.f32_to_{name}({{0}}{flag}).astype(U16) << {shift})"
    )
    return c.pure("u16", None, text, *c.srcs(i.operands[1:3], "f32"))


@op("cvt", types=("e4m3x2 e5m2x2", "f16x2 bf16x2"), flags="rn satfinite relu")
def repack_narrow(c: Lower, i: Instr, f: Match) -> Value:
    """Two 16-bit floats in one word -> two 8-bit codes in 16 bits, halves in place."""
    source, name = (t.removesuffix("x2") for t in reversed(f.types))
    flag = f.keywords("relu")
    low, high = (
        f"formats.f32_to_{name}(formats.{source}_to_f32(({{0}}{shift}).astype(U16)){flag}).astype(U16)"
        for shift in ("", " >> 16")
    )
    return c.pure("u16", None, f"({low} | {high} << 8)", c.src(i.operands[1], "u32"))


@op("cvt", types=("f16x2", _NARROW), flags="rn relu")
def unpack_narrow(c: Lower, i: Instr, f: Match) -> Value:
    """Two narrow codes -> two f16."""
    name, flag = f.types[1].removesuffix("x2"), f.keywords("relu")
    shift, mask = (4, 0xF) if name == "e2m1" else (8, 0xFF)
    low = f"formats.minifloat_to_f16({{0}} & {mask}, '{name}'{flag})"
    high = f"formats.minifloat_to_f16({{0}} >> {shift} & {mask}, '{name}'{flag})"
    return c.pure("u32", None, f"pack16({low}, {high})", c.src(i.operands[1], "u16"))


@op("cvt", types=("ue8m0x2", "f32"), flags="rz rp satfinite")
def pack_scales(c: Lower, i: Instr, f: Match) -> Value:
    flags = f.keywords("satfinite")
    call = f"formats.f32_to_ue8m0({{}}, '{f.pick('rz', 'rp')}'{flags}).astype(U16)"
    text = f"({call.format('{1}')} | {call.format('{0}')} << 8)"
    return c.pure("u16", None, text, *c.srcs(i.operands[1:3], "f32"))


@op("cvt", types=("bf16x2", "ue8m0x2"), flags="rn")
def unpack_scales(c: Lower, i: Instr, f: Match) -> Value:
    text = "pack16(formats.ue8m0_to_bf16({0} & 0xff), formats.ue8m0_to_bf16({0} >> 8))"
    return c.pure("u32", None, text, c.src(i.operands[1], "u16"))


@op("cvt.pack", types=("u16 s16", "s32"), flags="sat")
@op("cvt.pack", types=("u8 s8 u4 s4 u2 s2", "s32", "b32"), flags="sat")
def pack_saturated(c: Lower, i: Instr, f: Match) -> Value:
    """a above b, both saturated; narrow forms shift a third source in above them."""
    width, (low, high) = int(f.types[0][1:]), _range(f.types[0])
    clipped = f"(clip_int({{}}, {low}, {high}).astype(U32) & {(1 << width) - 1:#x})"
    text = f"({clipped.format('{t0}')} << {width} | {clipped.format('{t1}')})"
    out = c.pure("u32", None, text, *c.srcs(i.operands[1:3], "s32"))
    if width < 16:
        rest, shift = c.src(i.operands[3], "u32"), 2 * width
        scalar, vector = f"({{0}} | {{1}} << {shift} & 0xffffffff)", f"{{0}} | {{t1}} << {shift}"
        out = c.pure("u32", scalar, vector, out, rest)
    return out


@op("cvt", types=("bf16x2", f"s2f6x2 {_NARROW}"), flags="rn satfinite relu scaled::n2::ue8m0")
def unpack_scaled(c: Lower, i: Instr, f: Match) -> Value:
    """Two narrow codes, each times the ue8m0 scale in the same place, to bf16."""
    name = f.types[1].removesuffix("x2")
    codes = c.src(i.operands[1], "u16")
    scales = c.src(i.operands[2], "u16") if len(i.operands) > 2 else constant(0x7F7F, "u16")
    shift, mask = (4, 0xF) if name == "e2m1" else (8, 0xFF)
    part = (
        f"formats.f32_to_bf16(formats.{name}_to_f32(({{{{0}}}} >> {{at}} & {mask})"
        ".astype(np.uint8)) * formats.ue8m0_to_f32({{t1}} >> {n} & 0xff)"
        f"{f.keywords('relu', 'satfinite')})"
    )
    low, high = part.format(at=0, n=0), part.format(at=shift, n=8)
    return c.pure("u32", None, f"pack16({low}, {high})", codes, scales)
