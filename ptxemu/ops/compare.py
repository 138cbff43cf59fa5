"""setp, set, selp, slct: PTX ISA "Comparison and Selection Instructions"."""

from __future__ import annotations

from ptxemu.codegen.lower import NATURAL, Lower
from ptxemu.codegen.registry import Match, op
from ptxemu.codegen.values import DTYPE, Value
from ptxemu.ops.convert import as_float
from ptxemu.syntax.tree import TYPE_BITS, Instr

_ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_ORDERED |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}  # of unsigned integers
_UNORDERED = {"equ": "==", "neu": "!=", "ltu": "<", "leu": "<=", "gtu": ">", "geu": ">="}
_JOIN = {"and": "&", "or": "|", "xor": "^"}
_COMPARE = f"{' '.join(_ORDERED)} {' '.join(_UNORDERED)} num nan"
_TYPES = "b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64 f16 bf16"


def comparison(c: Lower, how: str, ptx_type: str, a: object, b: object, ftz: bool) -> Value:
    """The predicate a <how> b. Unordered forms are true when an operand is NaN."""
    kind = ptx_type if "f" in ptx_type else ptx_type.replace("b", "u")
    left, right = (as_float(c, operand, kind) for operand in (a, b))
    if ftz:
        left, right = (_flushed(c, ptx_type, v) for v in (left, right))
    return _compare(c, how, left, right)


def _flushed(c: Lower, ptx_type: str, value: Value) -> Value:
    """.ftz: subnormals of the operand's own type are zeros."""
    name = "arith.flush_f16" if ptx_type == "f16" else "flush_f32"
    return c.pure("f32", None, f"{name}({{t0}})", value)


def _compare(c: Lower, how: str, left: Value, right: Value) -> Value:
    """The predicate on values of one type; floats know unordered forms."""
    unordered = "(({0} != {0}) | ({1} != {1}))"
    if how in ("nan", "num"):
        text = unordered if how == "nan" else "(({0} == {0}) & ({1} == {1}))"
    elif how in _UNORDERED and how != "neu":
        text = f"(({{0}} {_UNORDERED[how]} {{1}}) | {unordered})"
    elif how == "ne" and left.type in ("f32", "f64"):
        text = "(({0} != {1}) & (({0} == {0}) & ({1} == {1})))"
    else:
        text = f"({{0}} {(_ORDERED | _UNORDERED)[how]} {{1}})"
    return c.pure("pred", text, text, left, right)


@op("setp", types=_TYPES, flags=f"{_COMPARE} and or xor ftz")
def set_predicate(c: Lower, i: Instr, f: Match) -> None:
    how = f.pick(*_COMPARE.split())
    first, second = c.both(i.operands[0])
    result = comparison(c, how, f.type, i.operands[1], i.operands[2], "ftz" in f.flags)
    inverse = None if second is None else c.pure("pred", "(not {0})", "~{0}", result)
    c.dst(first, _joined(c, i, f, result))
    if inverse is not None:
        c.dst(second, _joined(c, i, f, inverse))


def _joined(c: Lower, i: Instr, f: Match, result: Value) -> Value:
    """The comparison combined with the predicate operand, where the instruction has one."""
    join = f.pick("and", "or", "xor")
    if not join:
        return result
    text = f"({{0}} {_JOIN[join]} {{1}})"
    return c.pure("pred", text, text, result, c.src(i.operands[3], "pred"))


@op("setp", types="f16x2 bf16x2", flags=f"{_COMPARE} and or xor ftz", section="setp (half)")
def set_packed_predicates(c: Lower, i: Instr, f: Match) -> None:
    """Set p from the low halves, q from the high halves."""
    results = [_joined(c, i, f, half) for half in _halves_compared(c, i, f)]
    for target, result in zip(c.both(i.operands[0]), results, strict=True):
        c.dst(target, result)


def _halves_compared(c: Lower, i: Instr, f: Match) -> list[Value]:
    """The predicates of the low and of the high halves."""
    how, base, out = f.pick(*_COMPARE.split()), f.type.removesuffix("x2"), []
    words = c.srcs(i.operands[1:3], "u32")
    for shift in ("", " >> 16"):
        left, right = (
            c.pure("f32", None, f"formats.{base}_to_f32(({{0}}{shift}).astype(U16))", word)
            for word in words
        )
        if "ftz" in f.flags:
            left, right = (_flushed(c, base, v) for v in (left, right))
        out.append(_compare(c, how, left, right))
    return out


