"""The words of a dataclass of parameters: names in order, for the host and for traced code."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeAlias, get_type_hints

Word: TypeAlias = Any  # on the host an int, or a tensor for its address; in traced code an Int64


@cache
def word_names(kind: Any) -> tuple[str, ...]:
    """The words of a dataclass of parameters in their order, by dotted names: 'angles.cos'."""
    return tuple(
        f"{name}.{inner}" if inner else name
        for name, nested in members(kind)
        for inner in (word_names(nested) if nested else ("",))
    )


def members(kind: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a dataclass of parameters: (name, class), the class None where it is a word."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        nested = hints[field.name]
        yield field.name, nested if is_dataclass(nested) else None


def nothing(kind: Any) -> Any:
    """Return an instance whose words are all 0, for a part that a launch does not have."""
    return kind(**{name: nothing(inner) if inner else 0 for name, inner in members(kind)})


def fp32_bits(number: float) -> int:
    """Return the bits of a number in fp32, as a word takes them."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])
