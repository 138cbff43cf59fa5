"""Mutants of the kernels: the emulator and its checker have to notice nearly every one.

`scripts/mutate.py` judges all; here is a sample of each kernel, and a stretch over all classes.
"""

from __future__ import annotations

import random

import pytest

from tests.fmha.mutants import SUBJECTS
from tests.mutation.verdict import BROKEN

QUICK = {"minimal": 20, "64 base tmem": 10}  # kernel -> mutants in the quick tests
IN_MATRIX = 12
SEED = 4


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *QUICK.items(),
        *(
            pytest.param(name, IN_MATRIX, marks=pytest.mark.matrix)
            for name in SUBJECTS
            if name not in QUICK
        ),
    ],
)
def test_mutants_are_noticed(name, count):
    subject = SUBJECTS[name]
    mutants = subject.mutants()
    numbers = random.Random(SEED).sample(range(len(mutants)), min(count, len(mutants)))
    judge = subject.judge()
    assert not judge.known, "the kernel itself has findings"
    unnoticed, wrongly_excused = [], []
    for mutant in (mutants[number] for number in sorted(numbers)):
        verdict = judge.verdict(mutant.ptx)
        assert verdict.by != BROKEN, (mutant.name, verdict.how)
        if mutant.equivalent and verdict.killed:
            wrongly_excused.append((mutant.name, verdict.how))
        elif not mutant.equivalent and not verdict.killed:
            unnoticed.append(mutant.name)
    assert not unnoticed
    assert not wrongly_excused
