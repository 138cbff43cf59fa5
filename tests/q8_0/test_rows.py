"""A token's result does not depend on other tokens, whatever those contain."""

from __future__ import annotations

from lab.soak.rows import family
from tests.support.rows import changed, each_kind

SUBJECTS = [each for each in family.SUBJECTS if each.name.startswith("q8_0")]


@each_kind(SUBJECTS)
def test_other_rows_keep_their_bits(subject, number):
    assert not changed(subject, number)
