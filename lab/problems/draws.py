"""What a seed draws: kernels, and problems for each of them, whatever else is drawn."""

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
    """number: of the draw; case: what is drawn of every problem; config: compiled for it."""

    number: int
    case: Any
    config: Any


@dataclass
class Draws(ABC):
    """All that a seed gives for an architecture. sizes: of problems; refused: reasons why a kernel
    was not drawn."""

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
        """One that the kernel runs."""
        return self.drawn(kernel, random.Random(f"{self.seed}.{kernel.number}.{number}"))

    @abstractmethod
    def kind(self, pick: random.Random) -> Any:
        """What is compiled for; runtime values stand for whether there are any."""

    @abstractmethod
    def config(self, kind: Any, pick: random.Random) -> Any:
        """Config of a kind; ValueError or NotImplementedError for what is refused."""

    @abstractmethod
    def drawn(self, kernel: Kernel, pick: random.Random) -> Any:
        """A problem of the kernel."""

    @abstractmethod
    def keys(self, kernel: Kernel, numbers: Sequence[int]) -> list[KernelKey]:
        """What these problems of it launch."""
