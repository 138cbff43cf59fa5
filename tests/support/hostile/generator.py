"""Wrong calls, drawn from the signatures of public functions.

A right call is changed at one or two places: an argument, or a field of a dataclass, gets a value
of another type or out of range, or two tensors get a forbidden relation, such as common memory.
Valid values of an argument follow from its annotation.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import random
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.support.hostile.calls import begin_again, freed

Given = dict[str, Any]
Change = Callable[[Any], Any]


def _the_result(result: Any, given: Given) -> Any:
    return result


@dataclass(frozen=True)
class Base:
    """A public function and a right call of it.

    make: makes the call's arguments.
    writes: paths of tensors that it writes to, such as 'rows/pool'.
    in_place: paths of two tensors that may be one.
    options_of: function whose arguments are the options of this one.
    contents: whether tensors are read, so that they have to have memory, on one device.
    computed: makes tensors of the result and the arguments; None if a call computes nothing.
    """

    name: str
    function: Callable
    make: Callable[[], Given]
    writes: tuple[str, ...] = ()
    in_place: frozenset[str] = frozenset()
    options_of: Callable | None = None
    contents: bool = True
    computed: Callable[[Any, Given], Any] | None = _the_result

    def arguments(self) -> Given:
        """Make the call's arguments again, with the same values."""
        begin_again()
        return self.make()


@dataclass(frozen=True)
class Call:
    """A changed call.

    paths: changed places.
    refused: whether the call has to be refused.
    typed: whether the type is wrong, so that the message has to name the argument.
    raised: error that the constructor of an argument raised already.
    """

    base: Base
    given: Given
    paths: tuple[str, ...]
    what: str
    refused: bool
    typed: bool
    raised: Exception | None = None

    def __str__(self) -> str:
        return f"{self.base.name}: {' and '.join(self.paths)} {self.what}"


class Stranger:
    """An object of an unknown type."""


# For each kind of argument: (description, value), with another type, and out of range.
NUMBERS: tuple[tuple[str, Any], ...] = (
    ("a text", "1"), ("True", True), ("a list", [1]), ("a complex number", 1j), ("bytes", b"1"),
    ("an array", np.ones(2)), ("a stranger", Stranger()), ("np.True_", np.bool_(True)),
)  # fmt: skip
OF_OTHER_TYPES: dict[type, tuple[tuple[str, Any], ...]] = {
    int: (*NUMBERS, ("1.5", 1.5), ("NaN", math.nan), ("np.float32", np.float32(2))),
    float: NUMBERS,
    bool: (
        ("0", 0), ("1", 1), ("a text", "yes"), ("np.True_", np.bool_(True)), ("1.0", 1.0),
        ("a tensor", torch.ones(())), ("a stranger", Stranger()), ("a list", []),
    ),
    str: (("1", 1), ("bytes", b"auto"), ("a list", ["auto"]), ("True", True), ("1.0", 1.0)),
    torch.dtype: (("a text", "bf16"), ("1", 1), ("a type", float), ("a list", [torch.float16])),
    torch.Tensor: (
        ("a text", "q"), ("1.5", 1.5), ("a list", [1.0]), ("an array", np.zeros((2, 2))),
        ("a stranger", Stranger()), ("True", True), ("a dtype", torch.float32), ("a tuple", ()),
    ),
}  # fmt: skip
OUT_OF_RANGE: dict[type, tuple[Any, ...]] = {
    int: (-1, -(1 << 31), 1 << 31, 1 << 63, 1 << 70, -(1 << 63) - 1),
    float: (math.nan, math.inf, -math.inf, 10**400),
    str: ("", "nonsense", "sm_75", "CUDA"),
    torch.dtype: (torch.complex64, torch.int8, torch.float64),
}
AT_THE_EDGE: dict[type, tuple[Any, ...]] = {
    int: (0, 1, 7, np.int64(1), np.uint8(3)),
    float: (0.0, -1.0, 1e-320, 1e39, np.float32(0.5), 2, np.int32(1)),
    bool: (True, False),
    str: ("auto", "emulate"),
    torch.dtype: (torch.float16, torch.bfloat16, torch.float32),
}


