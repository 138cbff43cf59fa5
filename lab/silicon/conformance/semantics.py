"""Results of the elementwise instructions of `patterns` by the manual, on Python numbers.

Nothing of ptxemu is used here. `evaluate` executes the statements of a variant one after another
on lists of bit patterns; `_meaning` gives each opcode its operand kinds and its function. The
approximations have none: `bounds` judges them.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from lab.silicon.conformance.elementwise import register_bits
from lab.silicon.conformance.exact_arithmetic import (
    FORMATS,
    decode,
    encode,
    flushed,
    flushed_result,
    ieee,
    to_format,
)
from lab.silicon.conformance.integer_semantics import (
    Form,
    clamped,
    integer,
    limits,
    with_carry,
    wrapped,
)
from lab.silicon.conformance.patterns import Variant

LETTERS = "abce"
_ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")
_INTEGRAL: dict[str, Callable[[float], int]] = {
    "rni": round,
    "rzi": math.trunc,
    "rmi": math.floor,
    "rpi": math.ceil,
}


class Meaning(NamedTuple):
    """kinds: of the destination and the sources, at least as many as an instruction names."""

    kinds: Sequence[str]
    function: Callable[..., Any]
    carries: bool = False


def _is_float(kind: str) -> bool:
    return kind.removesuffix("x2") in (*FORMATS, "ue8m0", "s2f6")


def _is_type(word: str) -> bool:
    return (
        word == "pred"
        or _is_float(word)
        or re.fullmatch(r"[usb]([248]|16|32|64|128)|[us]16x2", word) is not None
    )


@cache
def _meaning(opcode: str) -> Meaning:
    name, *words = opcode.split(".")
    types = tuple(word for word in words if _is_type(word))
    form = Form(types, frozenset(words) - {*types})
    if name in ("setp", "set"):
        return _comparison(name, form)
    if name in ("selp", "slct"):
        return _selection(name, form)
    if name == "cvt" and "pack" not in form.flags:
        return _conversion(form)
    if name in ("addc", "subc", "madc") or "cc" in form.flags:
        return Meaning(*with_carry(name, form), carries=True)
    if types[0].endswith("16x2") and types[0][0] in "us":
        return _integer_halves(name, form)
    if name == "lop3" and form.flags:
        return _lookup_with_predicate(form)
    if name == "mov":
        form = form._replace(types=(_raw(types[0]),))
    return _float(name, form) if _is_float(form.types[0]) else Meaning(*integer(name, form))


def _raw(kind: str) -> str:
    """The kind whose values are the bits themselves."""
    return kind if kind == "pred" else f"b{re.sub('[^0-9]', '', kind.replace('bf', 'f'))}"


def _integer_halves(name: str, form: Form) -> Meaning:
    """add, min or max of the halves of words."""
    (kind,) = form.types
    part = kind.removesuffix("x2")
    _, function = integer(name, form._replace(types=(part,)))

    def call(*words: int) -> int:
        halves = ([wrapped(word >> shift, part) for word in words] for shift in (0, 16))
        low, high = (function(*half) & 0xFFFF for half in halves)
        return high << 16 | low

    return Meaning(["b32"] * 3, call)


def _lookup_with_predicate(form: Form) -> Meaning:
    """The word, and whether it is not zero, combined with a predicate."""
    _, function = integer("lop3", form._replace(flags=frozenset()))
    (join,) = form.flags

    def call(*operands: int) -> tuple[int, int]:
        *words, other = operands
        found = function(*words)
        return found, _JOIN[join](int(found != 0), other)

    return Meaning(["b32", *["b32"] * 3, "u32", "pred"], call)


# -- floats ---------------------------------------------------------------------------------


def _float(name: str, form: Form) -> Meaning:
    kinds: list[str] = [form.types[0]] * 4
    base = form.types[0].removesuffix("x2")
    if len(form.types) == 2:  # sums of f32 and a narrower type
        kinds = [base, *[form.types[1]] * (1 + (name == "fma")), base]
    if name == "testp":
        least = 2.0 ** FORMATS[base].least
        return Meaning(["pred", base], lambda x: _PROPERTIES[next(iter(form.flags))](x, least))
    one = _extreme if name in ("min", "max") else _sign if name in _SIGNS else _arithmetic

    def call(*operands: Any) -> Any:
        if isinstance(operands[0], tuple):
            return tuple(one(name, base, form.flags, x) for x in zip(*operands, strict=True))
        return one(name, base, form.flags, operands)

    return Meaning(kinds, call)


_PROPERTIES: dict[str, Callable[[float, float], bool]] = {  # of a number and the least normal one
    "finite": lambda x, _: math.isfinite(x),
    "infinite": lambda x, _: math.isinf(x),
    "number": lambda x, _: not math.isnan(x),
    "notanumber": lambda x, _: math.isnan(x),
    "normal": lambda x, least: math.isfinite(x) and (x == 0 or abs(x) >= least),
    "subnormal": lambda x, least: 0 < abs(x) < least,
}
_SIGNS: dict[str, Callable[..., float]] = {
    "neg": operator.neg,
    "abs": abs,
    "copysign": lambda a, b: math.copysign(b, a),
}


def _modified(x: float, flags: frozenset[str]) -> float:
    """.sat to [0, 1], of NaN to 0; .relu at 0, with NaN kept."""
    if "sat" in flags:
        return min(x, 1.0) if x > 0 else 0.0
    return 0.0 if "relu" in flags and x <= 0 else x


def _arithmetic(name: str, base: str, flags: frozenset[str], operands: tuple[float, ...]) -> float:
    how = next((word for word in _ROUNDINGS if word in flags), "rn")
    kind = "fma" if name == "mad" else name
    return _modified(ieee(kind, base, how, operands, ftz="ftz" in flags), flags)


def _sign(name: str, base: str, flags: frozenset[str], operands: tuple[float, ...]) -> float:
    if "ftz" in flags:
        operands = tuple(flushed(x, base) for x in operands)
    return _SIGNS[name](*operands)


def _extreme(name: str, base: str, flags: frozenset[str], operands: tuple[float, ...]) -> float:
    """min or max: -0 < +0; NaN ignored, or with .NaN returned."""
    if "ftz" in flags:
        operands = tuple(flushed(x, base) for x in operands)
    sign = math.prod(math.copysign(1, x) for x in operands)
    if "abs" in flags:
        operands = tuple(map(abs, operands))
    numbers = [x for x in operands if not math.isnan(x)]
    if not numbers or ("NaN" in flags and len(numbers) < len(operands)):
        return math.nan
    chosen = (min if name == "min" else max)(numbers, key=lambda x: (x, math.copysign(1, x)))
    return math.copysign(chosen, sign) if "xorsign" in flags else chosen


# -- comparison and selection ---------------------------------------------------------------

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    how: getattr(operator, how) for how in ("eq", "ne", "lt", "le", "gt", "ge")
} | {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}
_JOIN = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def _holds(how: str, a: float, b: float) -> bool:
    """Comparison of floats: ordered, with a trailing u also where an operand is NaN."""
    if math.isnan(a) or math.isnan(b):
        return how == "nan" or (how.endswith("u") and how != "num")
    return how == "num" or (how != "nan" and _COMPARE[how[:2]](a, b))


def _comparison(name: str, form: Form) -> Meaning:
    """setp yields two predicates: the result and its opposite, or one for each half."""
    kind = form.types[-1]
    join = next((_JOIN[word] for word in _JOIN if word in form.flags), lambda x, _: x)
    how = next(word for word in form.flags if word[:2] in _COMPARE or word in ("num", "nan"))

    def compare(a: Any, b: Any, c: int = 0) -> tuple[int, int]:
        if "ftz" in form.flags:
            base = kind.removesuffix("x2")
            a, b = (
                tuple(flushed(y, base) for y in x) if isinstance(x, tuple) else flushed(x, base)
                for x in (a, b)
            )
        if isinstance(a, tuple):
            first, second = (_holds(how, *pair) for pair in zip(a, b, strict=True))
        elif isinstance(a, float):
            first = _holds(how, a, b)
            second = not first
        else:
            first = _COMPARE[how](a, b)
            second = not first
        return join(first, c), join(second, c)

    if name == "setp":
        return Meaning(["pred", kind, kind, "pred"], compare)
    target = form.types[0]
    true = 1.0 if _is_float(target) else -1
    if not kind.endswith("x2"):
        return Meaning(
            [target, kind, kind, "pred"], lambda *x: true if compare(*x)[0] else 0 * true
        )
    part = encode(target.removesuffix("x2"), [1.0])[0] if _is_float(target) else 0xFFFF

    def words(*operands: Any) -> int:
        low, high = compare(*operands)
        return (part if low else 0) | (part if high else 0) << 16

    return Meaning(["b32", kind, kind, "pred"], words)


def _selection(name: str, form: Form) -> Meaning:
    raw = _raw(form.types[0])
    if name == "selp":
        return Meaning([raw, raw, raw, "pred"], lambda a, b, c: a if c else b)
    ftz = "ftz" in form.flags
    return Meaning(
        [raw, raw, raw, form.types[1]],
        lambda a, b, c: a if (flushed(c) if ftz else c) >= 0 else b,
    )


# -- conversions ----------------------------------------------------------------------------


def _conversion(form: Form) -> Meaning:
    to, source = form.types[:2]
    if to == "bf16x2" and source == "s2f6x2":
        return Meaning(
            [to, source, "ue8m0x2"],
            lambda a, b: tuple(
                _modified(_to_float("bf16", x * y, form.flags), form.flags)
                for x, y in zip(a, b, strict=True)
            ),
        )
    if to == "tf32" and "rna" in form.flags:
        return Meaning(["b32", "b32"], lambda code: _tf32_away(code, form.flags))
    if not to.endswith("x2"):
        return Meaning([to, source], lambda x: _converted(to, source, form.flags, x))
    part, origin = to.removesuffix("x2"), source.removesuffix("x2")

    def pair(*operands: Any) -> tuple[float, ...]:
        """The first source goes to the upper half; two halves stay in place."""
        values = operands[0] if source.endswith("x2") else operands[::-1]
        return tuple(_converted(part, origin, form.flags, x) for x in values)

    return Meaning([to, source, source], pair)


def _converted(to: str, source: str, flags: frozenset[str], x: float) -> float:
    if not _is_float(to):
        return _to_integer(to, source, flags, x)
    if not _is_float(source):
        return to_format(x, to, next(word for word in _ROUNDINGS if word in flags))
    if to == "ue8m0":
        return _scale(x, flags)
    if "ftz" in flags and to != "f16":  # nothing flushes the operand of an f16 result
        x = flushed(x) if source == "f32" else x
    whole = next((_INTEGRAL[word] for word in _INTEGRAL if word in flags), None)
    if whole and math.isfinite(x):
        x = math.copysign(float(whole(x)), x)
    return _to_float(to, _modified(x, flags & {"sat"}), flags)


def _tf32_away(code: int, flags: frozenset[str]) -> int:
    """cvt.rna only truncates a NaN, from which .satfinite takes a unit, as from an infinity: so
    the code of ptxas for sm_100a does, and an H100."""
    (x,) = decode("f32", [code])
    if math.isnan(x):
        return (code & ~0x1FFF) - 0x2000 * ("satfinite" in flags)
    return encode("tf32", [_to_float("tf32", x, flags)])[0]


def _to_integer(to: str, source: str, flags: frozenset[str], x: Any) -> int:
    if not _is_float(source):
        return clamped(x, to) if "sat" in flags else x
    if math.isnan(x):
        narrow = source != "f64" and to[1:] != "64"
        return 0 if narrow else wrapped(1 << int(to[1:]) - 1, to)
    if math.isinf(x):
        return limits(to)[x > 0]
    whole = next((_INTEGRAL[word] for word in _INTEGRAL if word in flags), math.trunc)
    return clamped(whole(flushed(x) if "ftz" in flags else x), to)


def _to_float(to: str, x: float, flags: frozenset[str]) -> float:
    """A value in a float format; a format of at most 8 bits always saturates, and one without NaN
    has its largest value for it."""
    how = next((word for word in _ROUNDINGS if word in flags), "rn")
    if math.isnan(x):
        return FORMATS[to].largest if to in ("e2m1", "e2m3", "e3m2") else x
    value = to_format(x, to, how, satfinite="satfinite" in flags)
    if "ftz" in flags and to == "f32" and math.isfinite(x) and x:
        value = flushed_result(value, Fraction(x), to, how)
    return _modified(value, flags & {"relu"})


def _scale(x: float, flags: frozenset[str]) -> float:
    """The power of two of ue8m0 for the magnitude of a number."""
    if math.isnan(x) or math.isinf(x):
        return 2.0**127 if math.isinf(x) and "satfinite" in flags else math.nan
    fraction, exponent = math.frexp(abs(x))
    power = exponent - 1 + ("rp" in flags and fraction > 0.5)
    if power > 127:
        return 2.0**127 if "satfinite" in flags else math.nan
    return 2.0 ** (max(power, -127) if x else -127)


# -- programs -------------------------------------------------------------------------------


def _part_bits(form: str) -> int:
    """Return the distance in bits between the parts of a packed kind."""
    return FORMATS[form].bits if form in ("f16", "bf16", "f32") else 4 if form == "e2m1" else 8


def _decoded(kind: str, bits: list[int]) -> list[Any]:
    if kind.endswith("x2"):
        form = kind.removesuffix("x2")
        parts = (decode(form, [x >> k * _part_bits(form) for x in bits]) for k in (0, 1))
        return list(zip(*parts, strict=True))
    if _is_float(kind):
        return decode(kind, bits)
    return bits if kind == "pred" else [wrapped(x, kind) for x in bits]


def _encoded(kind: str, values: Sequence[Any]) -> list[int]:
    if kind.endswith("x2"):
        form = kind.removesuffix("x2")
        low, high = (encode(form, part) for part in zip(*values, strict=True))
        return [a | b << _part_bits(form) for a, b in zip(low, high, strict=True)]
    if _is_float(kind):
        return encode(kind, values)
    return [int(x) & 1 for x in values] if kind == "pred" else [wrapped(x, kind) for x in values]


def _literal(kind: str, text: str) -> Any:
    """An immediate operand as a bit pattern; a floating-point one is written 0f or with a point."""
    if text.startswith("0f"):
        return int(text[2:], 16)
    return encode(kind, [float(text)])[0] if "." in text else int(text, 0)


@cache
def _parsed(statement: str) -> tuple[str, str, list[str]]:
    """Guard (or ""), opcode and operands."""
    guard = statement.split(" ")[0][1:] if statement.startswith("@") else ""
    opcode, _, rest = statement.removeprefix(f"@{guard} ").partition(" ")
    return guard, opcode, re.findall(r"\{[^}]*\}|[^\s,]+", rest)


class Lanes:
    """Registers while the statements of a variant are executed: one bit pattern for each lane."""

    def __init__(self, registers: dict[str, list[int]], widths: dict[str, int]) -> None:
        self.registers, self.widths = registers, widths
        self.carry: list[int] = []
        self.count = len(next(iter(registers.values())))

    def execute(self, statement: str) -> None:
        if statement.startswith(".reg"):
            _, kind, *names = statement.replace(",", " ").split()
            bits = 1 if kind == ".pred" else int(re.sub("[^0-9]", "", kind))
            self.widths |= dict.fromkeys(names, bits)
            return
        guard, opcode, operands = _parsed(statement)
        where = self.read("pred", guard) if guard else None
        if any(operand[0] == "{" for operand in operands):
            self._move(*(re.findall(r"[^\s,{}]+", operand) for operand in operands))
            return
        meaning = _meaning(opcode)
        columns = [
            self.read(kind, operand)
            for kind, operand in zip(meaning.kinds[1:], operands[1:], strict=False)
        ]
        if meaning.carries:
            columns.append(self.carry or [0] * self.count)
        results = [meaning.function(*row) for row in zip(*columns, strict=True)]
        if meaning.carries:
            self.carry = [carry for _, carry in results]
            results = [result for result, _ in results]
        if isinstance(results[0], tuple) and not meaning.kinds[0].endswith("x2"):
            first = "pred" if opcode.startswith("setp") else meaning.kinds[0]
            columns = zip((first, "pred"), zip(*results, strict=True), strict=True)
            for name, (kind, column) in zip(operands[0].split("|"), columns, strict=False):
                self._write(kind, name, column, where)
        else:
            self._write(meaning.kinds[0], operands[0], results, where)

    def read(self, kind: str, operand: str) -> list[Any]:
        if operand.startswith("!"):
            return [1 - x for x in self.registers[operand[1:]]]
        if operand in self.registers:
            return _decoded(kind, self.registers[operand])
        return _decoded(kind, [_literal(kind, operand)]) * self.count

    def _write(
        self, kind: str, name: str, values: Sequence[Any], where: Sequence[int] | None = None
    ) -> None:
        mask = (1 << self.widths[name]) - 1
        codes = [code & mask for code in _encoded(kind, values)]
        if where is not None:
            kept = zip(codes, self.registers[name], where, strict=True)
            codes = [new if taken else old for new, old, taken in kept]
        self.registers[name] = codes

    def _move(self, targets: list[str], sources: list[str]) -> None:
        """mov that packs or unpacks, the first register lowest."""
        size = max(self.widths.get(x, 0) for x in sources)
        if len(sources) == 1:
            size = self.widths[sources[0]] // len(targets)
        columns = [self.registers.get(x) or [int(x)] * self.count for x in sources]
        words = [
            sum(x << k * size for k, x in enumerate(row)) for row in zip(*columns, strict=True)
        ]
        for k, name in enumerate(targets):
            if name != "_":
                self._write(f"b{size * len(sources)}", name, [x >> k * size for x in words])


def evaluate(variant: Variant, sources: Sequence[np.ndarray]) -> np.ndarray:
    """The results of a variant as bit patterns of `register_bits` of its target.

    sources: the operands as unsigned integers of their registers' widths.
    """
    names = [f"%{letter}" for letter in LETTERS[: len(sources)]]
    widths = {name: 8 * x.itemsize for name, x in zip(names, sources, strict=True)}
    bits = register_bits(variant.target)
    lanes = Lanes({name: x.tolist() for name, x in zip(names, sources, strict=True)}, widths)
    lanes.widths["%d"] = bits
    text = variant.text("%d", names).strip()
    if text.startswith("{"):
        text = text[1:].removesuffix("}")
    for statement in text.split(";"):
        if statement.strip():
            lanes.execute(statement.strip())
    return np.array(lanes.registers["%d"], f"u{bits // 8}")


def alike(opcode: str, found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return where two results agree. For f64, and for conversions and copies of a sign, any two
    NaNs agree; everything else writes one pattern."""
    kind, name = _meaning(opcode).kinds[0], opcode.split(".")[0]
    same = found == expected
    if kind in ("f64", "f32", "f16", "bf16") and ("f64" in opcode or name in ("cvt", "copysign")):
        of_found, of_expected = (np.isnan(decode(kind, x.tolist())) for x in (found, expected))
        same |= of_found & of_expected
    return same
