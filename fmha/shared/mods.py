"""Programs of `fmha.mods` in a kernel: masks and scores by functions of positions (device code).

A thread evaluates a program for every element of its rows. What the program computes from b, h and
q alone is evaluated once for a row and tile, and what it computes from k alone once for a column.

The columns of a thread are at constant distances from its first one. So a number that is linear in
k, as k - q or slope * (k - q), is kept as `Line`: its value in the first column, evaluated once for
a row, and its slope. A comparison then has a constant on one side, and a bias is one FFMA.

Indices of tables are clamped, so that no function reads outside of them.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint8, Uint32
from cutlass.cutlass_dsl import select_

from fmha.mods import ARGUMENTS, COMPARISONS, Instruction, Program
from fmha.shared.args import Spot
from kernelkit.device.online_softmax import RowView, of_row
from kernelkit.plan.limits import MAX_POSITION
from kernelkit.plan.log2 import LN_2, LOG2_E

MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
BY_OPERATOR: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in COMPARISONS},
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "shl": operator.lshift,
    "shr": operator.rshift,
}


@dataclass(frozen=True)
class Line:
    """base + slope * column, the column being a constant of the kernel.

    slope: a number of Python or of the DSL.
    small: whether all values are below 2 * MAX_POSITION in magnitude.
    """

    base: Any
    slope: Any
    small: bool = False

    def at(self, column: int) -> Any:
        """Return the value in a column."""
        return self.base if column == 0 else self.base + self.slope * column


def change_scores(
    program: Program,
    scores: cute.Tensor,
    spots: tuple[Spot, ...],
    tables: tuple[cute.Tensor, ...],
    key: Int32,
    scale: Any,
    view: RowView,
) -> None:
    """Replace scores q.k by what the function makes of scale q.k. key: of the thread's first
    column; scale: a number, or one for each row."""
    values = Values(program, tables, spots, key)
    for row, element, column in _elements(view):
        score = scores[element] * of_row(scale, row)
        scores[element] = Float32(values.result(row, column, score))


def hide_scores(
    program: Program,
    scores: cute.Tensor,
    spots: tuple[Spot, ...],
    tables: tuple[cute.Tensor, ...],
    key: Int32,
    unseen: Any,
    view: RowView,
) -> None:
    """Replace scores that the function hides by `unseen`, a number or one for each row."""
    values = Values(program, tables, spots, key)
    for row, element, column in _elements(view):
        seen = values.result(row, column)
        scores[element] = choose(seen, scores[element], of_row(unseen, row))


def _elements(view: RowView) -> list[tuple[int, int, int]]:
    """(row, element, column from the thread's first one) of every element."""
    if view.rows == 1:
        return [(0, element, element) for element in range(view.begin, view.end)]
    # Element c + 2 h + 4 j belongs to row h and to column c + 8 j.
    elements = range(view.begin, view.end)
    return [(view.row_of(n), n, n // 4 * 8 + n % 2) for n in elements]


def choose(condition: Any, a: Any, b: Any) -> Any:
    """Return a where the condition holds, else b."""
    if isinstance(condition, bool):
        return a if condition else b
    kind = type(a) if isinstance(a, cutlass.Numeric) else type(b)
    if kind in (bool, int, float):
        kind = {bool: Boolean, int: Int32, float: Float32}[kind]
    return kind(select_(condition, kind(a), kind(b)))


class Values:
    """Values of a program for the elements of one tile, each evaluated once.

    spots: of the thread's rows.
    key: position of column 0.
    """

    def __init__(
        self,
        program: Program,
        tables: tuple[cute.Tensor, ...],
        spots: tuple[Spot, ...],
        key: Int32,
    ) -> None:
        self.program, self.tables, self.spots, self.key = program, tables, spots, key
        self.uses, self.lines = uses_of(program), lines_of(program)
        # Values that do not depend on a score, and those of the present element.
        self.known: dict[tuple, Any] = {}
        self.of_element: dict[tuple, Any] = {}

    def result(self, row: int, column: int, score: Any = None) -> Any:
        """Return the program's result for an element; score: None for a mask."""
        self.score, self.of_element = score, {}
        return self.plain(self.program.result, row, column)

    def plain(self, name: Any, row: int, column: int) -> Any:
        """Return the value of an operand as a number."""
        if not isinstance(name, str):
            return name
        found = self.value(name, row, column)
        if not isinstance(found, Line):
            return found
        return self._once("plain", name, row, column, lambda: found.at(column))

    def value(self, name: Any, row: int, column: int) -> Any:
        """Return the value of an operand, a number or a `Line`."""
        if not isinstance(name, str):
            return name
        if name == "s":
            return self.score
        if name == "k":
            return Line(self.key, 1, small=True)
        if name in ("b", "h", "q"):
            spot = self.spots[row]
            return Int32({"b": spot.batch, "h": spot.head, "q": spot.position}[name])
        step = self.program.instructions[int(name[1:])]
        if name in self.lines:
            return self._once("line", name, row, 0, lambda: self._line(step, row))
        return self._once("value", name, row, column, lambda: self._number(step, row, column))

    def _once(self, kind: Any, name: str, row: int, column: int, make: Callable[[], Any]) -> Any:
        """Return what `make` made for these rows, columns and scores, or makes now."""
        used = self.uses[name]
        known = self.of_element if "s" in used else self.known
        own_row = row if used & {"b", "h", "q"} else -1
        key = kind, name, own_row, column if "k" in used else -1
        if key not in known:
            known[key] = make()
        return known[key]

    def _line(self, step: Instruction, row: int) -> Line:
        """Return the result of an instruction that is linear in k."""
        a, *rest = (self.value(operand, row, 0) for operand in step.operands)
        if step.operation == "float":
            return Line(Float32(a.base), _float(a.slope))
        (b,) = rest
        if step.operation == "mul":
            line, factor = (a, b) if isinstance(a, Line) else (b, a)
            return Line(line.base * factor, line.slope * factor)
        sign = 1 if step.operation == "add" else -1
        first = a if isinstance(a, Line) else Line(a, 0)
        second = b if isinstance(b, Line) else Line(b, 0)
        small = step.operation == "sub" and {*step.operands} == {"q", "k"}
        base = first.base + second.base if sign > 0 else first.base - second.base
        slope = first.slope + second.slope if sign > 0 else first.slope - second.slope
        return Line(base, slope, small)

    def _number(self, step: Instruction, row: int, column: int) -> Any:
        """Return the result of another instruction."""
        if step.operation in COMPARISONS:
            return self._compared(step, row, column)
        operands = [self.plain(operand, row, column) for operand in step.operands]
        if step.operation.startswith("load"):
            return load(self.tables[int(step.operation[4:])], operands)
        if step.operation in ("floordiv", "mod"):
            a, b = step.operands
            positive = a in ARGUMENTS and isinstance(b, int)  # positions are, and constants
            divide = floordiv if step.operation == "floordiv" else modulo
            return divide(*operands, positive)
        if step.operation in BY_OPERATOR:
            return BY_OPERATOR[step.operation](*_typed(operands))
        return OTHERS[step.operation](*operands)

    def _compared(self, step: Instruction, row: int, column: int) -> Any:
        """Compare; a line with a number that does not depend on k by its base alone."""
        a, b = (self.value(operand, row, column) for operand in step.operands)
        operation = step.operation
        if isinstance(b, Line) and not isinstance(a, Line):
            a, b, operation = b, a, MIRRORED[operation]
        compare = BY_OPERATOR[operation]
        if isinstance(a, Line) and a.small and self._is_flat(step):
            # Within these bounds the difference does not overflow, and beyond them the result of
            # the comparison is the same.
            bound = 2 * MAX_POSITION
            key = ("bound", step, row)
            if key not in self.known:
                self.known[key] = a.base - _clamped(b, -bound, bound)
            return compare(self.known[key], -a.slope * column)
        pair = _typed([self.plain(operand, row, column) for operand in step.operands])
        return BY_OPERATOR[step.operation](*pair)

    def _is_flat(self, step: Instruction) -> bool:
        """Whether one operand of a comparison does not depend on k, nor on a score."""
        return any(not self.uses.get(each, frozenset()) & {"k", "s"} for each in step.operands)


def uses_of(program: Program) -> dict[Any, frozenset[str]]:
    """Map each argument and each result to the arguments that it depends on."""
    found: dict[Any, frozenset[str]] = {name: frozenset(name) for name in "bhqks"}
    for number, step in enumerate(program.instructions):
        inside = (found.get(operand, frozenset()) for operand in step.operands)
        found[f"%{number}"] = frozenset().union(*inside)
    return found


def lines_of(program: Program) -> frozenset[str]:
    """Names of the results that are linear in k, with a slope that does not depend on k."""
    lines, uses = {"k"}, uses_of(program)
    for number, step in enumerate(program.instructions):
        linear = [operand in lines for operand in step.operands]
        flat = [not uses.get(operand, frozenset()) & {"k", "s"} for operand in step.operands]
        if step.operation in ("add", "sub"):
            is_line = any(linear) and all(a or b for a, b in zip(linear, flat, strict=True))
        elif step.operation == "mul":
            is_line = sorted(linear) == [False, True] and flat[linear.index(False)]
        else:
            is_line = step.operation == "float" and linear[0]
        if is_line:
            lines.add(f"%{number}")
    return frozenset(lines - {"k"})


def _float(value: Any) -> Any:
    return float(value) if isinstance(value, int) else Float32(value)


def _typed(values: list[Any]) -> list[Any]:
    """Constants as numbers of the DSL where all operands are constants."""
    if any(isinstance(value, cutlass.Numeric) for value in values):
        return values
    return [{bool: Boolean, int: Int32, float: Float32}[type(value)](value) for value in values]


def _clamped(value: Any, low: int, high: int) -> Any:
    if isinstance(value, int):
        return min(max(value, low), high)
    return cutlass.max(cutlass.min(value, high), low)


def load(table: cute.Tensor, indices: list[Any]) -> Any:
    """Return an element, of the nearest one where an index is too large, else the last one."""
    shape = table.shape
    place = [
        Int32(cutlass.min(Uint32(index), Uint32(size - 1)))
        for index, size in zip(indices or [0], shape, strict=True)
    ]
    element = table[tuple(place)] if len(place) > 1 else table[place[0]]
    kind = type(element)
    if kind is Uint8:
        return element != 0
    return Float32(element) if kind.is_float else Int32(element)


def floordiv(a: Any, b: Any, positive: bool = False) -> Any:
    """Return a // b, rounded down. positive: whether neither is negative."""
    if isinstance(b, int) and b & b - 1 == 0:
        return Int32(a) >> b.bit_length() - 1
    a, b = Int32(a), Int32(b)
    quotient = a // b  # the DSL rounds towards 0
    if positive:
        return quotient
    rest = a - quotient * b
    return quotient - Int32((rest != 0) & ((rest ^ b) < 0))


def modulo(a: Any, b: Any, positive: bool = False) -> Any:
    """Return a % b with the sign of b. positive: whether neither is negative."""
    if isinstance(b, int) and b & b - 1 == 0:
        return Int32(a) & b - 1
    return a - floordiv(a, b, positive) * b


def _not(a: Any) -> Any:
    if isinstance(a, bool):
        return not a
    return ~a if not isinstance(a, Boolean) else a ^ Boolean(True)


OTHERS: dict[str, Callable[..., Any]] = {
    "where": choose,
    "float": lambda a: Float32(a),
    "int": lambda a: Int32(a),
    "not": _not,
    "minimum": lambda a, b: cutlass.min(*_typed([a, b])),
    "maximum": lambda a, b: cutlass.max(*_typed([a, b])),
    "exp": lambda a: cute.math.exp2(Float32(a) * LOG2_E, fastmath=True),
    "exp2": lambda a: cute.math.exp2(Float32(a), fastmath=True),
    "log": lambda a: cute.math.log2(Float32(a), fastmath=True) * LN_2,
    "log2": lambda a: cute.math.log2(Float32(a), fastmath=True),
    "tanh": lambda a: tanh(Float32(a)),
    "sqrt": lambda a: cute.math.sqrt(Float32(a), fastmath=True),
    "rsqrt": lambda a: cute.math.rsqrt(Float32(a), fastmath=True),
    "sin": lambda a: cute.math.sin(Float32(a), fastmath=True),
    "cos": lambda a: cute.math.cos(Float32(a), fastmath=True),
    "floor": lambda a: cute.math.floor(Float32(a)),
}


def tanh(a: Float32) -> Float32:
    """Return 1 - 2 / (1 + exp(2 a)), which tanh.approx with its 10 bits is not good enough for."""
    power = cute.math.exp2(a * (2.0 * LOG2_E), fastmath=True)
    return 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + power)
