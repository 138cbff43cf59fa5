"""A class of mutation and its mutants."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ptxemu.mutation.equivalence import NEVER, Equivalence
from ptxemu.mutation.operators import Change, Operator
from ptxemu.mutation.text import Text
from ptxemu.syntax.tree import Instr


@dataclass(frozen=True)
class MutationClass:
    """What is done to which instructions; `section` of the manual describes them. same: when and
    why a mutant means the same as its kernel."""

    name: str
    does: str
    section: str
    operator: Operator
    same: Equivalence = NEVER


@dataclass(frozen=True)
class Mutant:
    """One changed place. `name` stays the same as long as the PTX does."""

    kind: MutationClass
    text: Text
    change: Change

    @property
    def name(self) -> str:
        return f"{self.kind.name} @{self.instr.line}"

    @property
    def instr(self) -> Instr:
        return self.change.instr

    @property
    def instruction(self) -> str:
        """Its text in the kernel."""
        return " ".join(self.instr.text.split())

    @property
    def ptx(self) -> str:
        return self.text.changed(self.change.lines)

    @property
    def equivalent(self) -> str:
        """Why it means the same as the kernel; '' where it does not."""
        return self.kind.same.reason if self.kind.same.rule(self.text, self.change) else ""

    @property
    def executed(self) -> bool:
        """As far as a run has shown, the kernel comes to the instruction."""
        lines = self.text.observed.executed
        return lines is None or self.instr.line in lines


def mutants(text: Text, kinds: Iterable[MutationClass]) -> list[Mutant]:
    """All mutants of a module, class by class, in the order of the text."""
    return [Mutant(kind, text, change) for kind in kinds for change in kind.operator(text)]


T = TypeVar("T")


def sampled(found: Sequence[T], count: int, seed: int) -> list[T]:
    """So many of them, the same for a seed, in their order."""
    numbers = random.Random(seed).sample(range(len(found)), min(count, len(found)))
    return [found[number] for number in sorted(numbers)]
