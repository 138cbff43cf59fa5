"""Which values of a parameter the quick tests of scripts take; packages have `tests.tiers`.

A tuple holds a value for each of several parameters.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def quick(values: Iterable, every: int | None = None) -> list:
    """Quick is the first value, or with `every` one of that many in a row; the others are left to
    the matrix."""
    return [
        _param(value, *[pytest.mark.matrix] * bool(number % every if every else number))
        for number, value in enumerate(values)
    ]


def _param(value: object, *marks: pytest.MarkDecorator):
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