def sparse(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones(tensor.shape).to_sparse()


def nested(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(tensor.shape)])


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in every other element of a row."""
    if not tensor.ndim:
        return tensor
    words = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    return words.repeat_interleave(2, -1).view(tensor.dtype)[..., ::2]


def broadcast(tensor: torch.Tensor) -> torch.Tensor:
    """Return rows that are all the first one."""
    return tensor[:1].expand(tensor.shape) if tensor.ndim else tensor


def deeper(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[None]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten()


def shorter(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1].clone() if tensor.ndim and len(tensor) else tensor


def narrower(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :-1].clone() if tensor.ndim and tensor.shape[-1] else tensor


def empty(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:0].clone() if tensor.ndim else tensor


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values at an address that is a multiple of at most two elements."""
    if not tensor.is_contiguous():
        return tensor
    memory = tensor.new_empty(tensor.numel() + 3)[2 : 2 + tensor.numel()]
    return memory.copy_(tensor.flatten()).view(tensor.shape)


def wider(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values inside a wider tensor: rows are not contiguous."""
    if not tensor.ndim:
        return tensor
    beside = -(-32 // tensor.itemsize)  # so that addresses stay multiples of 32 bytes
    memory = _others(tensor, *tensor.shape[:-1], tensor.shape[-1] + 2 * beside)
    return memory[..., beside : beside + tensor.shape[-1]].copy_(tensor)


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with the first two dimensions swapped in memory."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1) if tensor.ndim > 2 else tensor


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in every other row of a longer tensor."""
    if not tensor.ndim:
        return tensor
    return _others(tensor, 2 * len(tensor), *tensor.shape[1:])[::2].copy_(tensor)


def _others(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """Memory of the tensor's dtype whose bytes are all 0x55, a value that is no NaN."""
    content = torch.full((math.prod(shape) * tensor.itemsize,), 0x55, dtype=torch.uint8)
    return content.view(tensor.dtype).view(shape)


def of_integers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones(tensor.shape, dtype=torch.int16)


def of_doubles(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones(tensor.shape, dtype=torch.float64)


def of_truths(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones(tensor.shape, dtype=torch.bool)


def hollow(tensor: torch.Tensor) -> torch.Tensor:
    """Return NaN everywhere, or the smallest integer."""
    if tensor.dtype.is_floating_point and tensor.itemsize > 1:
        return torch.full(tensor.shape, math.nan, dtype=tensor.dtype)
    if tensor.dtype in (torch.int32, torch.int64):
        return torch.full(tensor.shape, torch.iinfo(tensor.dtype).min, dtype=tensor.dtype)
    return tensor


def large(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers out of range; other tensors stay unchanged."""
    return tensor + (1 << 20) if not tensor.dtype.is_floating_point else tensor


def negative(tensor: torch.Tensor) -> torch.Tensor:
    return tensor - 1000 if tensor.dtype in (torch.int32, torch.int64) else tensor


# Changes that are always refused, and changes that are refused unless valid by chance.
NO_MEMORY: tuple[Change, ...] = (sparse, nested, freed, of_truths)
ODD: tuple[Change, ...] = (
    elsewhere, spread, broadcast, deeper, flat, shorter, narrower, empty, shifted, of_integers,
    large, negative, hollow, of_doubles, wider, swapped, every_other,
)  # fmt: skip


def calls(bases: Mapping[str, Base], seed: int, count: int) -> Iterator[Call]:
    """Yield `count` calls of random functions, the same ones for the same seed."""
    draw = random.Random(seed)
    names = [*bases]
    for number in range(count):
        base = bases[names[(seed + number) % len(names)]]
        sort = draw.random()
        if sort < 0.5:
            yield _changed(base, base.arguments(), draw)
        elif sort < 0.65:
            yield _twice(base, draw)
        else:
            yield _related(base, draw)


def _twice(base: Base, draw: random.Random) -> Call:
    """Change two arguments; the error may name either."""
    first = _changed(base, base.arguments(), draw)
    if first.raised is not None:
        return first
    try:
        second = _changed(base, first.given, draw)
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return first  # nothing is left to change
    paths, what = (*first.paths, *second.paths), f"{first.what}, {second.what}"
    if len({path.split("/")[0] for path in paths}) == 1:  # the second may have undone the first
        return first
    refused = first.refused or second.refused
    return Call(base, second.given, paths, what, refused, False, second.raised)


def _changed(base: Base, given: Given, draw: random.Random) -> Call:
    """Change one argument, or a field of one."""
    places = [*_places(base, given)]
    path, hint = draw.choice(places)
    kinds = [kind for kind in _kinds(hint) if kind in OF_OTHER_TYPES]
    value, what, refused, typed = _wrong(at(given, path), kinds, hint, draw)
    refused = refused and (base.contents or what != "is freed")
    return _call(base, given, {path: value}, what, refused, typed)


def _wrong(
    now: Any, kinds: list[type], hint: Any, draw: random.Random
) -> tuple[Any, str, bool, bool]:
    """Return (a replacement for `now`, its description, whether it has to be refused, whether for
    its type)."""
    sort = draw.random()
    if isinstance(now, torch.Tensor) and sort < 0.7:
        if _is_freed(now):
            raise RuntimeError("freed by another change: what reads it ends the process")
        change = draw.choice(NO_MEMORY if sort < 0.25 else ODD)
        value = change(now)
        certain = change in NO_MEMORY and (now.numel() > 0 or change is not freed)
        same = value is now or (value.dtype == now.dtype and change is of_truths)
        return value, f"is {change.__name__}", certain and not same, False
    if sort < 0.35 and len(kinds) == 1 and kinds[0] in OUT_OF_RANGE:
        value = draw.choice(OUT_OF_RANGE[kinds[0]])
        certain = kinds[0] is float or (kinds[0] is int and abs(value) >= 1 << 62)
        return value, f"is {value!r}"[:60], certain, False
    if sort < 0.5 and len(kinds) == 1 and kinds[0] in AT_THE_EDGE:
        value = draw.choice(AT_THE_EDGE[kinds[0]])
        return value, f"is {value!r}", False, False
    if not kinds:  # a dataclass, a tuple, or an object of another library
        value = draw.choice((Stranger(), 3, "text", None, [], {}))
        optional = type(None) in _kinds(hint) or hint is Any
        fits = _fits(value, hint)
        return value, f"is {type(value).__name__}", not fits and not optional, not fits
    words, value = draw.choice([pair for kind in kinds for pair in OF_OTHER_TYPES[kind]])
    fits = any(_is_one(value, kind) for kind in kinds) or _fits(value, hint)
    return value, f"is {words}", not fits, not fits


def _is_freed(tensor: torch.Tensor) -> bool:
    if tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def _related(base: Base, draw: random.Random) -> Call:
    """Let two tensors share memory, or mismatch."""
    given = base.arguments()
    tensors = [path for path, _ in _places(base, given, tensors=True)]
    if len(tensors) < 2:
        return _changed(base, given, draw)
    one, other = draw.sample(tensors, 2)
    written = next((path for path in (one, other) if path in base.writes), "")
    first, second = at(given, one), at(given, other)
    sort = draw.choice(("common", "common", "same", "device", "dtype"))
    if sort == "same" and first.shape == second.shape and first.dtype == second.dtype:
        refused = bool(written) and second.numel() > 0 and {one, other} != base.in_place
        values = {one: second, other: second}
        return _call(base, given, values, "are one tensor", refused, False)
    if sort in ("common", "same"):
        here, there = in_common(first, second, draw)
        parts = any(path.endswith("pool") for path in (one, other))  # parts of these are unused
        refused = bool(written) and here.numel() > 0 and there.numel() > 0 and not parts
        values = {one: here, other: there}
        return _call(base, given, values, "have common memory", refused, False)
    change = elsewhere if sort == "device" else of_integers
    certain = sort == "device" and base.contents
    values = {one: change(first), other: second}
    return _call(base, given, values, f"differ in {sort}", certain, False)


def _call(base: Base, given: Given, values: Given, what: str, refused: bool, typed: bool) -> Call:
    """Return the call with other values at some paths, or with the error of a constructor."""
    raised = None
    try:
        for path, value in values.items():
            given = _with(given, path, value)
    except Exception as error:  # noqa: BLE001 - whatever it is, a test judges it
        raised = error
    return Call(base, given, (*values,), what, refused, typed, raised)


def in_common(
    one: torch.Tensor, other: torch.Tensor, draw: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put both into one piece of memory: `other` begins within `one`, whose end is overwritten."""
    sizes = [tensor.numel() * tensor.itemsize for tensor in (one, other)]
    begin = draw.randrange(0, max(sizes[0], 1), 16)
    memory = torch.zeros(-(-(sizes[0] + begin + sizes[1]) // 16) * 16 + 256, dtype=torch.uint8)
    start = -memory.data_ptr() % 128
    found = []
    for tensor, place, size in ((one, 0, sizes[0]), (other, begin, sizes[1])):
        view = memory[start + place : start + place + size].view(tensor.dtype).view(tensor.shape)
        found.append(view.copy_(tensor) if size else tensor)
    return found[0], found[1]


def _places(base: Base, given: Given, tensors: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the path and hint of each argument and field; with `tensors`, of given tensors only."""
    options = {} if base.options_of is None else _hints(base.options_of)
    for name, hint in (options | _hints(base.function)).items():
        yield from _within(name, hint, given.get(name), tensors)


@functools.cache
def _hints(function: Callable) -> dict[str, Any]:
    """Type hints of a function's arguments, or of a dataclass's fields, if their types are
    known."""
    of_class = isinstance(function, type) and not dataclasses.is_dataclass(function)
    hints = typing.get_type_hints(function.__init__ if of_class else inspect.unwrap(function))
    names = inspect.signature(function).parameters
    return {name: hints[name] for name in names if hints.get(name, Any) is not Any}


def _within(path: str, hint: Any, value: Any, tensors: bool) -> Iterator[tuple[str, Any]]:
    if not tensors or isinstance(value, torch.Tensor):
        yield path, hint
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field, kind in _hints(type(value)).items():
            yield from _within(f"{path}/{field}", kind, getattr(value, field), tensors)
    elif isinstance(value, tuple | list | Mapping):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for place, inner in items:
            yield from _within(f"{path}/{place}", type(inner), inner, tensors)


def _kinds(hint: Any) -> list[type]:
    """Types of a hint; a union's types one by one."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(hint) for kind in _kinds(part)]
    return [typing.get_origin(hint) or hint]


def _is_one(value: Any, kind: type) -> bool:
    """Whether a value is of a kind: a bool is no number, and an int is a float."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _fits(value: Any, hint: Any) -> bool:
    return any(
        kind is Any or (isinstance(kind, type) and _is_one(value, kind)) for kind in _kinds(hint)
    )


def at(given: Given, path: str) -> Any:
    """Return the value at a path of the arguments; None if a part of the path is None."""
    name, *fields = path.split("/")
    value = given.get(name)
    for field in fields:
        value = None if value is None else _part(value, field)
    return value


def _part(whole: Any, field: str) -> Any:
    if isinstance(whole, Mapping):
        return whole[field]
    return whole[int(field)] if isinstance(whole, tuple | list) else getattr(whole, field)


def _with(given: Given, path: str, value: Any) -> Given:
    """Return the arguments with another value at a path."""
    name, *fields = path.split("/")
    return given | {name: _replaced(given.get(name), fields, value)}


def _replaced(whole: Any, fields: list[str], value: Any) -> Any:
    if not fields:
        return value
    inner = _replaced(_part(whole, fields[0]), fields[1:], value)
    if isinstance(whole, Mapping):
        return {**whole, fields[0]: inner}
    if isinstance(whole, tuple | list):
        items = [*whole]
        items[int(fields[0])] = inner
        return type(whole)(*items) if hasattr(whole, "_fields") else type(whole)(items)
    return dataclasses.replace(whole, **{fields[0]: inner})
