"""What rules calculate with: rows of measurements, and sums and quotients of them with a range.

An `Expression` is data: `row("latency", instruction="rcp") - row("latency", instruction="add.f32")`
says which rows it needs, in words, and is evaluated for the rows of one file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Missing(LookupError):
    """The file has no such row, or one that says why there is no figure."""


class Figure(NamedTuple):
    """A value, and the lowest and the highest of its repetitions."""

    value: float
    low: float
    high: float


class Rows:
    """The rows of a file of `bench.py units`."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._by_name: dict[str, list[Mapping[str, Any]]] = {}
        for each in rows:
            if "benchmark" in each:
                self._by_name.setdefault(each["benchmark"], []).append(each)

    def has(self, benchmark: str) -> bool:
        """Whether anything of this name was measured."""
        return any("value" in each for each in self._by_name.get(benchmark, ()))

    def figure(self, benchmark: str, variant: Mapping[str, Any]) -> Figure:
        """Of the one row whose variant has all of these; None: it does not have that key. Raises
        Missing where there is none, ValueError where there are several."""
        found = [
            each
            for each in self._by_name.get(benchmark, ())
            if all(each["variant"].get(key) == value for key, value in variant.items())
        ]
        words = words_of(benchmark, variant)
        if not found:
            raise Missing(f"no row of {words}")
        if len(found) > 1:
            raise ValueError(f"{len(found)} rows of {words}: a rule has to name one")
        if "value" not in found[0]:
            raise Missing(f"{words}: {found[0].get('error', 'no figure')}")
        return Figure(*(float(found[0][key]) for key in Figure._fields))


def words_of(benchmark: str, variant: Mapping[str, Any]) -> str:
    """`latency (instruction rcp)`."""
    named = ", ".join(f"{key} {value}" for key, value in variant.items() if value is not None)
    return f"{benchmark} ({named})" if named else benchmark


@dataclass(frozen=True)
class Expression:
    """of: evaluates it, raises Missing. words: what it is, in words. plain: one term, which needs
    no brackets."""

    of: Callable[[Rows], Figure]
    words: str
    plain: bool = True

    def __add__(self, other: Expression | float) -> Expression:
        return _made(
            "+", self, other, lambda a, b: Figure(*(x + y for x, y in zip(a, b, strict=True)))
        )

    def __sub__(self, other: Expression | float) -> Expression:
        return _made("-", self, other, lambda a, b: Figure(
            a.value - b.value, a.low - b.high, a.high - b.low
        ))  # fmt: skip

    def __mul__(self, other: Expression | float) -> Expression:
        """Of what is not negative."""
        return _made(
            "*", self, other, lambda a, b: Figure(*(x * y for x, y in zip(a, b, strict=True)))
        )

    def __truediv__(self, other: Expression | float) -> Expression:
        """Of what is not negative."""
        return _made("/", self, other, lambda a, b: Figure(
            a.value / b.value, a.low / b.high, a.high / b.low
        ))  # fmt: skip


def _made(
    sign: str,
    left: Expression,
    right: Expression | float,
    compute: Callable[[Figure, Figure], Figure],
) -> Expression:
    other = right if isinstance(right, Expression) else constant(right)

    def of(rows: Rows) -> Figure:
        return compute(left.of(rows), other.of(rows))

    sides = [each.words if each.plain else f"({each.words})" for each in (left, other)]
    return Expression(of, f" {sign} ".join(sides), plain=False)


def row(benchmark: str, **variant: Any) -> Expression:
    """The figure of one row. `from_` stands for a key `from`."""
    named = {key.rstrip("_"): value for key, value in variant.items()}
    return Expression(lambda rows: rows.figure(benchmark, named), words_of(benchmark, named))


def constant(value: float) -> Expression:
    """A number that is no measurement."""
    return Expression(lambda _: Figure(value, value, value), f"{value:g}")


def mean(first: Expression, second: Expression) -> Expression:
    """Of two."""
    made = (first + second) / 2.0
    return Expression(made.of, f"the mean of {first.words} and {second.words}")


def not_negative(inner: Expression) -> Expression:
    """0 where it would be less."""

    def of(rows: Rows) -> Figure:
        return Figure(*(max(each, 0.0) for each in inner.of(rows)))

    return Expression(of, inner.words, inner.plain)


def slope(benchmark: str, key: str, first: float, last: float, **variant: Any) -> Expression:
    """What each step of a key costs, between two of its values."""
    here, there = (row(benchmark, **variant, **{key: at}) for at in (first, last))
    made = (there - here) / float(last - first)
    words = f"{benchmark} per {key} from {first} to {last}"
    named = {name.rstrip("_"): value for name, value in variant.items()}
    return Expression(made.of, words_of(words, named))
