"""Files from outside: bounded before they are parsed, and every failure names file and field."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

MOST_BYTES = 64 << 20  # of a JSON file
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # a FIFO must not block


class FileError(ValueError):
    """A file that is damaged, too large, or not what is expected; the message names it."""


class NoFile(FileError, FileNotFoundError):
    """A file that is not there; the message names it."""


def read_bounded(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """Return a regular file of at most `most` bytes. Raises FileError for any other, OSError where
    it cannot be read."""
    with os.fdopen(os.open(path, _READ), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise FileError(f"{path} has more than {most} bytes, the most that are read")
    return data


def json_of(data: bytes | str, name: str) -> Any:
    """Return parsed JSON. Raises FileError for anything else, an object with one key twice and
    nesting that is too deep included; name: of the file, for the message."""
    try:
        return json.loads(data, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{name} is not JSON: {error}") from error


def json_file(path: str | os.PathLike[str], most: int = MOST_BYTES) -> dict[str, Any]:
    """Return the JSON object of a file. Raises FileError, and OSError where it cannot be read."""
    found = json_of(read_bounded(path, most), os.fspath(path))
    if not isinstance(found, dict):
        raise FileError(f"{path} holds a JSON {type(found).__name__}, expected an object")
    return found


def require_fields(name: str, item: Any, fields: Mapping[str, type | tuple[type, ...]]) -> None:
    """Raise FileError unless `item` is an object with these fields, of these types."""
    if not isinstance(item, dict):
        raise FileError(f"{name} has {item!r:.80}, expected an object")
    for field, kind in fields.items():
        kinds = kind if isinstance(kind, tuple) else (kind,)
        found = item.get(field)
        # bool is an int for Python, and no number for a file.
        if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
            words = " or ".join(each.__name__ for each in kinds)
            raise FileError(f"{name}: {field} is {found!r:.80}, expected {words}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r:.80} appears twice in one object")
    return found