_JOINED = f"{_COMPARE} and or xor"
_SETS = f"{_JOINED} ftz"
_HALF_SETS = f"eq ne lt le gt ge {' '.join(_UNORDERED)} num nan and or xor"
_TRUE = {"f16": 0x3C00, "bf16": 0x3F80, "u16": 0xFFFF, "s16": 0xFFFF}  # in 16 bits


@op("set", types=("u32 s32 f32", _TYPES), flags=_SETS)
@op("set", types=("f16", _TYPES.removesuffix(" bf16")), flags=_SETS, section="set (half)")
@op("set", types=("bf16", _TYPES), flags=_JOINED, section="set (half)")
@op("set", types=("u16 s16", "f16"), flags=f"{_HALF_SETS} ftz", section="set (half)")
@op("set", types=("u16 s16", "bf16"), flags=_HALF_SETS, section="set (half)")
def set_value(c: Lower, i: Instr, f: Match) -> Value:
    """Set all ones (or 1.0) if the comparison holds."""
    how = f.pick(*_COMPARE.split())
    result = comparison(c, how, f.types[1], i.operands[1], i.operands[2], "ftz" in f.flags)
    result = _joined(c, i, f, result)
    if f.types[0] in _TRUE:
        return _word(c, result, _TRUE[f.types[0]], "u16")
    if f.types[0] == "f32":
        return c.pure("f32", "float({0})", "{0}.astype(F32)", result)
    return _word(c, result, 0xFFFFFFFF, "u32")


@op("set", types=("f16x2 u32 s32", "f16x2"), flags=f"{_HALF_SETS} ftz", section="set (half)")
@op("set", types=("bf16x2 u32 s32", "bf16x2"), flags=_HALF_SETS, section="set (half)")
def set_packed_values(c: Lower, i: Instr, f: Match) -> Value:
    """Set all ones (or 1.0) in the halves for which the comparison holds."""
    true = _TRUE.get(f.types[0].removesuffix("x2"), 0xFFFF)
    low, high = (_joined(c, i, f, half) for half in _halves_compared(c, i, f))
    words = (_word(c, low, true, "u32"), _word(c, high, true << 16, "u32"))
    return c.pure("u32", "({0} | {1})", "{0} | {1}", *words)


def _word(c: Lower, predicate: Value, true: int, kind: str) -> Value:
    """Return `true` if the predicate holds, else 0."""
    vector = f"{{0}}.astype({DTYPE[kind]}) * {DTYPE[kind]}({true:#x})"
    return c.pure(kind, f"({{0}} * {true:#x})", vector, predicate)


def select(c: Lower, predicate: Value, a: Value, b: Value) -> Value:
    """Return a where the predicate holds, else b; both of one type."""
    vector = f"choose({{0}}, {{1}}, {{2}}, {DTYPE[a.type]})"
    return c.pure(a.type, "({1} if {0} else {2})", vector, predicate, a, b)


@op("selp", types="b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64")
def select_by_predicate(c: Lower, i: Instr, f: Match) -> Value:
    width = TYPE_BITS[f.type]
    predicate = c.src(i.operands[3], "pred")
    a, b = c.raw(i.operands[1], width), c.raw(i.operands[2], width)
    if a.type != b.type:
        kind = b.type if a.const is not None else a.type
        a, b = c.convert(a, kind), c.convert(b, kind)
    return select(c, predicate, a, b)


@op("slct", types=("b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64", "s32 f32"), flags="ftz")
def select_by_sign(c: Lower, i: Instr, f: Match) -> Value:
    """Return a where c >= 0, else b."""
    kind = NATURAL[TYPE_BITS[f.types[0]]]
    control = c.src(i.operands[3], f.types[1])
    if "ftz" in f.flags:
        control = c.pure("f32", None, "flush_f32({t0})", control)
    a, b = c.srcs(i.operands[1:3], kind)
    return select(c, c.pure("pred", "({0} >= 0)", "{0} >= 0", control), a, b)
