"""Subjects whose results in a row must not depend on other rows, and contents for a row that
must not change results of other rows."""

from __future__ import annotations

import dataclasses
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Results = Sequence[torch.Tensor]
Given = dict[str, Any]


@dataclass(frozen=True)
class Problem(ABC):
    """A call, and other contents for one of its rows. A subclass is a frozen dataclass of plain
    values; what its kernels are compiled for comes from `kind`.

    kind: what `Subject.kind` drew.
    seed: seed of all numbers.
    row: the replaced row, in the subject's meaning: a token, a request.
    contents: a name of `CONTENTS`.
    """

    kind: Any
    seed: int
    row: int
    contents: str

    @property
    def generator(self) -> torch.Generator:
        """A new one: the same numbers at every call."""
        return torch.Generator().manual_seed(self.seed)

    @abstractmethod
    def given(self) -> Given:
        """The arguments of `call` by name, in the memory of the host: tensors, and dataclasses,
        dicts, tuples and lists of them, are moved to where the kernels run."""

    @abstractmethod
    def spoil(self, given: Given) -> None:
        """Replace, in place, what the row has in the tensors of `given` (`spoil`)."""

    @abstractmethod
    def call(self, given: Given, where: dict[str, Any]) -> Results:
        """Return the results of the kernels. Tensors that are written in place are copied first,
        and the copies are returned.

        where: the keywords `backend` and `arch`."""

    @abstractmethod
    def others(self, results: Results) -> Results:
        """The part of the results that belongs to other rows; everything in it was written."""


@dataclass(frozen=True)
class Subject:
    """A subject.

    name: name in tables.
    archs: architectures of its kernels.
    kind: draws what kernels are compiled for, on an architecture, as a dataclass; raises
    ValueError or NotImplementedError if that is unsupported.
    problem: draws a problem of a kind, small or not."""

    name: str
    archs: tuple[str, ...]
    kind: Callable[[random.Random, str], Any]
    problem: Callable[[Any, random.Random, bool], Problem]


def without(rows: torch.Tensor, row: int) -> torch.Tensor:
    """All rows but one."""
    return torch.cat((rows[:row], rows[row + 1 :]))


def moved(value: Any, device: str) -> Any:
    """Move tensors to a device, also those within dataclasses, dicts, tuples and lists."""
    if isinstance(value, torch.Tensor):
        if value.element_size() > 1:
            return value.to(device)
        return value.view(torch.uint8).to(device).view(value.dtype)  # torch copies no float4
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **moved(fields, device))
    if isinstance(value, dict):
        return {name: moved(each, device) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(moved(each, device) for each in value)
    return value


HUGE, SUBNORMAL = 1e30, 1e-40  # in bf16 and fp32; fp16 has an infinity and a zero instead

Change = Callable[[torch.Tensor], torch.Tensor]


def _fill(value: float) -> Change:
    return lambda row: torch.full_like(row, value)


def _one(value: float) -> Change:
    """The last element."""

    def change(row: torch.Tensor) -> torch.Tensor:
        changed = row.clone()
        changed.view(-1)[-1] = value
        return changed

    return change


def _factor(value: float) -> Change:
    return lambda row: (row.float() * value).to(row.dtype)


CONTENTS: dict[str, Change] = {
    "NaN": _fill(math.nan),
    "a NaN": _one(math.nan),
    "inf": _fill(math.inf),
    "an inf": _one(math.inf),
    "a -inf": _one(-math.inf),
    "huge": _factor(HUGE),
    "a huge one": _one(HUGE),
    "1,000 times as large": _factor(1000.0),
    "subnormal": _fill(SUBNORMAL),
    "zeros": _fill(0.0),
    "negated": _factor(-1.0),
}


def drawn_contents(pick: random.Random) -> str:
    """A name of `CONTENTS`."""
    return pick.choice([*CONTENTS])


def spoil(row: torch.Tensor, contents: str) -> None:
    """Replace the numbers of a row in place; of bytes and integers all bits are inverted."""
    if not row.dtype.is_floating_point:
        row.copy_(row.bitwise_not())
    elif row.dtype.itemsize == 1:  # torch has no arithmetic on these
        row.copy_(CONTENTS[contents](row.float()).to(row.dtype))
    else:
        row.copy_(CONTENTS[contents](row))
