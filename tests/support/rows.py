"""A row's result does not depend on other rows: what the tests of packages share.

The problems are those of `scripts/soak.py rows`. A kind of call has its kernels, which a test
compiles once, so that a case more costs a call and no compilation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pytest

from lab.problems.draws import Kernel
from lab.soak.rows.family import Draws, Trial
from lab.soak.rows.subject import Subject
from lab.tools.place import Place

SMALL = True
KINDS = 25  # of a subject; the first two are those of the matrix
PROBLEMS = 10  # of a kind


def each_kind(subjects: Sequence[Subject]) -> pytest.MarkDecorator:
    """Parameters `subject` and `number`, of a kind of its calls."""
    cases = [
        pytest.param(subject, number, id=f"{subject.name}-{number}")
        for subject in subjects
        for number in range(KINDS)
    ]
    return pytest.mark.parametrize(("subject", "number"), cases)


def changed(subject: Subject, number: int, problems: int = PROBLEMS) -> list[str]:
    """The problems of a kind in which other rows change, in the emulator, the architectures of the
    subject in turns. problems: how many there are of the kind."""
    arch = subject.archs[number % len(subject.archs)]
    draws = Draws(0, arch, SMALL, subjects=(subject,))
    kernel = next(islice(draws.kernels(), number, None))
    return changed_of(draws, kernel, problems)


def changed_of(draws: Draws, kernel: Kernel, count: int = PROBLEMS) -> list[str]:
    """The same of a kernel that is drawn."""
    place = Place("emulate", draws.arch, "a test")
    problems = [draws.problem(kernel, number) for number in range(count)]
    return [repr(problem) for problem in problems if not Trial(problem, place).repeats()]
