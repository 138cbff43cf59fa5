"""Random problems over the whole space, hours of them (make sweep).

Each seed is one compiled kernel and a few problems for it; a failure names seed and problem, and
`pytest -m sweep -k "seed-17"` repeats it.
"""

from __future__ import annotations

import pytest

from lab.problems import attention as cases
from lab.soak.attention import SIZES, Draws

SEEDS = 1000
PROBLEMS = 6
SCHEDULES = (("round-robin", 0), ("random", 0), ("adversarial", 0), ("adversarial", 1))


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("seed", range(SEEDS), ids="seed-{}".format)
def test_random_problems(seed):
    draws = Draws(seed, "sm_100a", SIZES["small"])
    kernel = next(draws.kernels())
    for number in range(PROBLEMS):
        case = draws.problem(kernel, number)
        name = f"seed {seed}: {case!r}"
        try:
            results = [cases.run(case, *schedule) for schedule in SCHEDULES]
        except Exception as error:
            raise AssertionError(name) from error
        for report in cases.judge(case, results[0]):
            assert report.ok, f"{report}, {name}"
        for schedule, other in zip(SCHEDULES[1:], results[1:], strict=True):
            assert cases.same_bits(results[0], other), f"{schedule} changes bits, {name}"
