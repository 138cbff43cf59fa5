"""Which values of a parameter the quick tests take; the others are left to the matrix."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def quick(values: Iterable, every: int | None = None) -> list:
    """All values as parameters: quick is the first, or with `every` one of that many in a row."""

    def left(number: int) -> bool:
        return bool(number % every if every else number)

    return [
        pytest.param(value, marks=[pytest.mark.matrix] * left(number))
        for number, value in enumerate(values)
    ]
