"""A token's result does not depend on other tokens, whatever those contain."""

from __future__ import annotations

from dataclasses import replace

from lab.soak.rows import family
from lab.soak.rows.family import Draws
from tests.support.rows import changed, changed_of, each_kind

SUBJECTS = [each for each in family.SUBJECTS if each.name.startswith("moe")]


@each_kind(SUBJECTS)
def test_other_rows_keep_their_bits(subject, number):
    assert not changed(subject, number)


def test_rows_that_share_a_scale_are_noticed():
    """A global scale of the tensor is a dependence that the other test has to find."""
    (subject,) = (each for each in SUBJECTS if each.name == "moe.quantise")
    draws = Draws(0, "sm_90a", True, subjects=(subject,))
    kernel = next(each for each in draws.kernels() if each.case.fmt == "nvfp4")
    shared = replace(kernel, case=replace(kernel.case, scaling="tensor", choices=0))
    assert changed_of(draws, shared)
