"""Integer arithmetic and bit operations: PTX ISA "Integer Arithmetic Instructions", "Logic and
Shift".

Results wrap at the type's width. Templates are (on Python ints, on numpy arrays); `MASK` stands for
the width's mask.
"""

from __future__ import annotations

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op
from ptxemu.codegen.values import DTYPE, Value, constant
from ptxemu.errors import UnsupportedPtx
from ptxemu.syntax.tree import TYPE_BITS, Imm, Instr

_INT = "u16 s16 u32 s32 u64 s64"
_PERMUTE_MODES = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")


def unsigned(ptx_type: str) -> str:
    return f"u{TYPE_BITS[ptx_type]}"


def wrapping(c: Lower, ptx_type: str, scalar: str, vector: str, *operands: object) -> Value:
    """An operation on the unsigned bits, wrapped to the width."""
    kind = unsigned(ptx_type)
    mask = f"{(1 << TYPE_BITS[ptx_type]) - 1:#x}"
    values = [c.src(operand, kind) for operand in operands]
    return c.pure(kind, f"(({scalar}) & {mask})", vector, *values)


@op("add", types=_INT, section="add")
def add(c: Lower, i: Instr, f: Match) -> None:
    c.dst(i.operands[0], wrapping(c, f.type, "{0} + {1}", "{0} + {1}", *i.operands[1:]))


@op("sub", types=_INT, section="sub")
def sub(c: Lower, i: Instr, f: Match) -> None:
    c.dst(i.operands[0], wrapping(c, f.type, "{0} - {1}", "{t0} - {t1}", *i.operands[1:]))


def product(c: Lower, f: Match, a: object, b: object) -> Value:
    """mul and mad's product: .lo wraps, .wide doubles the width, .hi keeps the upper half."""
    width = TYPE_BITS[f.type]
    if "wide" in f.flags:
        out = f"{f.type[0]}{2 * width}"
        vector = f"np.multiply({{0}}, {{1}}, dtype={DTYPE[out]})"
        return c.pure(out, "({0} * {1})", vector, c.src(a, f.type), c.src(b, f.type))
    if "lo" in f.flags:
        return wrapping(c, f.type, "{0} * {1}", "{t0} * {t1}", a, b)
    if "hi" in f.flags and width <= 32:
        kind = f"{f.type[0]}{width}"
        wide = f"{f.type[0]}{2 * width}"
        vector = (
            f"(np.multiply({{0}}, {{1}}, dtype={DTYPE[wide]}) >> {width}).astype({DTYPE[kind]})"
        )
        return c.pure(
            kind, f"({{0}} * {{1}} >> {width})", vector, c.src(a, f.type), c.src(b, f.type)
        )
    if "hi" in f.flags:
        return c.pure(
            f.type,
            "({0} * {1} >> 64)",
            f"integers.mul_hi({{0}}, {{1}}, width=64, signed={f.type[0] == 's'})"
            f".astype({DTYPE[f.type]})",
            c.src(a, f.type),
            c.src(b, f.type),
        )
    raise UnsupportedPtx("mul/mad needs .lo, .hi or .wide")


@op("mul", types=_INT, flags="lo hi wide", section="mul")
def mul(c: Lower, i: Instr, f: Match) -> None:
    c.dst(i.operands[0], product(c, f, *i.operands[1:]))


@op("mad", types=_INT, flags="lo hi wide", section="mad")
def mad(c: Lower, i: Instr, f: Match) -> None:
    low = product(c, f, *i.operands[1:3])
    kind = unsigned(low.type)
    low = c.convert(low, kind)
    addend = c.src(i.operands[3], kind)
    mask = f"{(1 << TYPE_BITS[kind]) - 1:#x}"
    c.dst(i.operands[0], c.pure(kind, f"({{0}} + {{1}} & {mask})", "{0} + {1}", low, addend))


@op("div", types=_INT, section="div")
def div(c: Lower, i: Instr, f: Match) -> None:
    _divide(c, i, f, "div")


@op("rem", types=_INT, section="rem")
def rem(c: Lower, i: Instr, f: Match) -> None:
    _divide(c, i, f, "rem")


def _divide(c: Lower, i: Instr, f: Match, name: str) -> None:
    """Truncating division; by zero: all ones (unspecified by the manual)."""
    a, b = (c.src(operand, unsigned(f.type)) for operand in i.operands[1:])
    width, signed = TYPE_BITS[f.type], f.type[0] == "s"
    text = f"integers.{name}({{0}}, {{1}}, width={width}, signed={signed})"
    c.dst(i.operands[0], c.pure(unsigned(f.type), text, text, a, b))


@op("min", types=_INT, flags="relu", section="min")
def minimum(c: Lower, i: Instr, f: Match) -> None:
    _extreme(c, i, f, "min", "np.minimum")


