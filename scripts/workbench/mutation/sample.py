"""A sample of a kernel's mutants, judged in a test; `scripts/mutate.py` judges all of them."""

from __future__ import annotations

from ptxemu.mutation.classes import sampled
from workbench.mutation.attention import Subject
from workbench.mutation.verdict import BROKEN, SCHEDULES

SEED = 0
UNNOTICED = 1  # in a sample; of all, one in thirty


def assert_noticed(subject: Subject, count: int) -> None:
    """Nearly all of `count` mutants, and none that is excused."""
    judge = subject.judge(SCHEDULES[:1])  # the others tell nothing that it does not
    assert not judge.known, "the kernel itself has findings"
    unnoticed, wrongly_excused = [], []
    for mutant in sampled(subject.mutants(), count, SEED):
        verdict = judge.verdict(mutant.ptx)
        assert verdict.by != BROKEN, (mutant.name, verdict.how)
        if mutant.equivalent and verdict.killed:
            wrongly_excused.append((mutant.name, verdict.how))
        elif not mutant.equivalent and not verdict.killed:
            unnoticed.append(mutant.name)
    assert len(unnoticed) <= UNNOTICED, unnoticed
    assert not wrongly_excused
