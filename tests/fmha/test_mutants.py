"""Mutants of the kernels: the emulator and its checker have to notice nearly every one.

`scripts/mutate.py` judges all of every kernel; here is a sample of some.
"""

from __future__ import annotations

import random

import pytest

from tests.fmha.mutants import SUBJECTS
from tests.mutation.verdict import BROKEN, SCHEDULES

QUICK = {"minimal": 14, "64 base tmem": 8}  # kernel -> mutants in the quick tests
MATRIX = {"64 pingpong smem": 6, "512 pair": 6, "64 dependent launch": 2}
SEED = 0
UNNOTICED = 1  # in a sample; of all, one in thirty


PARAMETERS = [
    pytest.param(name, count, marks=[pytest.mark.xdist_group(f"fmha-mutants-{name}"), *marks])
    for marks, kernels in (([], QUICK), ([pytest.mark.matrix], MATRIX))
    for name, count in kernels.items()
]


@pytest.mark.parametrize(("name", "count"), PARAMETERS)
def test_mutants_are_noticed(name, count):
    subject = SUBJECTS[name]
    mutants = subject.mutants()
    numbers = random.Random(SEED).sample(range(len(mutants)), min(count, len(mutants)))
    judge = subject.judge(SCHEDULES[:1])  # the others tell nothing that it does not
    assert not judge.known, "the kernel itself has findings"
    unnoticed, wrongly_excused = [], []
    for mutant in (mutants[number] for number in sorted(numbers)):
        verdict = judge.verdict(mutant.ptx)
        assert verdict.by != BROKEN, (mutant.name, verdict.how)
        if mutant.equivalent and verdict.killed:
            wrongly_excused.append((mutant.name, verdict.how))
        elif not mutant.equivalent and not verdict.killed:
            unnoticed.append(mutant.name)
    assert len(unnoticed) <= UNNOTICED, unnoticed
    assert not wrongly_excused
