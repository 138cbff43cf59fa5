"""Choices that were measured: which options suit a problem on the GPU at hand.

A choose step asks `Tuned.applied` for each new problem. Where somebody has measured that problem
with `kernelkit.tune.tuner`, on this GPU, with this driver and these kernels, the answer is what was
fastest; else its own rules decide. Options that a caller gives are never replaced.
`kernelkit.tune.files` says where the measurements are kept, and which of them hold here.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from kernelkit.compile.keys import PLAIN, NotPlain
from kernelkit.tune import files as tuned_files
from kernelkit.tune.files import Choice, TunedWarning

if TYPE_CHECKING:
    import torch

Item = TypeVar("Item")
REFUSALS = (TypeError, ValueError, NotImplementedError)


@dataclass
class Forced:
    """Choice that `forcing` returns, and the problems for which it was requested."""

    name: str
    choice: Choice
    problems: list[Any] = field(default_factory=list)


_forced: ContextVar[Forced | None] = ContextVar("forced", default=None)


@contextmanager
def forcing(name: str, choice: Choice) -> Iterator[Forced]:
    """Within the block the operator of this name takes `choice` for every problem whose options
    are left open, and raises where it does not fit; no other choice that was measured is looked up.
    An empty one leaves the rules."""
    active = Forced(name, choice)
    token = _forced.set(active)
    try:
        yield active
    finally:
        _forced.reset(token)


_meant: ContextVar[torch.device | None] = ContextVar("meant", default=None)


@contextmanager
def standing_for(device: torch.device) -> Iterator[None]:
    """Within the block tensors on the device 'meta' are taken for ones on `device`: a warm-up finds
    the kernels that calls there will ask for."""
    token = _meant.set(device)
    try:
        yield
    finally:
        _meant.reset(token)


class Tuned:
    """Measurements of one operator.

    name: name of the operator for `python -m kernelkit tune`
    kernels: architecture -> modules of its kernels, for whose sources a measurement is valid
    options: names of the tunable options
    """

    def __init__(
        self, name: str, kernels: Mapping[str, Sequence[str]], options: Sequence[str]
    ) -> None:
        self.name, self.kernels, self.options = name, kernels, tuple(options)
        self._tables: dict[torch.device, dict[str, Choice]] = {}

    def applied(
        self,
        item: Item,
        device: torch.device,
        problem: Callable[[Item], Any],
        check: Callable[[Item], Any],
    ) -> Item:
        """`item`, a dataclass with the options among its fields, with those that were measured to
        be the best for its problem; as it is where none were, which takes a fraction of a
        microsecond.

        problem: of the item, a dataclass of plain values: all that its own choice depends on; None
        where nothing measured may decide. check: raises where the item that it is given cannot run;
        a choice that it refuses is not used, which is warned of once.
        """
        forced = _forced.get()
        if forced is None:
            table = self._tables.get(device)
            if table is None:
                table = self._table_of(device)
            if not table:
                return item
            return self._from(table, item, problem, check)
        if forced.name != self.name or (asked := problem(item)) is None:
            return item
        forced.problems.append(asked)
        return self._with(item, forced.choice, check)

    def choices(self, device: torch.device) -> dict[str, Choice]:
        """All that hold on a device: `text_of` a problem -> its choice."""
        return self._tables[device] if device in self._tables else self._table_of(device)

    def measured(self, device: torch.device) -> list[tuple[dict[str, Any], Choice]]:
        """Return the measured choices, with problems as `described` returns them."""
        return [(json.loads(text), choice) for text, choice in self.choices(device).items()]

    def forget(self) -> None:
        """Read the files again when they are next asked for."""
        self._tables.clear()

    def _table_of(self, device: torch.device) -> dict[str, Choice]:
        if device.type == "meta":
            meant = _meant.get()
            return {} if meant is None or meant.type == "meta" else self.choices(meant)
        table = tuned_files.choices_here(self, device) if device.type == "cuda" else {}
        self._tables[device] = table
        return table

    def _from(
        self,
        table: dict[str, Choice],
        item: Item,
        problem: Callable[[Item], Any],
        check: Callable[[Item], Any],
    ) -> Item:
        asked = problem(item)
        text = None if asked is None else text_of(asked)
        choice = table.get(text) if text else None
        if not choice or text is None:
            return item
        try:
            return self._with(item, choice, check)
        except REFUSALS as error:
            del table[text]
            message = f"{self.name}: the measured choice {dict(choice)} for {text} does not fit"
            warnings.warn(f"{message}, so the rules choose: {error}", TunedWarning, stacklevel=4)
            return item

    def _with(self, item: Any, choice: Choice, check: Callable[[Any], Any]) -> Any:
        if not choice:
            return item
        for name, value in choice.items():
            if name not in self.options or type(value) not in PLAIN:
                raise ValueError(
                    f"option {name} = {value!r}: expected plain values of {self.options}"
                )
        made = replace(item, **choice)
        check(made)
        return made


def are_open(item: Any, options: Sequence[str]) -> bool:
    """Whether all of these fields of a dataclass are at their default."""
    plain = _defaults(type(item))
    return all(getattr(item, name) == plain[name] for name in options)


def _defaults(kind: type) -> dict[str, Any]:
    found = _DEFAULTS.get(kind)
    if found is None:
        fields = dataclasses.fields(kind)
        found = _DEFAULTS[kind] = {item.name: item.default for item in fields}
    return found


_DEFAULTS: dict[type, dict[str, Any]] = {}


def described(value: Any) -> Any:
    """A problem for a file of JSON: of a dataclass the fields that differ from their default.
    NotPlain for what has no lasting text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = _defaults(type(value))
        found = {name: getattr(value, name) for name in plain}
        return {n: described(v) for n, v in found.items() if not _same(v, plain[n])}
    if isinstance(value, tuple | list):
        return [described(item) for item in value]
    if type(value) in PLAIN:
        return value
    raise NotPlain(f"{value!r} in a problem")


def _same(value: Any, other: Any) -> bool:
    """Whether both are one value of one type: True is no 1."""
    return type(value) is type(other) and value == other


def text_of(problem: Any) -> str:
    """Return one line of JSON, the same for equal problems in every process."""
    return json.dumps(described(problem), sort_keys=True)
