"""Kernels of a seed, and problems for each of them, independent of the other draws."""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernelkit.compile.keys import KernelKey


@dataclass(frozen=True)
class Kernel:
    """A drawn kernel.

    number: number of the draw.
    case: the part that is drawn for every problem.
    config: the config that is compiled."""

    number: int
    case: Any
    config: Any


@dataclass
class Draws(ABC):
    """Everything that a seed yields for an architecture.

    sizes: sizes of problems.
    refused: reasons why a kernel was not drawn."""

    seed: int
    arch: str
    sizes: Any
    refused: Counter[str] = field(default_factory=Counter)

    def kernels(self) -> Iterator[Kernel]:
        """Without an end; what the plan of the architecture refuses is left out."""
        for number in itertools.count():
            kernel = self.kernel(number)
            if kernel is not None:
                yield kernel

    def kernel(self, number: int) -> Kernel | None:
        pick = random.Random(f"{self.seed}.{number}")
        kind = self.kind(pick)
        try:
            return Kernel(number, kind, self.config(kind, pick))
        except (ValueError, NotImplementedError) as reason:
            self.refused[str(reason)] += 1
            return None

    def problem(self, kernel: Kernel, number: int) -> Any:
        """Draw a problem that the kernel runs."""
        return self.drawn(kernel, random.Random(f"{self.seed}.{kernel.number}.{number}"))

    @abstractmethod
    def kind(self, pick: random.Random) -> Any:
        """Draw what is compiled; runtime values only show whether they are given."""

    @abstractmethod
    def config(self, kind: Any, pick: random.Random) -> Any:
        """Config of a kind; ValueError or NotImplementedError for what is refused."""

    @abstractmethod
    def drawn(self, kernel: Kernel, pick: random.Random) -> Any:
        """A problem of the kernel."""

    @abstractmethod
    def keys(self, kernel: Kernel, numbers: Sequence[int]) -> list[KernelKey]:
        """Return the keys of the kernels that these problems launch."""
