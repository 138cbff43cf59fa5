"""Tokens of sparse attention and of its indexer do not depend on tokens of other requests."""

from __future__ import annotations

from tests.rows import changed, each_kind
from workbench.soak.rows import subjects

SUBJECTS = [each for each in subjects.SUBJECTS if each.name.startswith("fmha.sparse")]


@each_kind(SUBJECTS)
def test_other_rows_keep_their_bits(subject, number):
    assert not changed(subject, number)
