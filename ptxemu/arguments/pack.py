"""Arguments as the bytes of kernel parameters, by the entry's signature, and the memory they name.

A parameter of 64 bits takes an address or a number, another scalar a number, and an array of bytes
a structure by value. PTX of CUDA C++ calls signed integers unsigned, so both ranges are allowed.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxemu.arguments.array import array_of, as_bytes
from ptxemu.arguments.tensor_map import EncodedMap
from ptxemu.machine.memory import Range, as_range
from ptxemu.numerics.formats import f32_to_bf16
from ptxemu.syntax.parser import TYPE_BYTES
from ptxemu.syntax.tree import Entry, Variable

_POINTER_BYTES = 8
_STRUCT_CODES = {"f16": "<e", "f32": "<f", "f64": "<d"}
_LONGEST = 60  # characters that are shown of a value


@dataclass(frozen=True)
class Packed:
    """Arguments of a launch.

    params: bytes of each parameter.
    memory: what the kernel may access, as arrays of bytes with their rights.
    keep: objects that own this memory.
    """

    params: list[bytes]
    memory: list[Any]
    keep: list[Any]


def pack(entry: Entry, args: Sequence[Any], memory: Sequence[Any] = ()) -> Packed:
    """Pack arguments in the order of the entry's parameters.

    memory: what the kernel may access as well, in the forms of `Module.launch`.

    Raises TypeError for a value that a parameter cannot take and ValueError for a wrong count, size
    or range; the message names the parameter.
    """
    if len(args) != len(entry.params):
        raise ValueError(
            f"{entry.name} takes {len(entry.params)} arguments, {len(args)} given:"
            f" {signature(entry)}"
        )
    params, arrays, blocks = [], [], []
    for number, (variable, value) in enumerate(zip(entry.params, args, strict=True)):
        place = _Place(entry.name, number, variable)
        try:
            params.append(_bytes_of(place, value))
            found = value.array if isinstance(value, EncodedMap) else array_of(value)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{place}: {error}") from error
        if isinstance(value, EncodedMap):
            blocks.append(value.block)
        if found is not None:
            arrays.append(found)
    ranges = [(*array.extent, array.writable) for array in arrays]
    ranges += [as_range(item) for item in memory if not isinstance(item, tuple)]
    by_address = [item for item in memory if isinstance(item, tuple)]
    return Packed(params, [*_memory(ranges), *blocks, *by_address], [*args, *arrays, *memory])


def signature(entry: Entry) -> str:
    """The parameters of an entry, such as "x .u64, n .u32, map .b8[128]"."""
    return ", ".join(f"{each.name} {_type_of(each)}" for each in entry.params) or "no parameters"


def _type_of(variable: Variable) -> str:
    size = TYPE_BYTES[variable.type]
    return f".{variable.type}" + f"[{variable.nbytes // size}]" * (variable.nbytes != size)


@dataclass(frozen=True)
class _Place:
    """A parameter, for messages."""

    entry: str
    number: int
    variable: Variable

    def __str__(self) -> str:
        """ "argument 0 of twice (x, .u64)"."""
        name = f"{self.variable.name}, {_type_of(self.variable)}"
        return f"argument {self.number} of {self.entry} ({name})"

    def refuse(self, value: Any, wanted: str) -> TypeError:
        return TypeError(f"{self} wants {wanted}; given {_described(value)}")


def _described(value: Any) -> str:
    """Such as "a float 2.5" or "an array of float32 (64,)"."""
    array = array_of(value)
    if array is not None:
        return f"an array ({type(value).__name__}) of {array}"
    words = repr(value)
    words = words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."
    return f"{type(value).__name__} {words}"


def _bytes_of(place: _Place, value: Any) -> bytes:
    kind, size = place.variable.type, place.variable.nbytes
    raw = _raw(value)
    if raw is not None and len(raw) == size and not _is_number(value):
        return raw
    if size != TYPE_BYTES[kind] or kind == "b128":
        return _structure(place, value, raw)
    if kind.endswith("x2"):
        raise place.refuse(value, f"{size} bytes")
    if kind in ("f16", "bf16", "f32", "f64"):
        return _float(place, value)
    if size == _POINTER_BYTES:
        return _pointer(place, value)
    return _integer(place, value)


def _raw(value: Any) -> bytes | None:
    """The bytes of a value that has some: bytes, scalars of numpy, structures of ctypes."""
    if isinstance(value, bytes | bytearray | memoryview | np.generic | ctypes.Structure):
        return bytes(value) if not isinstance(value, np.generic) else value.tobytes()
    if isinstance(value, ctypes.Array | ctypes.Union):
        return bytes(value)
    return None


def _is_number(value: Any) -> bool:
    """Whether a scalar of numpy is converted to the parameter's type, instead of copied."""
    return isinstance(value, np.generic) and value.dtype.kind in "biuf"


