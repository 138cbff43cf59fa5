"""Integer arithmetic and bit operations: PTX ISA "Integer Arithmetic Instructions", "Logic and
Shift", "Extended-Precision Integer Arithmetic" (carry chains).

Results wrap at the type's width. Templates are (on Python ints, on numpy arrays); what takes more
is a function of `ptxemu.numerics.integers`. The carry flag is a hidden register.
"""

from __future__ import annotations

import re

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op
from ptxemu.codegen.values import DTYPE, Value, constant
from ptxemu.errors import UnsupportedPtx
from ptxemu.syntax.tree import CARRY, TYPE_BITS, Imm, Instr, Reg

_INT = "u16 s16 u32 s32 u64 s64"
_PERMUTE_MODES = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")


def unsigned(ptx_type: str) -> str:
    return f"u{TYPE_BITS[ptx_type]}"


def mask_of(ptx_type: str) -> str:
    """The literal of all bits of a type."""
    return f"{(1 << TYPE_BITS[ptx_type]) - 1:#x}"


def is_signed(f: Match) -> bool:
    return f.type[0] == "s"


def wrapping(c: Lower, ptx_type: str, scalar: str, vector: str, *operands: object) -> Value:
    """An operation on the unsigned bits, wrapped to the width."""
    kind = unsigned(ptx_type)
    return c.pure(kind, f"(({scalar}) & {mask_of(ptx_type)})", vector, *c.srcs(operands, kind))


@op("add", types=_INT)
def add(c: Lower, i: Instr, f: Match) -> Value:
    return wrapping(c, f.type, "{0} + {1}", "{0} + {1}", *i.operands[1:])


@op("sub", types=_INT)
def sub(c: Lower, i: Instr, f: Match) -> Value:
    return wrapping(c, f.type, "{0} - {1}", "{t0} - {t1}", *i.operands[1:])


def product(c: Lower, f: Match, a: object, b: object) -> Value:
    """mul and mad's product: .lo wraps, .wide doubles the width, .hi keeps the upper half."""
    width, kind, wide = TYPE_BITS[f.type], f.type, f"{f.type[0]}{2 * TYPE_BITS[f.type]}"
    if "lo" in f.flags:
        return wrapping(c, f.type, "{0} * {1}", "{t0} * {t1}", a, b)
    if "wide" in f.flags:
        kind, scalar = wide, "({0} * {1})"
        vector = f"np.multiply({{0}}, {{1}}, dtype={DTYPE[wide]})"
    elif "hi" in f.flags:
        scalar = f"({{0}} * {{1}} >> {width})"
        if width <= 32:
            vector = f"(np.multiply({{0}}, {{1}}, dtype={DTYPE[wide]}) >> {width})"
        else:
            vector = f"integers.mul_hi({{0}}, {{1}}, width=64, signed={is_signed(f)})"
        vector += f".astype({DTYPE[kind]})"
    else:
        raise UnsupportedPtx("mul/mad needs .lo, .hi or .wide")
    return c.pure(kind, scalar, vector, *c.srcs((a, b), f.type))


@op("mul", types=_INT, flags="lo hi wide")
def mul(c: Lower, i: Instr, f: Match) -> Value:
    return product(c, f, *i.operands[1:])


@op("mad", types=_INT, flags="lo hi wide")
def mad(c: Lower, i: Instr, f: Match) -> Value:
    low = product(c, f, *i.operands[1:3])
    kind = unsigned(low.type)
    low = c.convert(low, kind)
    addend = c.src(i.operands[3], kind)
    return c.pure(kind, f"({{0}} + {{1}} & {mask_of(kind)})", "{0} + {1}", low, addend)


@op("div", types=_INT)
@op("rem", types=_INT)
def divide(c: Lower, i: Instr, f: Match) -> Value:
    """Truncating division; by zero: all ones (unspecified by the manual)."""
    kind = unsigned(f.type)
    options = f"width={TYPE_BITS[f.type]}, signed={is_signed(f)}"
    text = f"integers.{f.form.name}({{0}}, {{1}}, {options})"
    return c.pure(kind, text, text, *c.srcs(i.operands[1:], kind))


@op("min", types=_INT, flags="relu")
@op("max", types=_INT, flags="relu")
def extreme(c: Lower, i: Instr, f: Match) -> Value:
    name, values = f.form.name, c.srcs(i.operands[1:], f.type)
    out = c.pure(f.type, f"{name}({{0}}, {{1}})", f"np.{name}imum({{t0}}, {{t1}})", *values)
    if "relu" in f.flags:
        out = c.pure(f.type, "max({0}, 0)", "np.maximum({0}, 0)", out)
    return out


