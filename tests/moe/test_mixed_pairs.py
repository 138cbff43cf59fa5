"""Two launches of a product, one for experts whose rows are a tile and one for the others: the same
bits as of one launch, whoever has how many rows, under the checker."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from ptxemu import Options
from tests.moe.mixed_space import FIRST
from workbench.problems import mixed_gemm as cases
from workbench.problems.grouped_gemm import CHECKED, PATIENCE
from workbench.problems.mixed_gemm import Case, arguments_of

SIZES = 8, 16
COUNTS = {
    "some of each": (0, 8, 9, 3, 17, 0, 1, 40, 16, 8),
    "all are small": (8, 1, 0, 7, 8),
    "all are great": (9, 33, 0, 16),
    "no rows": (0, 0, 0),
}
PLAIN = Case((), 160, 136, form=None, bias=True, room=3, tile_rows=None, teams=None, parts=None)
LATE = Options("adversarial", 1, check=True, limit=PATIENCE)

pytestmark = pytest.mark.usefixtures("two_ctas")


def two_launches():
    """Whatever the sizes."""
    return mock.patch("moe.mixed.launch.choose_tile_rows", return_value=SIZES)


@pytest.mark.parametrize("options", [CHECKED, LATE], ids=["in turns", "late"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("form", [PLAIN, FIRST], ids=["plain", "gathered with SwiGLU"])
def test_the_bits_of_one_launch(form, counts, options):
    case = replace(form, counts=counts, tile_rows=None, teams=None, parts=None, split=1)
    wanted = cases.run(replace(case, tile_rows=16))
    with two_launches():
        first, second = arguments_of(case).configs
        result = cases.run(case, options)
    assert (first.tile_rows, first.least, first.most) == (8, 0, 8)
    assert (second.tile_rows, second.least, second.most) == (16, 9, 0)
    assert torch.equal(result[: case.rows].view(torch.int16), wanted[: case.rows].view(torch.int16))
