"""Which values of a parameter the quick tests take, which the matrix, and which only the sweep.

A tuple holds a value for each of several parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest


def quick(values: Iterable, every: int | None = None) -> list:
    """Quick is the first value, or with `every` one of that many in a row; the others are left to
    the matrix."""
    return [
        _param(value, *[pytest.mark.matrix] * bool(number % every if every else number))
        for number, value in enumerate(values)
    ]


def matrix(values: Iterable, sweep: Iterable = (), every: int = 1) -> list:
    """Values of the matrix, or with `every` one of that many in a row; the others and `sweep` are
    what only the sweep takes."""
    return [
        *(
            _param(value, pytest.mark.sweep if number % every else pytest.mark.matrix)
            for number, value in enumerate(values)
        ),
        *(_param(value, pytest.mark.sweep) for value in sweep),
    ]


def in_turns(archs: Sequence[str], values: Iterable) -> list:
    """(arch, value): in the matrix one of two architectures, in the sweep the other one."""
    each = list(enumerate(values))
    return matrix(
        [(archs[number % 2], value) for number, value in each],
        sweep=[(archs[1 - number % 2], value) for number, value in each],
    )


def _param(value: object, *marks: pytest.MarkDecorator):
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
