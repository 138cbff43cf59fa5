"""What is held to it that a row's result does not depend on other rows."""

from __future__ import annotations

import dataclasses
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

    kind: what `Subject.kind` drew. seed: of all numbers. row: the one that is replaced, of
    whatever the subject calls a row: a token, a request. contents: a name of `hostile.CONTENTS`.
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
        """Replace, in place, what the row has in the tensors of `given` (`hostile.spoil`)."""

    @abstractmethod
    def call(self, given: Given, where: dict[str, Any]) -> Results:
        """What the kernels give. where: the keywords `backend` and `arch`. What is written in place
        is copied before and returned."""

    @abstractmethod
    def others(self, results: Results) -> Results:
        """The part of the results that belongs to other rows; everything in it was written."""


@dataclass(frozen=True)
class Subject:
    """name: as tables show it. archs: that its kernels are written for. kind: draws what kernels
    are compiled for, on an architecture, as a dataclass; ValueError or NotImplementedError where
    that is refused. problem: draws a problem of a kind, small or not."""

    name: str
    archs: tuple[str, ...]
    kind: Callable[[random.Random, str], Any]
    problem: Callable[[Any, random.Random, bool], Problem]


def without(rows: torch.Tensor, row: int) -> torch.Tensor:
    """All rows but one."""
    return torch.cat((rows[:row], rows[row + 1 :]))


def moved(value: Any, device: str) -> Any:
    """The same on a device, tensors within dataclasses, dicts, tuples and lists, too."""
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