@op("add", types="u16x2 s16x2", section="add")
@op("min max", types="u16x2", section="min, max")
@op("min max", types="s16x2", flags="relu", section="min, max")
def packed_halves(c: Lower, i: Instr, f: Match) -> Value:
    """The halves of 32 bits on their own."""
    options = f", '{f.form.name}', signed={is_signed(f)}{f.keywords('relu')}"
    return c.call("u32", "integers.halves", c.srcs(i.operands[1:], "u32"), options)


@op("abs", types="s16 s32 s64")
@op("neg", types="s16 s32 s64")
def change_sign(c: Lower, i: Instr, f: Match) -> Value:
    """A result that may be 2^(width-1) is one of unsigned bits."""
    kind, value = unsigned(f.type), c.src(i.operands[1], f.type)
    scalar, vector = {"abs": ("abs({0})", "np.abs({0})"), "neg": ("-{0}", "-{0}")}[f.form.name]
    scalar = f"(({scalar}) & {mask_of(f.type)})"
    return c.pure(kind, scalar, f"({vector}).view({DTYPE[kind]})", value)


# -- logic and shift ------------------------------------------------------------------------

_BITS = "b16 b32 b64"


def _bits_of(ptx_type: str) -> str:
    return "pred" if ptx_type == "pred" else unsigned(ptx_type)


@op("and or xor", types=f"pred {_BITS}")
def logic(c: Lower, i: Instr, f: Match) -> Value:
    symbol = {"and": "&", "or": "|", "xor": "^"}[f.form.name]
    kind, text = _bits_of(f.type), f"{{0}} {symbol} {{1}}"
    return c.pure(kind, f"({text})", text, *c.srcs(i.operands[1:], kind))


@op("not", types=f"pred {_BITS}")
def invert(c: Lower, i: Instr, f: Match) -> Value:
    kind = _bits_of(f.type)
    scalar = "(not {0})" if kind == "pred" else f"({{0}} ^ {mask_of(f.type)})"
    return c.pure(kind, scalar, "~{0}", c.src(i.operands[1], kind))


@op("cnot", types=_BITS)
def logical_not(c: Lower, i: Instr, f: Match) -> Value:
    kind = unsigned(f.type)
    vector = f"({{0}} == 0).astype({DTYPE[kind]})"
    return c.pure(kind, "int({0} == 0)", vector, c.src(i.operands[1], kind))


@op("shl", types=_BITS)
@op("shr", types=f"{_BITS} {_INT}")
def shift(c: Lower, i: Instr, f: Match) -> Value:
    """Amounts above the width act as the width: zeros, or copies of the sign."""
    left, kind, width = f.form.name == "shl", f.type.replace("b", "u"), TYPE_BITS[f.type]
    symbol, wrap = ("<<", f" & {mask_of(f.type)}") if left else (">>", "")
    value = c.src(i.operands[1], kind)
    if isinstance(i.operands[2], Imm) and 0 <= i.operands[2].value < width:
        amount = i.operands[2].value
        return c.pure(kind, f"({{0}} {symbol} {amount}{wrap})", f"{{0}} {symbol} {amount}", value)
    scalar = f"({{0}} {symbol} min({{1}}, {width}){wrap})"
    scalar += f" & {mask_of(f.type)}" if is_signed(f) else ""
    options = f"width={width}" + (", signed=True" if is_signed(f) else "")
    vector = f"integers.{f.form.name}({{0}}, np.minimum({{1}}, {width}), {options})"
    return c.pure(unsigned(kind), scalar, vector, value, c.src(i.operands[2], "u32"))


@op("shf.l shf.r", types="b32", flags="wrap clamp", section="shf")
def funnel(c: Lower, i: Instr, f: Match) -> Value:
    """The upper (l) or lower (r) word of the 64-bit value b:a shifted."""
    low, high, amount = c.srcs(i.operands[1:], "u32")
    if "wrap" in f.flags:
        amount = c.pure("u32", "({0} & 31)", "{0} & 31", amount)
    else:
        amount = c.pure("u32", "min({0}, 32)", "np.minimum({0}, 32)", amount)
    scalar, vector = "({0} >> {1})", "{t0} >> {t1}.astype(U64)"
    if f.form.name == "shf.l":
        scalar, vector = "({0} << {1} >> 32 & 0xffffffff)", "{t0} << {t1}.astype(U64) >> 32"
    return c.convert(c.pure("u64", scalar, vector, c.join(low, high), amount), "u32")


