"""Launches of kernels whose mutants are judged; all bits of the results must stay the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from kernelkit.call.launch import emulation
from lab.problems.attention import same_bits
from lab.tools.place import poisoned_outputs
from ptxemu.mutation.carried import Carried, instead
from ptxemu.mutation.catalogue import SYNCHRONISATION, Mutant, MutationClass, mutants, sampled
from ptxemu.mutation.rerun import BROKEN, Baseline, Verdict, baseline, carried, verdict
from ptxemu.mutation.text import Text

LIMIT = 120.0  # seconds of a launch; a mutant may run on for ever
WRONG_BITS = "wrong bits"

# The run that tells most comes first; the others see what is left.
SCHEDULES: dict[str, dict[str, Any]] = {
    "round-robin, checked": {"check": True, "limit": LIMIT},
    **{
        f"adversarial {seed}": {"policy": "adversarial", "seed": seed, "limit": LIMIT}
        for seed in range(2)
    },
    "random 0": {"policy": "random", "limit": LIMIT},
}
STRICT = {"strict": {"check": True, "strict": True, "limit": LIMIT}}

Results = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """A subject of mutation.

    launch: runs some launches in the emulator and returns all that they write.
    only: part of the names of the mutation classes of interest."""

    launch: Callable[[], Results]
    only: str = ""
    first: list[Results] = field(default_factory=list, compare=False)

    def run(self) -> str:
        """Launch; how that differs from the first time, as `ptxemu.mutation.rerun` takes it."""
        try:
            with poisoned_outputs(), emulation():
                results = self.launch()
        except Exception as error:  # noqa: BLE001  (whatever it is, the mutant is told by it)
            return f"{type(error).__name__}: {error}"
        if not self.first:
            self.first.append(results)
        return "" if same_bits(results, self.first[0]) else WRONG_BITS

    @cached_property
    def kernels(self) -> Baseline:
        """Return the kernels that are launched, under the checker."""
        return self.ground(next(iter(SCHEDULES.values())))

    def ground(self, *schedules: Mapping[str, Any]) -> Baseline:
        """The kernels as they are; ValueError where they fail."""
        found = baseline(self.run, schedules)
        if found.failure:
            raise ValueError(f"the kernel itself: {found.failure}")
        return found

    def mutants(self, kinds: Sequence[MutationClass] = SYNCHRONISATION) -> list[tuple[str, Mutant]]:
        """(digest of its kernel, mutant) of each kernel that is launched."""
        chosen = [kind for kind in kinds if self.only in kind.name]
        return [
            (key, mutant)
            for key, kernel in self.kernels.kernels.items()
            for mutant in mutants(Text(kernel.ptx, kernel.observed), chosen)
        ]

    def judge(self, schedules: Mapping[str, Mapping[str, Any]] = SCHEDULES) -> Judge:
        return Judge(self, schedules)


class Judge:
    """Runs mutants of a subject that is the same under all schedules."""

    def __init__(self, subject: Subject, schedules: Mapping[str, Mapping[str, Any]]) -> None:
        self.subject, self.schedules = subject, schedules
        self.known = subject.ground(*schedules.values()).known
        self._notes: set[tuple[Any, ...]] | None = None
        self._carried: dict[str, Carried] = {}

    def verdict(self, kernel: str, mutant: Mutant) -> Verdict:
        """Verdict of the first schedule that tells."""
        lines = mutant.change.lines
        return verdict(self.subject.run, kernel, lines, self.schedules, self.known)

    def noted(self, kernel: str, mutant: Mutant) -> bool:
        """The strict rules, which go by the text of the manual, note what they do not note of the
        kernel."""
        if self._notes is None:
            self._notes = self.subject.ground(*STRICT.values()).known
        lines = mutant.change.lines
        return verdict(self.subject.run, kernel, lines, STRICT, self._notes).noticed

    @cached_property
    def rest(self) -> Judge:
        """Return a judge with the schedules that this judge lacks."""
        left = {name: each for name, each in SCHEDULES.items() if name not in self.schedules}
        return Judge(self.subject, left)

    def instead(self, kernel: str, mutant: Mutant) -> str:
        """Apply `ptxemu.mutation.carried.instead` to a mutant that nothing detects."""
        line = mutant.change.lines.get(mutant.instr.line, "")
        if str(mutant.text.statement(mutant.instr)) in line:  # what changes is another instruction
            return ""
        arrival = mutant.instr.opcode.startswith("mbarrier.arrive")
        if arrival and not mutant.kind.name.endswith("relaxed"):  # more than order changes
            return ""
        if kernel not in self._carried:
            self._carried[kernel] = carried(self.subject.run, kernel, {})
        changed = carried(self.subject.run, kernel, mutant.change.lines)
        return instead(self._carried[kernel], changed, mutant.instr)


SEED = 0
UNNOTICED = 1  # in a sample; of all, one in thirty


def assert_noticed(subject: Subject, count: int) -> None:
    """Nearly all of `count` mutants, and none that is excused."""
    first = dict([*SCHEDULES.items()][:2])  # what is read too early shows in late schedules alone
    judge = subject.judge(first)
    assert not judge.known, "the kernel itself has findings"
    unnoticed, wrongly_excused = [], []
    for kernel, mutant in sampled(subject.mutants(), count, SEED):
        verdict = judge.verdict(kernel, mutant)
        assert verdict.by != BROKEN, (mutant.name, verdict.how)
        if mutant.equivalent and verdict.noticed:
            wrongly_excused.append((mutant.name, verdict.how))
        elif mutant.executed and not mutant.equivalent and not verdict.noticed:
            unnoticed.append(mutant.name)
    assert len(unnoticed) <= UNNOTICED, unnoticed
    assert not wrongly_excused
