"""A problem has the same bits with tiles of any size, and whether the epilogue carries or not: K is
added up in the same order, and the same is done with every sum."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.problems import grouped_gemm as cases
from lab.problems.grouped_gemm import Case
from moe.choose import FEW
from moe.config import TILE_ROWS
from tests.moe.grouped_space import FORMS

pytestmark = pytest.mark.usefixtures("poisoned_outputs", "three_ctas")

OTHERS = [tile_rows for tile_rows in TILE_ROWS if tile_rows != 128]
LARGER = [tile_rows for tile_rows in OTHERS if tile_rows not in FEW]

# No expert has more than 8 rows: what every tile can have.
SMALL = Case((8, 0, 1, 7), 192, 160, "nvfp4", 32, FORMS["deepseek"], "fp32", amax=True, bias=True)
# More rows than a tile has, whatever it has; a K tail of a stage.
LARGE = Case((33, 0, 257, 64, 1), 352, 96, "nvfp4", 16, FORMS["gpt-oss"], "bf16", per_token=True)
PLAIN = replace(LARGE, form=None, granularity=0, columns=200)

MATRIX = [(SMALL, tile_rows) for tile_rows in OTHERS]
MATRIX += [
    (replace(case, fmt=fmt, out=out, per_token=case.per_token and fmt == "nvfp4"), tile_rows)
    for number, (case, tiles) in enumerate(((SMALL, OTHERS), (LARGE, LARGER), (PLAIN, LARGER)))
    for fmt, out in (
        ("nvfp4", ("fp16", "nvfp4", "bf16")[number]),
        ("mxfp8", ("mxfp8", "fp32", "fp16")[number]),
        ("mxfp4", ("bf16", "mxfp4", "fp32")[number]),
    )
    for tile_rows in tiles
]


@pytest.mark.parametrize(("case", "tile_rows"), MATRIX, ids=str)
def test_every_tile_gives_the_same_bits(case, tile_rows):
    assert_same(replace(case, tile_rows=128), replace(case, tile_rows=tile_rows))


def assert_same(case: Case, other: Case) -> None:
    (expected, amax), (result, other_amax) = cases.run(case), cases.run(other)
    assert cases.same_bits(result, expected, case.offsets)
    assert amax == other_amax


@pytest.mark.parametrize("tile_rows", [128, 256])
@pytest.mark.parametrize("out", ["nvfp4", "fp32"])
def test_wide_tiles_and_the_carrying_path_give_the_same_bits(tile_rows, out):
    """256 columns beside 128; SiLU of gate carried to the subtile of up beside both at once."""
    case = replace(LARGE, granularity=8, amax=True, out=out, tile_rows=tile_rows, tile_n=128)
    for changes in ({"tile_n": 256}, {"carry": True}, {"tile_n": 256, "carry": True}):
        assert_same(case, replace(case, **changes))


@pytest.mark.parametrize("tile_rows", [64, 128, 256])
def test_a_dependent_launch_gives_the_same_bits(tile_rows):
    case = replace(LARGE, out="nvfp4", tile_rows=tile_rows)
    assert_same(case, replace(case, pdl=True))


@pytest.mark.parametrize("tile_rows", [64, 256])
def test_weights_that_are_fetched_early_give_the_same_bits(tile_rows):
    """More stages of K than the ring has, several tiles to a CTA, biases."""
    case = replace(LARGE, out="nvfp4", tile_rows=tile_rows, bias=True, k=2048)
    assert_same(case, replace(case, pdl=True, w_ready=True))