@op("max", types=_INT, flags="relu", section="max")
def maximum(c: Lower, i: Instr, f: Match) -> None:
    _extreme(c, i, f, "max", "np.maximum")


def _extreme(c: Lower, i: Instr, f: Match, scalar: str, vector: str) -> None:
    a, b = (c.src(operand, f.type) for operand in i.operands[1:])
    out = c.pure(f.type, f"{scalar}({{0}}, {{1}})", f"{vector}({{t0}}, {{t1}})", a, b)
    if "relu" in f.flags:
        out = c.pure(f.type, "max({0}, 0)", "np.maximum({0}, 0)", out)
    c.dst(i.operands[0], out)


@op("abs", types="s16 s32 s64", section="abs")
def absolute(c: Lower, i: Instr, f: Match) -> None:
    value = c.src(i.operands[1], f.type)
    c.dst(
        i.operands[0],
        c.convert(_rewrap(c, f.type, "abs({0})", "np.abs({0})", value), unsigned(f.type)),
    )


@op("neg", types="s16 s32 s64", section="neg")
def negate(c: Lower, i: Instr, f: Match) -> None:
    value = c.src(i.operands[1], f.type)
    c.dst(i.operands[0], _rewrap(c, f.type, "-{0}", "-{0}", value))


def _rewrap(c: Lower, ptx_type: str, scalar: str, vector: str, value: Value) -> Value:
    """A signed result that may be 2^(width-1), back to unsigned bits."""
    kind, width = unsigned(ptx_type), TYPE_BITS[ptx_type]
    return c.pure(
        kind, f"(({scalar}) & {(1 << width) - 1:#x})", f"({vector}).view({DTYPE[kind]})", value
    )


# -- logic and shift ------------------------------------------------------------------------

_BITS = "b16 b32 b64"


@op("and or xor", types=f"pred {_BITS}", section="and, or, xor")
def logic(c: Lower, i: Instr, f: Match) -> None:
    symbol = {"and": "&", "or": "|", "xor": "^"}[f.form.name]
    kind = "pred" if f.type == "pred" else unsigned(f.type)
    a, b = (c.src(operand, kind) for operand in i.operands[1:])
    c.dst(i.operands[0], c.pure(kind, f"({{0}} {symbol} {{1}})", f"{{0}} {symbol} {{1}}", a, b))


@op("not", types=f"pred {_BITS}", section="not")
def invert(c: Lower, i: Instr, f: Match) -> None:
    kind = "pred" if f.type == "pred" else unsigned(f.type)
    value = c.src(i.operands[1], kind)
    scalar = "(not {0})" if kind == "pred" else f"({{0}} ^ {(1 << TYPE_BITS[f.type]) - 1:#x})"
    c.dst(i.operands[0], c.pure(kind, scalar, "~{0}", value))


@op("cnot", types=_BITS, section="cnot")
def logical_not(c: Lower, i: Instr, f: Match) -> None:
    kind = unsigned(f.type)
    c.dst(
        i.operands[0],
        c.pure(
            kind, "int({0} == 0)", f"({{0}} == 0).astype({DTYPE[kind]})", c.src(i.operands[1], kind)
        ),
    )


@op("shl", types=_BITS, section="shl")
def shift_left(c: Lower, i: Instr, f: Match) -> None:
    _shift(c, i, f, unsigned(f.type), "<<")


@op("shr", types=f"{_BITS} {_INT}", section="shr")
def shift_right(c: Lower, i: Instr, f: Match) -> None:
    _shift(c, i, f, f.type.replace("b", "u"), ">>")


def _shift(c: Lower, i: Instr, f: Match, kind: str, symbol: str) -> None:
    """Amounts above the width act as the width: zeros, or copies of the sign."""
    value, width = c.src(i.operands[1], kind), TYPE_BITS[f.type]
    if isinstance(i.operands[2], Imm) and 0 <= i.operands[2].value < width:
        amount = i.operands[2].value
        scalar = f"({{0}} {symbol} {amount}" + (
            f" & {(1 << width) - 1:#x})" if symbol == "<<" else ")"
        )
        c.dst(i.operands[0], c.pure(kind, scalar, f"{{0}} {symbol} {amount}", value))
        return
    variable = c.src(i.operands[2], "u32")
    scalar = f"({{0}} {symbol} min({{1}}, {width})"
    scalar += f" & {(1 << width) - 1:#x})" if symbol == "<<" else ")"
    name = "shl" if symbol == "<<" else "shr"
    signed = ", signed=True" if kind[0] == "s" else ""
    vector = f"integers.{name}({{0}}, np.minimum({{1}}, {width}), width={width}{signed})"
    c.dst(
        i.operands[0],
        c.pure(
            unsigned(kind),
            scalar + (f" & {(1 << width) - 1:#x}" if signed else ""),
            vector,
            value,
            variable,
        ),
    )


