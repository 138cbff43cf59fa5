"""Less common integer instructions: PTX ISA "Integer Arithmetic" (sad, mul24, mad24, dp4a, dp2a,
bfind, fns, bmsk, szext, saturating forms) and "Extended-Precision Integer Arithmetic" (carry
chains).

The arithmetic itself is `ptxemu.numerics.integers`. The carry flag is a hidden register.
"""

from __future__ import annotations

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op
from ptxemu.codegen.values import Value, constant
from ptxemu.ops.integers import product, unsigned
from ptxemu.syntax.tree import CARRY, TYPE_BITS, Instr, Reg

_INT = "u16 s16 u32 s32 u64 s64"
_EXTENDED = "u32 s32 u64 s64"


def _call(c: Lower, kind: str, name: str, values: list[Value], options: str = "") -> Value:
    fields = ", ".join(f"{{{k}}}" for k in range(len(values)))
    return c.pure(kind, None, f"integers.{name}({fields}{options})", *values)


def _signed(f: Match) -> str:
    return f", signed={f.type[0] == 's'}"


@op("sad", types=_INT, section="sad")
def absolute_difference(c: Lower, i: Instr, f: Match) -> None:
    kind = unsigned(f.type)
    values = [c.src(operand, kind) for operand in i.operands[1:]]
    c.dst(i.operands[0], _call(c, kind, "sad", values, f", width={TYPE_BITS[f.type]}{_signed(f)}"))


@op("add sub", types="s32", flags="sat", section="add, sub")
def saturating(c: Lower, i: Instr, f: Match) -> None:
    values = [c.src(operand, "u32") for operand in i.operands[1:]]
    c.dst(i.operands[0], _call(c, "u32", f"{f.form.name}_sat", values))


@op("mad", types="s32", flags="hi sat", section="mad")
def saturating_multiply_add(c: Lower, i: Instr, f: Match) -> None:
    upper = c.convert(product(c, f, *i.operands[1:3]), "u32")
    c.dst(i.operands[0], _call(c, "u32", "add_sat", [upper, c.src(i.operands[3], "u32")]))


@op("mul24 mad24", types="u32 s32", flags="lo hi", section="mul24, mad24")
def multiply24(c: Lower, i: Instr, f: Match) -> None:
    values = [c.src(operand, "u32") for operand in i.operands[1:]]
    out = _call(c, "u32", "mul24", values[:2], f", high={'hi' in f.flags}{_signed(f)}")
    if f.form.name == "mad24":
        out = c.pure("u32", "({0} + {1} & 0xffffffff)", "{0} + {1}", out, values[2])
    c.dst(i.operands[0], out)


@op("dp4a dp2a", types=("u32 s32", "u32 s32"), flags="lo hi", section="dp4a, dp2a")
def dot_product(c: Lower, i: Instr, f: Match) -> None:
    values = [c.src(operand, "u32") for operand in i.operands[1:]]
    options = f", signed={tuple(t[0] == 's' for t in f.types)}"
    if f.form.name == "dp2a":
        options += f", high={'hi' in f.flags}"
    c.dst(i.operands[0], _call(c, "u32", f.form.name, values, options))


@op("bfind", types=_EXTENDED, flags="shiftamt", section="bfind")
def find_leading(c: Lower, i: Instr, f: Match) -> None:
    value = c.src(i.operands[1], unsigned(f.type))
    options = f", width={TYPE_BITS[f.type]}{_signed(f)}, shiftamt={'shiftamt' in f.flags}"
    c.dst(i.operands[0], _call(c, "u32", "bfind", [value], options))


@op("fns", types="b32", section="fns")
def find_nth(c: Lower, i: Instr, f: Match) -> None:
    c.dst(i.operands[0], _call(c, "u32", "fns", [c.src(x, "u32") for x in i.operands[1:]]))


@op("bmsk", types="b32", flags="clamp wrap", section="bmsk")
def bit_mask(c: Lower, i: Instr, f: Match) -> None:
    values = [c.src(operand, "u32") for operand in i.operands[1:]]
    c.dst(i.operands[0], _call(c, "u32", "bmsk", values, f", wrap={'wrap' in f.flags}"))


@op("szext", types="u32 s32", flags="clamp wrap", section="szext")
def extend(c: Lower, i: Instr, f: Match) -> None:
    values = [c.src(operand, "u32") for operand in i.operands[1:]]
    options = f"{_signed(f)}, wrap={'wrap' in f.flags}"
    c.dst(i.operands[0], _call(c, "u32", "szext", values, options))


# -- carry chains ---------------------------------------------------------------------------


@op("add.cc addc addc.cc", types=_EXTENDED, section="add.cc, addc")
def add_with_carry(c: Lower, i: Instr, f: Match) -> None:
    _chain(c, i, f, "add_carry", [c.src(operand, unsigned(f.type)) for operand in i.operands[1:]])


@op("sub.cc subc subc.cc", types=_EXTENDED, section="sub.cc, subc")
def subtract_with_borrow(c: Lower, i: Instr, f: Match) -> None:
    _chain(c, i, f, "sub_borrow", [c.src(operand, unsigned(f.type)) for operand in i.operands[1:]])


@op("mad madc", types=_EXTENDED, flags="lo hi cc", section="mad.cc, madc")
def multiply_add_with_carry(c: Lower, i: Instr, f: Match) -> None:
    kind = unsigned(f.type)
    part = c.convert(product(c, f, *i.operands[1:3]), kind)
    _chain(c, i, f, "add_carry", [part, c.src(i.operands[3], kind)])


def _chain(c: Lower, i: Instr, f: Match, name: str, values: list[Value]) -> None:
    """The result, and with .cc the carry-out; addc, subc and madc take the carry in."""
    kind = unsigned(f.type)
    takes = i.root in ("addc", "subc", "madc")
    carry = c.src(Reg(CARRY), kind) if takes else constant(0, kind)
    call = f"integers.{name}({{0}}, {{1}}, {{2}}, width={TYPE_BITS[f.type]})"
    total, out = (c.pure(kind, None, f"{call}[{k}]", *values, carry) for k in (0, 1))
    c.dst(i.operands[0], total)
    if "cc" in i.parts:
        c.dst(Reg(CARRY), out)
