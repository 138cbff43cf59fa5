"""The tensors of a script at each of its launches, named by its variables, and how they differ from
those of another run or from a reference.

The name of a tensor is that of the innermost variable on the way to the launch, of a function or of
the file.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from ptxemu.difference import Difference, apart, first_index
from ptxemu.host_tensor import HostTensor
from ptxemu.inspect.snapshot import Write
from ptxemu.module import launching
from ptxemu.report import LaunchReport
from ptxemu.request import Inspect, Watch
from ptxemu.watch import watched

Reference = Callable[..., Mapping[str, Any]]
_OURS = str(Path(__file__).parents[1])
_LIBRARIES = ("site-packages", "<frozen")


class Enough(BaseException):
    """Exception that ends a run early; no `except Exception` of a script catches it."""


@dataclass
class Launch:
    """Values of the tensors before and after a launch."""

    entry: str
    values: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    before: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])


@dataclass(frozen=True)
class Found:
    """The first launch that differs, and how. others: tensors that differed before it."""

    launch: int
    entry: str
    difference: Difference
    shape: tuple[int, ...]
    low: tuple[int, ...]  # the smallest box that holds all elements that differ
    high: tuple[int, ...]
    shifted: str  # where else the expected values are those that are here
    others: tuple[str, ...] = ()


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within the block every launch leaves its tensors in the list."""
    launches: list[Launch] = []

    def ended(launch: Launch) -> None:
        launches.append(launch)

    with _seen(ended):
        yield launches


@dataclass
class Judgement:
    """Result of comparing a run.

    Attributes:
        known: Names of the run's tensors.
        launches: Number of launches.
        judged: Number of launches that were compared.
        error: Reason why the reference cannot be used.
    """

    found: Found | None = None
    known: dict[str, None] = field(default_factory=dict[str, None])
    launches: int = 0
    judged: int = 0
    error: str = ""


@contextmanager
def compared(with_launches: list[Launch], tolerance: float) -> Iterator[Judgement]:
    """Compare launches within the block with those of another run, in order.

    The first difference ends the block's run by `Enough`.
    """
    judgement = Judgement()

    def ended(launch: Launch) -> None:
        number = judgement.launches
        judgement.launches += 1
        judgement.known.update(dict.fromkeys(launch.values))
        if number >= len(with_launches):
            return
        judgement.judged += 1
        judgement.found = _first_unlike(number, with_launches[number], launch, tolerance)
        if judgement.found:
            raise Enough

    with _seen(ended):
        yield judgement


def _first_unlike(number: int, one: Launch, other: Launch, tolerance: float) -> Found | None:
    """Return the first difference of two launches.

    Elements that neither run has written, such as memory of torch.empty, do not count.
    """
    names = [
        name
        for name, values in other.values.items()
        if name in one.values and one.values[name].shape == values.shape
    ]
    begun = {name: _unlike(one.before[name], other.before[name], 0.0) for name in names}
    for name in names:
        mine, hers = one.values[name], other.values[name]
        touched = _unlike(mine, one.before[name], 0.0) | _unlike(hers, other.before[name], 0.0)
        wrong = _unlike(mine, hers, tolerance) & (touched | ~begun[name])
        if wrong.any():
            garbage = [n for n in names if begun[n].any()]
            return _found(number, other.entry, name, (mine, hers, wrong), garbage)
    return None


@contextmanager
def referred(reference: Reference, tolerance: float) -> Iterator[Judgement]:
    """Within the block launches are compared with `reference(name=tensor, ...)`, which is called
    before each that has tensors by the names of its parameters, and gives by name what they should
    be afterwards; the first that differs ends the block's run by `Enough`."""
    judgement = Judgement()
    wanted = list(inspect.signature(reference).parameters)
    expected: dict[str, np.ndarray] = {}

    def began(tensors: dict[str, Any]) -> None:
        judgement.known.update(dict.fromkeys(tensors))
        judgement.launches += 1
        expected.clear()
        if all(name in tensors for name in wanted):
            try:
                told = reference(**{name: _copy(tensors[name]) for name in wanted})
                expected.update((name, _values(tensor)) for name, tensor in told.items())
            except Exception as error:  # noqa: BLE001  (of the reference's own code)
                judgement.error = f"{type(error).__name__}: {error}"
                raise Enough from None

    def ended(launch: Launch) -> None:
        judgement.judged += bool(expected)
        for name, right in expected.items():
            mine = launch.values.get(name)
            if mine is None or mine.shape != right.shape:
                shape = "there is none" if mine is None else f"the tensor has shape {mine.shape}"
                judgement.error = f"it gives {name!r} of shape {right.shape}, and {shape}"
                raise Enough
            wrong = _unlike(mine, right, tolerance)
            if wrong.any():
                number = judgement.launches - 1
                judgement.found = _found(number, launch.entry, name, (mine, right, wrong), [])
                raise Enough

    with _seen(ended, began):
        yield judgement