@op("shf.l shf.r", types="b32", flags="wrap clamp", section="shf")
def funnel(c: Lower, i: Instr, f: Match) -> None:
    """The upper (l) or lower (r) word of the 64-bit value b:a shifted."""
    low, high = (c.src(operand, "u32") for operand in i.operands[1:3])
    amount = c.src(i.operands[3], "u32")
    limit = "({0} & 31)" if "wrap" in f.flags else "min({0}, 32)"
    limit_array = "{0} & 31" if "wrap" in f.flags else "np.minimum({0}, 32)"
    amount = c.pure("u32", limit, limit_array, amount)
    wide = c.join(low, high)
    if f.form.name == "shf.l":
        out = c.pure(
            "u64", "({0} << {1} >> 32 & 0xffffffff)", "{t0} << {t1}.astype(U64) >> 32", wide, amount
        )
    else:
        out = c.pure("u64", "({0} >> {1})", "{t0} >> {t1}.astype(U64)", wide, amount)
    c.dst(i.operands[0], c.convert(out, "u32"))


@op("lop3", types="b32", section="lop3")
def lop3(c: Lower, i: Instr, f: Match) -> None:
    """Any function of three bits, as the or of its minterms."""
    table = i.operands[4].value
    terms = []
    for k in range(8):
        if table >> k & 1:
            a, b, d = (f"{'' if k >> s & 1 else '~'}{{{n}}}" for n, s in ((0, 2), (1, 1), (2, 0)))
            terms.append(f"({a} & {b} & {d})")
    if not terms:
        c.dst(i.operands[0], constant(0, "u32"))
        return
    values = [c.src(operand, "u32") for operand in i.operands[1:4]]
    text = " | ".join(terms)
    typed = text
    for n in range(3):
        typed = typed.replace(f"{{{n}}}", f"{{t{n}}}")
    c.dst(i.operands[0], c.pure("u32", f"(({text}) & 0xffffffff)", typed, *values))


@op("popc clz", types="b32 b64", section="popc, clz")
def count_bits(c: Lower, i: Instr, f: Match) -> None:
    width = TYPE_BITS[f.type]
    value = c.src(i.operands[1], unsigned(f.type))
    if f.form.name == "popc":
        scalar, vector = "{0}.bit_count()", "np.bitwise_count({0}).astype(U32)"
    else:
        scalar, vector = (
            f"({width} - {{0}}.bit_length())",
            f"integers.clz({{0}}, width={width}).astype(U32)",
        )
    c.dst(i.operands[0], c.pure("u32", scalar, vector, value))


@op("brev", types="b32 b64", section="brev")
def reverse_bits(c: Lower, i: Instr, f: Match) -> None:
    width = TYPE_BITS[f.type]
    c.dst(
        i.operands[0],
        c.pure(
            unsigned(f.type),
            None,
            f"integers.brev({{0}}, width={width})",
            c.src(i.operands[1], unsigned(f.type)),
        ),
    )


@op("bfe", types="u32 s32 u64 s64", section="bfe")
def extract(c: Lower, i: Instr, f: Match) -> None:
    values = [c.src(i.operands[1], f.type), *(c.src(operand, "u32") for operand in i.operands[2:])]
    width = TYPE_BITS[f.type]
    c.dst(
        i.operands[0],
        c.pure(
            unsigned(f.type),
            None,
            f"integers.bfe({{0}}, {{1}}, {{2}}, width={width}, signed={f.type[0] == 's'})",
            *values,
        ),
    )


@op("bfi", types="b32 b64", section="bfi")
def insert(c: Lower, i: Instr, f: Match) -> None:
    kind = unsigned(f.type)
    values = [
        c.src(i.operands[1], kind),
        c.src(i.operands[2], kind),
        *(c.src(operand, "u32") for operand in i.operands[3:]),
    ]
    c.dst(
        i.operands[0],
        c.pure(
            kind,
            None,
            f"integers.bfi({{0}}, {{1}}, {{2}}, {{3}}, width={TYPE_BITS[f.type]})",
            *values,
        ),
    )


@op("prmt", types="b32", section="prmt")
@op(" ".join(f"prmt.b32.{mode}" for mode in _PERMUTE_MODES), section="prmt")
def permute(c: Lower, i: Instr, f: Match) -> None:
    mode = f.form.name.removeprefix("prmt").removeprefix(".b32.")
    values = [c.src(operand, "u32") for operand in i.operands[1:]]
    text = f"integers.prmt({{0}}, {{1}}, {{2}}, mode='{mode}')"
    c.dst(i.operands[0], c.pure("u32", None, text, *values))
