"""Templates of pure nodes -> primitives, by numpy's own rules of types.

A recipe is a list of steps, each a primitive with its operands: a source of the node, a constant or
the result of an earlier step. `.view` is no step: the same place in another type. A template that
has anything else has no recipe, and numpy executes it.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from ptxemu.native.ir import BITS, TABLE, Key

_BINARY = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.LShift: "<<",
    ast.RShift: ">>",
}
_RELATION = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


class Ref(NamedTuple):
    """Value of a recipe.

    kind: "source", "step" (by `number`) or "constant" (`number` is the constant).
    dtype: numpy's; "" for a Python scalar, which gets the type of its partner.
    """

    kind: str
    number: Any
    dtype: str
    weak: bool = False  # a uniform source: Python's scalar, too


@dataclass(frozen=True)
class Recipe:
    steps: tuple[tuple[Key, tuple[Ref, ...]], ...]
    result: Ref


class _Unknown(Exception):
    """The template has something that no primitive does."""


@cache
def recipe(
    text: str, types: tuple[str, ...], uniform: tuple[bool, ...], result: str
) -> Recipe | None:
    """Return the steps that compute a template, or None if numpy has to execute it.

    Args:
        text: the template.
        types: numpy types of its operands.
        uniform: which operands are scalars.
        result: numpy type of the result.
    """
    try:
        tree = ast.parse(re.sub(r"\{t?(\d+)\}", r"_\1", text), mode="eval").body
        reader = _Reader(types, uniform, frozenset(re.findall(r"\{t(\d+)\}", text)))
        out = reader.read(tree)
        if out.dtype != result:
            return None
    except (_Unknown, SyntaxError):
        return None
    return Recipe(tuple(reader.steps), out)


class _Reader:
    def __init__(
        self, types: tuple[str, ...], uniform: tuple[bool, ...], typed: frozenset[str]
    ) -> None:
        self.types, self.uniform, self.typed = types, uniform, typed
        self.steps: list[tuple[Key, tuple[Ref, ...]]] = []

    def read(self, node: ast.expr) -> Ref:
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise _Unknown
        return method(node)

    def _step(self, name: str, *operands: Ref) -> Ref:
        key = name, tuple(ref.dtype for ref in operands)
        if key not in TABLE:
            raise _Unknown
        self.steps.append((key, operands))
        return Ref("step", len(self.steps) - 1, TABLE[key].result)

    def _name(self, node: ast.Name) -> Ref:
        if not re.fullmatch(r"_\d+", node.id):
            raise _Unknown
        number = int(node.id[1:])
        weak = self.uniform[number] and str(number) not in self.typed
        return Ref("source", number, self.types[number], weak)

    def _constant(self, node: ast.Constant) -> Ref:
        if type(node.value) not in (int, float, bool):
            raise _Unknown
        return Ref("constant", node.value, "", True)

    def _binop(self, node: ast.BinOp) -> Ref:
        symbol = _BINARY.get(type(node.op))
        if symbol is None:
            raise _Unknown
        left, right = self._matched(self.read(node.left), self.read(node.right))
        if left.dtype in ("F32", "F64"):
            raise _Unknown
        return self._step(symbol, left, right)

    def _compare(self, node: ast.Compare) -> Ref:
        if len(node.ops) != 1:
            raise _Unknown
        pair = self._matched(self.read(node.left), self.read(node.comparators[0]))
        return self._step(_RELATION[type(node.ops[0])], *pair)

    def _unaryop(self, node: ast.UnaryOp) -> Ref:
        operand = self.read(node.operand)
        if operand.kind == "constant" and isinstance(node.op, ast.USub):
            return Ref("constant", -operand.number, "", True)
        if operand.weak:
            raise _Unknown
        return self._step({ast.Invert: "~", ast.USub: "neg"}.get(type(node.op), "?"), operand)

    def _matched(self, left: Ref, right: Ref) -> tuple[Ref, Ref]:
        """Return both in one type; a Python scalar gets the type of the array."""
        if left.weak and right.weak:
            raise _Unknown
        if left.weak:
            left = self._typed(left, right.dtype)
        elif right.weak:
            right = self._typed(right, left.dtype)
        if left.dtype != right.dtype:
            raise _Unknown
        return left, right

    def _typed(self, ref: Ref, dtype: str) -> Ref:
        """A scalar, made one of `dtype`."""
        if not ref.weak:
            return ref
        floats = dtype in ("F32", "F64")
        if ref.kind == "constant":
            if isinstance(ref.number, float) and not floats:
                raise _Unknown
            return Ref("constant", ref.number, dtype)
        if (ref.dtype in ("F32", "F64")) != floats or (ref.dtype == "BOOL") != (dtype == "BOOL"):
            raise _Unknown
        return Ref("source", ref.number, dtype)

    def _call(self, node: ast.Call) -> Ref:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in ("view", "astype"):
            if len(node.args) != 1 or not isinstance(node.args[0], ast.Name):
                raise _Unknown
            return self._recast(self.read(function.value), function.attr, node.args[0].id)
        name = ast.unparse(function)
        if name == "choose":
            return self._choose(node)
        if name in _CASTS and len(node.args) == 1 and not node.keywords:
            ref = self.read(node.args[0])
            if ref.weak:
                return self._typed(ref, name)
            return self._recast(ref, "astype", name)
        words = [repr(a.value) for a in node.args if isinstance(a, ast.Constant)]
        words = [word for word in words if word[0] == "'"]
        words += sorted(f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords)
        operands = [
            self.read(a)
            for a in node.args
            if not (isinstance(a, ast.Constant) and isinstance(a.value, str))
        ]
        return self._function(" ".join([name, *sorted(words, key=_ORDER)]), operands)

    def _function(self, name: str, operands: list[Ref]) -> Ref:
        for types, _ in _OF_NAME.get(name, ()):
            if len(types) == len(operands) and all(
                ref.weak or ref.dtype == want for ref, want in zip(operands, types, strict=True)
            ):
                values = [self._typed(r, t) for r, t in zip(operands, types, strict=True)]
                return self._step(name, *values)
        raise _Unknown

    def _recast(self, ref: Ref, how: str, dtype: str) -> Ref:
        if ref.weak or dtype not in BITS:
            raise _Unknown
        if how == "astype":
            return ref if ref.dtype == dtype else self._step(f"astype {dtype}", ref)
        if BITS[ref.dtype] != BITS[dtype] or "BOOL" in (ref.dtype, dtype):
            raise _Unknown
        return Ref(ref.kind, ref.number, dtype)

    def _choose(self, node: ast.Call) -> Ref:
        mask, yes, no = (self.read(a) for a in node.args[:3])
        dtype = node.args[3]
        if mask.dtype != "BOOL" or not isinstance(dtype, ast.Name):
            raise _Unknown
        mask = self._typed(mask, "BOOL")
        return self._step("choose", mask, self._typed(yes, dtype.id), self._typed(no, dtype.id))


_CASTS = ("U16", "U32", "U64", "I16", "I32", "I64")
_OF_NAME: dict[str, list[tuple[tuple[str, ...], str]]] = {}
for _name, _types in TABLE:
    _OF_NAME.setdefault(_name, []).append((_types, TABLE[_name, _types].result))


def _ORDER(word: str) -> tuple[int, str]:
    """Sort key in the order of the keys: strings, then flags, `nan` before `ftz`."""
    return {"'": 0, "n": 1}.get(word[0], 2), word