def _structure(place: _Place, value: Any, raw: bytes | None) -> bytes:
    size = place.variable.nbytes
    if isinstance(value, EncodedMap):
        raw = value.raw
    if isinstance(value, np.ndarray) and value.shape == ():
        raw = value.tobytes()
    if raw is None:
        wanted = f"{size} bytes by value (bytes, a numpy scalar or a ctypes structure)"
        raise place.refuse(
            value, wanted + ", as array.tobytes() is" * (array_of(value) is not None)
        )
    if len(raw) != size:
        raise ValueError(f"wants {size} bytes by value; {_described(value)} has {len(raw)}")
    return raw


def _pointer(place: _Place, value: Any) -> bytes:
    """An address or a number of 64 bits."""
    if value is None:
        return bytes(_POINTER_BYTES)
    if isinstance(value, EncodedMap):
        return int(value.block.ctypes.data).to_bytes(_POINTER_BYTES, "little")
    array = array_of(value)
    if array is not None:
        return array.address.to_bytes(_POINTER_BYTES, "little")
    return _integer(place, value, "an array, None or an integer")


def _integer(place: _Place, value: Any, wanted: str = "an integer") -> bytes:
    size, kind = place.variable.nbytes, place.variable.type
    if kind[0] == "b" and isinstance(value, np.floating):  # of a type that PTX does not name
        raw: bytes = value.tobytes()
        if len(raw) == size:
            return raw
    number = _scalar(value)
    if isinstance(number, float | np.floating):
        hint = f"; pass np.float{8 * size}(...) for its bits" if kind[0] == "b" and size > 1 else ""
        raise place.refuse(value, wanted + hint)
    try:
        number = int(number) if isinstance(number, bool | np.bool_) else operator.index(number)
    except TypeError:
        raise place.refuse(value, wanted) from None
    low = -(1 << 8 * size - 1)
    high = (1 << 8 * size - (kind[0] == "s")) - 1
    if not low <= number <= high:
        raise ValueError(f"{number} is not in the range of .{kind}, {low} to {high}")
    return (number & (1 << 8 * size) - 1).to_bytes(size, "little")


def _float(place: _Place, value: Any) -> bytes:
    kind = place.variable.type
    number = _scalar(value)
    if not isinstance(number, float | int | np.floating | np.integer):
        try:
            number = float(number) if isinstance(number, np.generic) else None
        except (TypeError, ValueError):
            number = None
        if number is None:
            raise place.refuse(value, "a number")
    number = float(number)
    if kind == "bf16":
        return np.asarray(f32_to_bf16(np.asarray(number, np.float32))).tobytes()
    try:
        return struct.pack(_STRUCT_CODES[kind], number)
    except OverflowError:
        raise ValueError(f"{number} is not in the range of .{kind}") from None


def _scalar(value: Any) -> Any:
    """The number in a scalar of ctypes or an array without dimensions; else the value itself."""
    if isinstance(value, ctypes._SimpleCData):
        return 0 if value.value is None else value.value
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return value if isinstance(value, np.generic) else value.item()
    return value


def _memory(ranges: Sequence[Range]) -> list[np.ndarray]:
    """The ranges as bytes. Where one that is read-only shares bytes with one that is not, all that
    overlap become one range that may be written."""
    found: list[np.ndarray] = []
    for group in _overlapping(sorted(ranges)):
        if len({writable for _, _, writable in group}) > 1:
            group = [(group[0][0], max(high for _, high, _ in group), True)]
        found += [as_bytes(low, high, writable=writable) for low, high, writable in group]
    return found


def _overlapping(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Split sorted ranges into groups that share no byte; empty ones are left out."""
    group: list[Range] = []
    end = 0
    for each in ranges:
        if each[1] <= each[0]:
            continue
        if group and each[0] >= end:
            yield group
            group, end = [], 0
        group.append(each)
        end = max(end, each[1])
    if group:
        yield group
