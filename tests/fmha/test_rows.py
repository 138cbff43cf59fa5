"""Rows of attention do not depend on other queries, nor on keys of other entries and heads."""

from __future__ import annotations

from tests.rows import changed, each_kind
from workbench.soak.rows import subjects

SUBJECTS = [each for each in subjects.SUBJECTS if each.name == "fmha.attention"]


@each_kind(SUBJECTS)
def test_other_rows_keep_their_bits(subject, number):
    assert not changed(subject, number, problems=20)