@op("lop3", types="b32")
def lop3(c: Lower, i: Instr, f: Match) -> Value:
    """Any function of three bits, as the or of its minterms."""
    return _looked_up(c, i)


@op("lop3.and lop3.or", types="b32", section="lop3")
def lop3_with_predicate(c: Lower, i: Instr, f: Match) -> None:
    """d|p: p is whether d is not zero, combined with a predicate."""
    word, predicate = c.both(i.operands[0])
    found = _looked_up(c, i)
    some = c.pure("pred", "({0} != 0)", "{0} != 0", found)
    text = "({0} & {1})" if f.form.name == "lop3.and" else "({0} | {1})"
    joined = c.pure("pred", text, text, some, c.src(i.operands[5], "pred"))
    c.dst(word, found)
    c.dst(predicate, joined)


def _looked_up(c: Lower, i: Instr) -> Value:
    table = i.operands[4].value
    terms = []
    for k in range(8):
        if table >> k & 1:
            a, b, d = (f"{'' if k >> s & 1 else '~'}{{{n}}}" for n, s in ((0, 2), (1, 1), (2, 0)))
            terms.append(f"({a} & {b} & {d})")
    if not terms:
        return constant(0, "u32")
    text = " | ".join(terms)
    values = c.srcs(i.operands[1:4], "u32")
    return c.pure("u32", f"(({text}) & 0xffffffff)", re.sub(r"{(\d)}", r"{t\1}", text), *values)


@op("popc clz", types="b32 b64")
def count_bits(c: Lower, i: Instr, f: Match) -> Value:
    width = TYPE_BITS[f.type]
    scalar, vector = "{0}.bit_count()", "np.bitwise_count({0}).astype(U32)"
    if f.form.name == "clz":
        scalar = f"({width} - {{0}}.bit_length())"
        vector = f"integers.clz({{0}}, width={width}).astype(U32)"
    return c.pure("u32", scalar, vector, c.src(i.operands[1], unsigned(f.type)))


@op("brev", types="b32 b64")
def reverse_bits(c: Lower, i: Instr, f: Match) -> Value:
    kind = unsigned(f.type)
    value = c.src(i.operands[1], kind)
    return c.call(kind, "integers.brev", [value], f", width={TYPE_BITS[f.type]}")


@op("bfe", types="u32 s32 u64 s64")
def extract(c: Lower, i: Instr, f: Match) -> Value:
    values = [c.src(i.operands[1], f.type), *c.srcs(i.operands[2:], "u32")]
    options = f", width={TYPE_BITS[f.type]}, signed={is_signed(f)}"
    return c.call(unsigned(f.type), "integers.bfe", values, options)


@op("bfi", types="b32 b64")
def insert(c: Lower, i: Instr, f: Match) -> Value:
    kind = unsigned(f.type)
    values = c.srcs(i.operands[1:3], kind) + c.srcs(i.operands[3:], "u32")
    return c.call(kind, "integers.bfi", values, f", width={TYPE_BITS[f.type]}")


@op("prmt", types="b32")
@op(" ".join(f"prmt.b32.{mode}" for mode in _PERMUTE_MODES), section="prmt")
def permute(c: Lower, i: Instr, f: Match) -> Value:
    mode = f.form.name.removeprefix("prmt").removeprefix(".b32.")
    values = c.srcs(i.operands[1:], "u32")
    return c.call("u32", "integers.prmt", values, f", mode='{mode}'")


# -- less common ones ------------------------------------------------------------------------


_EXTENDED = "u32 s32 u64 s64"


def _call(c: Lower, f: Match, values: list[Value], options: str = "", name: str = "") -> Value:
    """The function of the opcode's name, on 32 bits."""
    return c.call("u32", f"integers.{name or f.form.name}", values, options)


@op("sad", types=_INT)
def absolute_difference(c: Lower, i: Instr, f: Match) -> Value:
    kind = unsigned(f.type)
    options = f", width={TYPE_BITS[f.type]}, signed={is_signed(f)}"
    return c.call(kind, "integers.sad", c.srcs(i.operands[1:], kind), options)


