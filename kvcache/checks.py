"""Checks of the arguments of books, layouts and plans.

They raise TypeError or ValueError, which name the argument, the value and the limit.
Every public call makes all of its checks before it changes anything. No torch and no numpy here:
commands import layouts before either.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

MAX_NUMBER = 1 << 60  # of whatever is counted: sums and products of a few still fit in 64 bits
MAX_SLOTS = 1 << 28  # of a pool: block tables are int32, and the books take some tens of bytes each


def require(name: str, value: object, kind: type, *, optional: bool = False) -> None:
    """TypeError for a value that is not of `kind`, nor None where it is optional."""
    if isinstance(value, kind) or (optional and value is None):
        return
    words = f"{kind.__name__}{' or None' * optional}"
    raise TypeError(f"{name} is {shown(value)}, expected {words}")


def whole(name: str, value: Any, least: int | None = 0, most: int | None = None) -> int:
    """Convert an int or an integer of numpy to an int.

    Args:
        least, most: the limits; None is MAX_NUMBER, with its sign.

    Raises:
        TypeError: for anything else, a bool too.
        ValueError: outside of the limits.
    """
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} is {shown(value)}, expected int")
        value = int(value)
    least = -MAX_NUMBER if least is None else least
    most = MAX_NUMBER if most is None else most
    if value < least:
        raise ValueError(f"{name} {value}: at least {least}")
    if value > most:
        raise ValueError(f"{name} {value}: at most {most}")
    return value


def set_whole(owner: object, *names: str) -> None:
    """Make the fields of a frozen dataclass ints, of any sign; raise as `whole` for what is none.

    Arithmetic on a small integer of numpy overflows, and operators know no such type.
    """
    for name in names:
        value = getattr(owner, name)
        if type(value) is not int:
            object.__setattr__(owner, name, whole(name, value, None))


def share(name: str, value: Any) -> None:
    """TypeError for what is no number; its range is the caller's to check, and NaN has none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {shown(value)}, expected float")


def numbers(name: str, values: Any, end: int) -> list[int]:
    """Slots 0 to end - 1 of a sequence, as ints."""
    is_array = hasattr(values, "__array__")
    if isinstance(values, str | bytes) or not (is_array or isinstance(values, Sequence)):
        raise TypeError(f"{name} is {shown(values)}, expected a sequence of slots")
    return [whole(f"{name}[{place}]", slot, 0, end - 1) for place, slot in enumerate(values)]


def shown(value: object) -> str:
    """Return the text for a message: a plain value, or the type of anything else."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:40]}..."
    return type(value).__name__
