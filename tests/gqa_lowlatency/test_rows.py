"""Rows of a decode step do not depend on other queries, nor on keys of other entries and heads."""

from __future__ import annotations

from lab.soak.rows import family
from tests.support.rows import changed, each_kind

SUBJECTS = [each for each in family.SUBJECTS if each.name == "gqa_lowlatency.decode"]


@each_kind(SUBJECTS)
def test_other_rows_keep_their_bits(subject, number):
    assert not changed(subject, number, problems=30)
