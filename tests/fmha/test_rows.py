"""Rows of attention do not depend on other queries, nor on keys of other entries and heads."""

from __future__ import annotations

import pytest

from tests.rows import changed, each_kind
from workbench.place import Place
from workbench.problems.attention import Case
from workbench.soak.rows import subjects
from workbench.soak.rows.attend import AttentionProblem, Kind
from workbench.soak.rows.trial import Trial

SUBJECTS = [each for each in subjects.SUBJECTS if each.name == "fmha.attention"]
TILES = Case(16, 300, dtype="fp16", rescale_log2=4.0, amplitude=2.0)  # of which maxima lag


@each_kind(SUBJECTS)
def test_other_rows_keep_their_bits(subject, number):
    assert not changed(subject, number, problems=20)


@pytest.mark.parametrize("contents", ["1,000 times as large", "NaN"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
def test_a_row_that_asks_for_a_maximum_moves_no_other(arch, contents):
    kind = Kind(TILES, (None, None), arch)
    problem = AttentionProblem(kind, 0, 3, contents, TILES, "query", 0, 0)
    assert Trial(problem, Place("emulate", arch, "a test")).repeats()
