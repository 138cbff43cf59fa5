"""A sample of a kernel's mutants, judged in a test; `scripts/mutate.py` judges all of them."""

from __future__ import annotations

from lab.mutation.subject import SCHEDULES, Subject
from ptxemu.mutation.catalogue import sampled
from ptxemu.mutation.rerun import BROKEN

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
