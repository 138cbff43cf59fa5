"""A row's result does not depend on other rows: helpers that the packages' tests share.

The problems are those of `scripts/soak.py rows`. A test compiles the kernels of a kind of call
once, so that a further case costs a call and no compilation.
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
    """Return the problems of a kind for which a change of other rows changes a result, in the
    emulator; kinds alternate between the subject's architectures. problems: number of problems
    tried."""
    arch = subject.archs[number % len(subject.archs)]
    draws = Draws(0, arch, SMALL, subjects=(subject,))
    kernel = next(islice(draws.kernels(), number, None))
    return changed_of(draws, kernel, problems)


def changed_of(draws: Draws, kernel: Kernel, count: int = PROBLEMS) -> list[str]:
    """Return such problems of a given kernel."""
    place = Place("emulate", draws.arch, "a test")
    problems = [draws.problem(kernel, number) for number in range(count)]
    return [repr(problem) for problem in problems if not Trial(problem, place).repeats()]
