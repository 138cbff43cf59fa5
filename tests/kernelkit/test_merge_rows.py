"""A merged row does not depend on other rows of the parts."""

from __future__ import annotations

from lab.soak.rows import arithmetic
from tests.support.rows import changed, each_kind


@each_kind(arithmetic.MERGES)
def test_other_rows_keep_their_bits(subject, number):
    assert not changed(subject, number)
