"""`--when`: an expression over numbers, evaluated node by node; nothing else can be said in it.

Names are `step`, `warp`, `lane`, `cta`, `cta_x`, `cta_y`, `cta_z`, and registers of the PTX, with
or without their %. A register is a number where its active lanes agree, else an array of them; the
condition holds where it does for any active lane. `all(...)` and `any(...)` say it otherwise, and
`s32(...)`, `s64(...)` and `f32(...)` reinterpret bits, which count as unsigned unless the register
is declared a float.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

COORDINATES = ("step", "warp", "lane", "cta", "cta_x", "cta_y", "cta_z")
_REGISTER = re.compile(r"%([A-Za-z_$][\w$]*)")
_LONGEST = 1000  # characters
_WIDEST = 128  # places of a shift

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _bits_as(dtype: str) -> Callable[[Any], Any]:
    width = np.dtype(dtype).itemsize

    def convert(value: Any) -> Any:
        raw = np.atleast_1d(value)
        if raw.dtype.kind == "f":
            raw = raw.astype(f"f{width}").view(f"u{width}")
        mask = (1 << 8 * width) - 1
        found = np.array([int(x) & mask for x in raw.tolist()], f"u{width}").view(dtype)
        return found if np.ndim(value) else found[0].item()

    return convert


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "any": lambda value: bool(np.any(value)),
    "all": lambda value: bool(np.all(value)),
    "abs": abs,
    "s32": _bits_as("i4"),
    "s64": _bits_as("i8"),
    "f32": _bits_as("f4"),
}


class Condition:
    """One condition; "" always holds. Raises ValueError for what is no such expression."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > _LONGEST:
            raise ValueError(f"a condition of {len(text)} characters; at most {_LONGEST}")
        try:
            tree = ast.parse(_REGISTER.sub(r" R_\1", text).strip() or "True", mode="eval")
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"condition {text!r}: {error}") from None
        self._body = tree.body
        for node in ast.walk(tree.body):
            self._require_known(node)

    def _require_known(self, node: ast.AST) -> None:
        plain = (ast.Name, ast.Load, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.boolop)
        known = isinstance(node, (*plain, ast.unaryop)) or type(node) in {*_BINARY, *_COMPARISONS}
        if isinstance(node, ast.Constant):
            known = isinstance(node.value, int | float)
        if isinstance(node, ast.Call):
            known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
            known = known and len(node.args) == 1 and not node.keywords
        if not known:
            what = type(node).__name__
            raise ValueError(f"condition {self.text!r}: {what} is not allowed in a condition")

    @cached_property
    def names(self) -> frozenset[str]:
        """Registers that it speaks of, without %."""
        found = {node.id for node in ast.walk(self._body) if isinstance(node, ast.Name)}
        return frozenset(name.removeprefix("R_") for name in found - {*COORDINATES, *_FUNCTIONS})

    def holds(self, values: Mapping[str, Any]) -> bool:
        """values: COORDINATES and registers, without %, by name.

        Raises ValueError for a name that has no value, and for what cannot be computed.
        """
        try:
            return bool(np.any(self._value(self._body, values)))
        except KeyError as error:
            raise ValueError(f"condition {self.text!r}: nothing is called {error}") from None
        except (TypeError, ZeroDivisionError, OverflowError) as error:
            raise ValueError(f"condition {self.text!r}: {error}") from None

    def _value(self, node: Any, values: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return values[node.id.removeprefix("R_")]
        if isinstance(node, ast.Call):
            return _FUNCTIONS[node.func.id](self._value(node.args[0], values))  # type: ignore[attr-defined]
        if isinstance(node, ast.BoolOp):
            parts = [self._value(part, values) for part in node.values]
            together = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            return together.reduce(np.broadcast_arrays(*parts))
        if isinstance(node, ast.UnaryOp):
            return self._unary(node.op, self._value(node.operand, values))
        if isinstance(node, ast.BinOp):
            left, right = self._value(node.left, values), self._value(node.right, values)
            if isinstance(node.op, ast.LShift) and np.max(right) > _WIDEST:
                raise OverflowError(f"a shift by {right}")
            return _BINARY[type(node.op)](left, right)
        return self._comparison(node, values)

    @staticmethod
    def _unary(op: ast.unaryop, value: Any) -> Any:
        if isinstance(op, ast.Not):
            return np.logical_not(value)
        if isinstance(op, ast.Invert):
            return ~value
        return -value if isinstance(op, ast.USub) else value

    def _comparison(self, node: ast.Compare, values: Mapping[str, Any]) -> Any:
        operands = [self._value(part, values) for part in (node.left, *node.comparators)]
        holds: Any = True
        for op, left, right in zip(node.ops, operands, operands[1:], strict=False):
            holds = np.logical_and(holds, _COMPARISONS[type(op)](left, right))
        return holds
