"""Covering arrays: their guarantees on small spaces, by brute force, and on the kernel's space."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.fmha.space import FACTORS, MATRIX, QUICK, QUICK_ROWS, ROWS, SPACE, SWEPT
from tests.support.pairwise import Rule, Space, covering, pairs_of, random_row

RULES = (
    Rule(("a", "b"), lambda a, b: a + b != 3),
    Rule(("b", "c", "d"), lambda b, c, d: b + c + d < 5),
    Rule(("d",), lambda d: d != 2),
)
IMPOSSIBLE = {("dims", "tile_n"), ("dims", "schedule"), ("sinks", "output")}  # some of their pairs


def small_space(seed):
    generator = random.Random(seed)
    factors = {name: tuple(range(generator.randint(1, 4))) for name in "abcd"}
    return Space(factors, RULES[: seed % 4])


def complete_rows(space):
    rows = (
        dict(zip(space.factors, values, strict=True))
        for values in itertools.product(*space.factors.values())
    )
    return [row for row in rows if space.allowed(row)]


@pytest.mark.parametrize("seed", range(24))
def test_every_pair_that_occurs_in_a_row_is_covered(seed):
    space = small_space(seed)
    order = list(space.factors)
    expected = set().union(*(pairs_of(row, order) for row in complete_rows(space)))
    assert set(space.pairs()) == expected
    rows = covering(space, seed)
    assert all(space.allowed(row) for row in rows)
    assert set().union(*(pairs_of(row, order) for row in rows)) == expected


def test_rows_do_not_depend_on_the_process():
    assert covering(SPACE) == ROWS


def test_the_matrix_covers_every_allowed_pair():
    assert all(SPACE.allowed(row) and list(row) == list(FACTORS) for row in ROWS)
    covered = set().union(*(pairs_of(row, list(FACTORS)) for row in ROWS))
    # A pair that SPACE calls impossible has to break a rule for all other values.
    for (first, values), (second, others) in itertools.combinations(FACTORS.items(), 2):
        for a, b in itertools.product(values, others):
            if ((first, a), (second, b)) not in covered:
                assert not SPACE.extends({first: a, second: b})
                assert (first, second) in IMPOSSIBLE


def test_the_quick_cases_hold_every_value():
    assert len(QUICK_ROWS) <= 12
    assert {item for row in QUICK_ROWS for item in row.items()} == {
        (name, value) for name, values in FACTORS.items() for value in values
    }


def test_cases_have_names_of_their_own_and_few_kernels():
    cases = QUICK + MATRIX + SWEPT
    assert len({str(case) for case in cases}) == len(cases) == len(ROWS)
    assert len({case.group for case in cases}) <= 90


@pytest.mark.parametrize("seed", range(20))
def test_a_random_row_is_complete(seed):
    assert SPACE.allowed(random_row(SPACE, random.Random(seed)))
