"""Objects of known classes as bytes: reading them makes such objects and runs nothing else.

    4 numbers: bytes of the atoms, batches, places, bytes of the blob
    atoms     JSON: a list of null, booleans, numbers and strings
    batches   (kind, width, number of rows) of each
    places    of all rows of all batches, one after the other
    blob      all `bytes`, one after the other

A place is the number of an object: those of the atoms come first, then those of the rows. A row
makes an object of a kind from objects before it, which stand at `width` places. The last row has
the whole alone. Kinds are containers and the classes that a reader names. Rows of a list of
integers have these instead of places, and a set that is nearly another one refers to that. An
object that stands in several places comes back as one object. All numbers have 32 bits, little
endian.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import starmap
from operator import attrgetter
from typing import Any

import numpy as np

_HEAD = struct.Struct("<4I")
_ATOMS = frozenset((type(None), bool, int, float, str))
_FAILURES = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_Fields = tuple[Any, ...]
_Maker = Callable[[Iterator[_Fields]], Iterator[Any]]  # of all objects of a batch
_Getter = Callable[[Any], Collection[Any]]
_FEW = 8  # a smaller set is written as it is


class NotPlain(TypeError):
    """An object of a class that is not known."""


class Codec:
    """Writes and reads objects of these classes: dataclasses, or classes whose PLAIN lists the
    attributes that they have."""

    def __init__(self, classes: Sequence[type]) -> None:
        self._getters = {cls: _getter(cls) for cls in classes}
        self._kinds = {cls: kind for kind, cls in enumerate((*_CONTAINERS, *classes), _FIRST)}
        self._shared = {*_SHARED, *(cls for cls in classes if hasattr(cls, "__slots__"))}
        self._makers = [*_CONTAINERS.values(), *map(_maker, classes)]

    def dumps(self, value: Any) -> bytes:
        """NotPlain for an object of another class."""
        writer = _Writer(self._kinds, self._getters, self._shared)
        writer.place_of((value,))
        return writer.text()

    def loads(self, data: bytes) -> Any:
        """ValueError for what `dumps` of this codec has not written."""
        try:
            nbytes, batches, places, blob_bytes = _HEAD.unpack_from(data)
            end = _HEAD.size + nbytes
            numbers = np.frombuffer(data, "<i4", 3 * batches + places, end)
            blob = data[end + numbers.nbytes :]
            heads = numbers[: 3 * batches].reshape(batches, 3)
            sizes = heads[:, 1].astype(np.int64) * np.maximum(heads[:, 2], 1)
            if len(blob) != blob_bytes or sizes.sum() != places or (heads < 0).any():
                raise ValueError("lengths disagree")
            return self._made(
                json.loads(data[_HEAD.size : end]), heads, numbers[3 * batches :].tolist(), blob
            )
        except (*_FAILURES, struct.error) as error:
            raise ValueError(f"not plain objects: {type(error).__name__} {error}") from error

    def _made(self, found: list[Any], heads: np.ndarray, flat: list[int], blob: bytes) -> Any:
        """found: the atoms; all objects are added."""
        if not {type(atom) for atom in found} <= _ATOMS:
            raise ValueError("unknown kind of atom")
        get, at = found.__getitem__, 0
        for kind, width, rows in heads.tolist():
            parts = flat[at : at + width * rows]
            at += width * rows
            if kind == _INTEGERS:
                found += map(list, _in_rows(parts, width))
            elif kind == _BYTES:
                found += [blob[first:last] for first, last in _in_rows(parts, 2)]
            elif width:
                found += self._makers[kind - _FIRST](_in_rows(map(get, parts), width))
            else:  # as many as there are batches of them
                found += self._makers[kind - _FIRST](iter([()]))
        (value,) = found[-1]
        return value


def _in_rows(parts: Any, width: int) -> Iterator[_Fields]:
    return zip(*[iter(parts)] * width, strict=True)


def _dicts(rows: Iterator[_Fields]) -> Iterator[dict[Any, Any]]:
    return (dict(zip(row[::2], row[1::2], strict=True)) for row in rows)


def _near(rows: Iterator[_Fields]) -> Iterator[Any]:
    return (other.difference(without).union(more) for other, without, more in rows)


class _Near:
    """The kind of a set that is another one without some objects and with some more."""


_BYTES, _INTEGERS, _FIRST = range(3)  # kinds: of those from _FIRST on a row has places
_CONTAINERS: dict[type, _Maker] = {
    tuple: lambda rows: rows,
    list: lambda rows: map(list, rows),
    set: lambda rows: map(set, rows),
    frozenset: lambda rows: map(frozenset, rows),
    dict: _dicts,
    range: lambda rows: starmap(range, rows),
    _Near: _near,
}
_SHARED = (tuple, frozenset, range)  # of whose equals one is enough


def _names(cls: Any) -> list[str]:
    if dataclasses.is_dataclass(cls):
        return [item.name for item in dataclasses.fields(cls)]
    return [*cls.PLAIN]


def _getter(cls: Any) -> _Getter:
    """Return a function from an object to the values of its fields."""
    names = _names(cls)
    if len(names) > 1:
        return attrgetter(*names)
    return lambda item: tuple(getattr(item, name) for name in names)


def _maker(cls: Any) -> _Maker:
    """Return a maker of objects with these fields.

    It calls the constructor only for classes that can have no other fields.
    """
    if hasattr(cls, "__slots__"):
        return lambda rows: starmap(cls, rows)
    names, new = _names(cls), object.__new__

    def made(rows: Iterator[_Fields]) -> Iterator[Any]:
        for row in rows:
            found = new(cls)
            found.__dict__.update(zip(names, row, strict=True))
            yield found

    return made


@dataclasses.dataclass(slots=True)
class _Row:
    """level: one more than the highest of the rows that it refers to."""

    kind: int
    numbers: list[int]
    level: int = 0
    refers: bool = False


class _Writer:
    """Atoms and rows of one text. Equal atoms are one, and so are equal objects of some kinds."""

    def __init__(
        self, kinds: dict[type, int], getters: dict[type, _Getter], shared: set[type]
    ) -> None:
        self._kinds, self._getters, self._shared = kinds, getters, shared
        self._atoms: dict[tuple[type, Any], int] = {}
        self._values: list[Any] = []
        self._rows: list[_Row] = []
        self._known: dict[int, int] = {}  # id of an object -> its row
        self._alive: list[Any] = []  # so that no id is given twice
        self._equal: dict[tuple[int, ...], int] = {}
        self._last: dict[type, Any] = {}  # the last set of a kind
        self._blob = bytearray()

    def place_of(self, item: Any) -> int:
        """Rows count from 0. Atoms count from -1 down, as long as there are more to come."""
        return self._places((item,))[0]

    def _places(self, items: Collection[Any]) -> list[int]:
        """Return the place of each item: a program has a hundred thousand of them."""
        atoms, values, known, found = self._atoms, self._values, self._known, []
        for item in items:
            cls = type(item)
            if cls in _ATOMS:
                # 1, 1.0 and True differ, and so do 0.0 and -0.0.
                key = (cls, repr(item)) if cls is float else (cls, item)
                place = atoms.get(key)
                if place is None:
                    values.append(item)
                    place = atoms[key] = -len(values)
            else:
                place = known.get(id(item))
                if place is None:
                    place = known[id(item)] = self._row(item, cls)
                    self._alive.append(item)
            found.append(place)
        return found

    def _row(self, item: Any, cls: type) -> int:
        if cls is bytes:
            self._blob += item
            return self._add(_Row(_BYTES, [len(self._blob) - len(item), len(self._blob)]))
        if cls is list and item and all(type(n) is int and abs(n) < 1 << 31 for n in item):
            return self._add(_Row(_INTEGERS, item))
        if cls not in self._kinds:
            raise NotPlain(f"{item!r:.80} is of {cls}")
        kind, parts = self._kinds[cls], self._parts(item, cls)
        if cls in (set, frozenset) and len(item) >= _FEW:
            other, self._last[cls] = self._last.get(cls, ()), item
            if len(item.symmetric_difference(other)) * 2 < len(item):
                kind = self._kinds[_Near]
                parts = other, frozenset(other - item), frozenset(item - other)
        places, rows = self._places(parts), self._rows
        level = 1 + max([rows[place].level for place in places if place >= 0], default=0)
        if cls not in self._shared:
            return self._add(_Row(kind, places, level, True))
        key = kind, *places
        equal = self._equal.get(key)
        if equal is None:
            equal = self._equal[key] = self._add(_Row(kind, places, level, True))
        return equal

    def _add(self, row: _Row) -> int:
        self._rows.append(row)
        return len(self._rows) - 1

    def _parts(self, item: Any, cls: type) -> Collection[Any]:
        """Return the objects to which an object's row refers."""
        if cls in self._getters:
            return self._getters[cls](item)
        if cls is dict:
            return [part for pair in item.items() for part in pair]
        if cls is range:
            return item.start, item.stop, item.step
        return sorted(item, key=repr) if cls in (set, frozenset) else item

    def text(self) -> bytes:
        """Return all bytes, with rows in batches of one level, kind and width."""
        batches: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, row in enumerate(self._rows):
            alone = -1 if row.numbers else number
            batches[row.level, row.kind, len(row.numbers), alone].append(number)
        order = [number for key in sorted(batches) for number in batches[key]]
        place = dict(zip(order, range(len(self._values), 1 << 31), strict=False))
        flat: list[int] = []
        for number in order:
            row = self._rows[number]
            flat += [place.get(n, -1 - n) for n in row.numbers] if row.refers else row.numbers
        heads = [part for key in sorted(batches) for part in (*key[1:3], len(batches[key]))]
        atoms = json.dumps(self._values, separators=(",", ":")).encode()
        head = _HEAD.pack(len(atoms), len(batches), len(flat), len(self._blob))
        return head + atoms + np.array(heads + flat, "<i4").tobytes() + bytes(self._blob)