@contextmanager
def written(found: Found) -> Iterator[list[Write]]:
    """Within the block the writes of the launch in question to the element in question, in
    order."""
    number, writes = -1, list[Write]()

    def through(launch: Callable[..., LaunchReport], module: Any) -> Callable[..., LaunchReport]:
        def run(*args: Any, **given: Any) -> LaunchReport:
            nonlocal number
            number += 1
            tensor = named_tensors().get(found.difference.name)
            if number != found.launch or tensor is None:
                return launch(module, *args, **given)
            kept = HostTensor(tensor)
            address = kept.address_of(found.difference.index)
            watch = Watch("global", address, kept.bits.itemsize)
            with watched(inspect=Inspect(watches=(watch,), quiet=True)) as report:
                try:
                    launch(module, *args, **given)
                finally:
                    seen = report.launches[-1].inspection if report.launches else None
                    if seen:
                        writes.extend(w for some in seen.histories().values() for w in some)
            raise Enough

        return run

    with launching(through):
        yield writes


def named_tensors() -> dict[str, Any]:
    """Return torch tensors and numpy arrays of running functions and their files.

    The innermost variables come first. Functions of ours and of libraries are left out.
    """
    found: dict[str, Any] = {}
    places: set[tuple[Any, ...]] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_OURS) and not any(word in path for word in _LIBRARIES):
            for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
                place = _place(value) if name not in found else None
                if place and place not in places:
                    places.add(place)
                    found[name] = value
        frame = frame.f_back
    return found


def _place(value: Any) -> tuple[Any, ...] | None:
    """Return address, shape and strides; None without a tensor or memory."""
    if isinstance(value, np.ndarray):
        return (value.ctypes.data, value.shape, value.strides) if value.size else None
    if not hasattr(value, "untyped_storage") or not value.data_ptr():
        return None
    return value.data_ptr(), tuple(value.shape), value.stride()


def _values(tensor: Any) -> np.ndarray:
    kept = HostTensor(_copy(tensor))
    return kept.values(kept.bits.copy())


def _copy(tensor: Any) -> Any:
    if isinstance(tensor, np.ndarray):
        return np.array(tensor)
    return tensor.detach().clone().contiguous()


@contextmanager
def _seen(
    ended: Callable[[Launch], None], began: Callable[[dict[str, Any]], None] | None = None
) -> Iterator[None]:
    def through(launch: Callable[..., LaunchReport], module: Any) -> Callable[..., LaunchReport]:
        def run(entry: str | None = None, **given: Any) -> LaunchReport:
            tensors = named_tensors()
            held = dict(_held(tensors))
            if began:
                began(tensors)
            seen = Launch(module.entry(entry).name)
            seen.before = {name: each.values(each.bits.copy()) for name, each in held.items()}
            try:
                return launch(module, entry, **given)
            finally:  # of a launch that fails what it came to
                seen.values = {n: each.values(each.bits.copy()) for n, each in held.items()}
                ended(seen)

        return run

    with launching(through):
        yield


def _held(tensors: Mapping[str, Any]) -> Iterator[tuple[str, HostTensor]]:
    for name, tensor in tensors.items():
        try:
            yield name, HostTensor(tensor)
        except ValueError:
            continue  # of complex numbers, for one


def _unlike(mine: np.ndarray, hers: np.ndarray, tolerance: float) -> np.ndarray:
    if mine.shape != hers.shape:
        return np.ones(mine.shape, bool)
    if not tolerance and mine.dtype == hers.dtype:
        kind = f"u{mine.dtype.itemsize}"
        return np.asarray(mine.view(kind) != hers.view(kind))
    return apart(mine, hers, tolerance * np.maximum(1.0, np.abs(hers.astype(np.float64))))


def _found(
    number: int,
    entry: str,
    name: str,
    what: tuple[np.ndarray, np.ndarray, np.ndarray],
    garbage: list[str],
) -> Found:
    mine, hers, wrong = what
    index = first_index(wrong)
    places = np.argwhere(wrong)
    difference = Difference(name, index, mine[index], hers[index], int(wrong.sum()), wrong.size)
    low, high = (tuple(map(int, edge)) for edge in (places.min(0), places.max(0)))
    shifted = _shifted(mine, hers, index)
    others = tuple(n for n in garbage if n != name)
    return Found(number, entry, difference, mine.shape, low, high, shifted, others)


def _shifted(mine: np.ndarray, hers: np.ndarray, index: tuple[int, ...]) -> str:
    """Describe whether the first wrong row holds another row's expected values.

    A wrong index of a tile causes this.
    """
    for axis in range(mine.ndim - 1):
        here = mine.take(index[axis], axis)
        if (here == here.reshape(-1)[0]).all():
            continue
        for other in range(hers.shape[axis]):
            if other != index[axis] and np.array_equal(hers.take(other, axis), here):
                places = [":"] * mine.ndim
                places[axis] = str(other)
                return f"[{', '.join(places)}]"
    return ""
