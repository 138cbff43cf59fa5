"""`soak.py rows`: draws random kinds of calls and problems of each, reproducible by a seed.
Repeats each call with other contents in one of its rows."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from kernelkit.compile.arch import written_for
from kernelkit.compile.compiler import collecting
from kernelkit.compile.keys import KernelKey
from kernelkit.numerics import tolerance
from lab.problems import draws
from lab.problems.attention import same_bits
from lab.problems.draws import Kernel
from lab.soak import campaign
from lab.soak.campaign import Family, Feature, Results
from lab.soak.rows import arithmetic, attend, between, experts, movement, quantise, routing, sparse
from lab.soak.rows.subject import CONTENTS, Problem, Subject, moved

SUBJECTS: tuple[Subject, ...] = (
    *quantise.SUBJECTS, *routing.SUBJECTS, *experts.SUBJECTS, *arithmetic.SUBJECTS,
    *movement.SUBJECTS, *attend.SUBJECTS, *sparse.SUBJECTS, *between.SUBJECTS,
    *arithmetic.MERGES,
)  # fmt: skip
ARCHS = tuple(dict.fromkeys(arch for subject in SUBJECTS for arch in subject.archs))


FEATURES: dict[str, Feature] = {
    **{one.name: lambda case, one=one: case.subject == one.name for one in SUBJECTS},
    **{f"row of {name}": lambda case, name=name: case.contents == name for name in CONTENTS},
}


SIZES = {"small": True, "usual": False}  # whether problems are small


@dataclass(frozen=True)
class Kind:
    """A drawn kind.

    name: name of a subject.
    drawn: what its kernels are compiled for."""

    name: str
    drawn: Any


@dataclass
class Draws(draws.Draws):
    """Draws of the subjects that have kernels for the architecture, in turns. sizes: see
    `SIZES`."""

    sizes: bool
    subjects: Sequence[Subject] = SUBJECTS

    def kernel(self, number: int) -> Kernel | None:
        pick = random.Random(f"{self.seed}.{number}")
        subject = self.subject(number)
        try:
            kind = subject.kind(pick, self.arch)
        except (ValueError, NotImplementedError) as reason:
            self.refused[str(reason)] += 1
            return None
        return Kernel(number, kind, Kind(subject.name, kind))

    def subject(self, number: int) -> Subject:
        """Subject of the kernel with this number."""
        here = [each for each in self.subjects if written_for(self.arch) in each.archs]
        return here[number % len(here)]

    def kind(self, pick: random.Random) -> Any:
        raise NotImplementedError("kinds come from subjects, by the number of the kernel")

    def config(self, kind: Any, pick: random.Random) -> Any:
        raise NotImplementedError("kinds come from subjects, by the number of the kernel")

    def drawn(self, kernel: Kernel, pick: random.Random) -> Problem:
        return self.subject(kernel.number).problem(kernel.case, pick, self.sizes)

    def keys(self, kernel: Kernel, numbers: Sequence[int]) -> list[KernelKey]:
        """Keys of the first problem: others may need a kernel more, which their first call
        compiles."""
        problem = self.problem(kernel, numbers[0])
        where = {"backend": "emulate", "arch": self.arch}
        with collecting() as found, zeros():
            problem.call(problem.given(), where)
        return [*dict.fromkeys(found)]


@contextmanager
def zeros() -> Iterator[None]:
    """Memory that nothing was written to holds zeros: indices that every check takes."""
    with (
        patch.object(torch, "empty", torch.zeros),
        patch.object(torch, "empty_like", torch.zeros_like),
        patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros),
    ):
        yield


class Trial(campaign.Trial):
    """A trial in which other rows must keep their bits; nothing is compared with a definition."""

    differs: ClassVar[str] = "bits of other rows differ"
    case: Problem

    def prepare(self) -> Results:
        self.tensors = moved(self.case.given(), self.place.device)
        return ()

    def step(self, *inputs: torch.Tensor) -> Results:
        results = self.case.call(self.tensors, self.place.given)
        return tuple(self.case.others(results))

    def repeats(self) -> bool:
        """Whether the rows beside the one that is replaced keep their bits."""
        self.change()
        return same_bits(self.first, self.results())

    def reports(self) -> Sequence[tolerance.Report]:
        return ()

    def change(self) -> None:
        """The hostile contents in the row."""
        self.case.spoil(self.tensors)


FAMILY = Family("rows", ARCHS, Draws, SIZES, Trial, FEATURES, {})