@op("add sub", types="s32", flags="sat")
def saturating(c: Lower, i: Instr, f: Match) -> Value:
    return _call(c, f, c.srcs(i.operands[1:], "u32"), name=f"{f.form.name}_sat")


@op("mad", types="s32", flags="hi sat")
def saturating_multiply_add(c: Lower, i: Instr, f: Match) -> Value:
    upper = c.convert(product(c, f, *i.operands[1:3]), "u32")
    return _call(c, f, [upper, c.src(i.operands[3], "u32")], name="add_sat")


@op("mul24 mad24", types="u32 s32", flags="lo hi")
@op("mad24", types="s32", flags="hi sat")
def multiply24(c: Lower, i: Instr, f: Match) -> Value:
    a, b, *addend = c.srcs(i.operands[1:], "u32")
    out = _call(c, f, [a, b], f", high={'hi' in f.flags}, signed={is_signed(f)}", "mul24")
    if "sat" in f.flags:
        return _call(c, f, [out, *addend], name="add_sat")
    if f.form.name == "mad24":
        out = c.pure("u32", "({0} + {1} & 0xffffffff)", "{0} + {1}", out, *addend)
    return out


@op("dp4a dp2a", types=("u32 s32", "u32 s32"), flags="lo hi")
def dot_product(c: Lower, i: Instr, f: Match) -> Value:
    options = f", signed={tuple(t[0] == 's' for t in f.types)}"
    if f.form.name == "dp2a":
        options += f", high={'hi' in f.flags}"
    return _call(c, f, c.srcs(i.operands[1:], "u32"), options)


@op("bfind", types=_EXTENDED, flags="shiftamt")
def find_leading(c: Lower, i: Instr, f: Match) -> Value:
    options = f", width={TYPE_BITS[f.type]}, signed={is_signed(f)}"
    options += f", shiftamt={'shiftamt' in f.flags}"
    return _call(c, f, [c.src(i.operands[1], unsigned(f.type))], options)


@op("fns", types="b32")
def find_nth(c: Lower, i: Instr, f: Match) -> Value:
    return _call(c, f, c.srcs(i.operands[1:], "u32"))


@op("bmsk", types="b32", flags="clamp wrap")
def bit_mask(c: Lower, i: Instr, f: Match) -> Value:
    return _call(c, f, c.srcs(i.operands[1:], "u32"), f", wrap={'wrap' in f.flags}")


@op("szext", types="u32 s32", flags="clamp wrap")
def extend(c: Lower, i: Instr, f: Match) -> Value:
    options = f", signed={is_signed(f)}, wrap={'wrap' in f.flags}"
    return _call(c, f, c.srcs(i.operands[1:], "u32"), options)


# -- carry chains ---------------------------------------------------------------------------


@op("add.cc addc addc.cc", types=_EXTENDED, section="add.cc, addc")
def add_with_carry(c: Lower, i: Instr, f: Match) -> Value:
    return _chain(c, i, f, "add_carry", c.srcs(i.operands[1:], unsigned(f.type)))


@op("sub.cc subc subc.cc", types=_EXTENDED, section="sub.cc, subc")
def subtract_with_borrow(c: Lower, i: Instr, f: Match) -> Value:
    return _chain(c, i, f, "sub_borrow", c.srcs(i.operands[1:], unsigned(f.type)))


@op("mad madc", types=_EXTENDED, flags="lo hi cc", section="mad.cc, madc")
def multiply_add_with_carry(c: Lower, i: Instr, f: Match) -> Value:
    kind = unsigned(f.type)
    part = c.convert(product(c, f, *i.operands[1:3]), kind)
    return _chain(c, i, f, "add_carry", [part, c.src(i.operands[3], kind)])


def _chain(c: Lower, i: Instr, f: Match, name: str, values: list[Value]) -> Value:
    """The result, and with .cc the carry-out; addc, subc and madc take the carry in."""
    kind = unsigned(f.type)
    takes = i.root in ("addc", "subc", "madc")
    carry = c.src(Reg(CARRY), kind) if takes else constant(0, kind)
    call = f"integers.{name}({{0}}, {{1}}, {{2}}, width={TYPE_BITS[f.type]})"
    total, out = (c.pure(kind, None, f"{call}[{k}]", *values, carry) for k in (0, 1))
    if "cc" in i.parts:
        c.dst(Reg(CARRY), out)
    return total
