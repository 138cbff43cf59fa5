"""Two launches of a product, one for experts whose rows are a tile and one for the others: the same
bits as of one launch, whoever has how many rows, under the checker."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

from lab.mutation.subjects import EXPERTS
from lab.problems import mixed_gemm as cases
from lab.problems.grouped_gemm import CHECKED, PATIENCE
from lab.problems.mixed_gemm import Case, arguments_of
from moe.mixed.choose import BY_AVERAGE, choose_tile_rows
from moe.mixed.config import MixedConfig
from ptxemu import Options
from tests.moe.mixed_space import FIRST

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


def test_who_waits_for_the_second_launch_has_waited_for_the_first():
    """Of both products in turn. Nothing stands in front of the first launch or behind the last."""
    subject = EXPERTS["moe mixed beside each other"]
    waits = [each for each in subject.mutants() if each[1].kind.name == "remove dependency wait"]
    judge = subject.judge({"checked": {"check": True}})
    assert sorted(judge.verdict(*each).noticed for each in waits) == [False, False, True, True]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_first_tile_holds_the_average(arch):
    """Or it is one of the largest."""
    for x in ("bf16", "e4m3") if arch == "sm_90a" else ("bf16",):
        chosen = [choose_tile_rows(rows, 8, arch, x) for rows in range(1, 8 * 600)]
        for rows, tiles in enumerate(chosen, 1):
            assert tiles[0] * 8 >= rows or tiles == BY_AVERAGE[arch, x][math.inf]
            assert [*tiles] == sorted(tiles)
        assert {*chosen} == {*BY_AVERAGE[arch, x].values()}


def test_one_launch_where_sizes_or_the_caller_say_so():
    case = replace(PLAIN, counts=(9,) * 4, arch="sm_90a")
    assert len(arguments_of(replace(case, split=1)).configs) == 2
    for given in ({"tile_rows": 16}, {"teams": 2, "parts": 1}, {"split": 2}):
        assert len(arguments_of(replace(case, **{"split": 1} | given)).configs) == 1
    given = arguments_of(replace(case, split=1))
    assert [len(replace(given, most_rows=most).configs) for most in (8, 9, 16, 17)] == [1, 1, 1, 2]
    (shared,) = arguments_of(replace(case, k=704)).configs
    assert shared.split > 1


@pytest.mark.parametrize(
    ("config", "arch", "words"),
    [
        (MixedConfig(least=9), "sm_90a", "least 9 without pdl"),
        (MixedConfig(most=8, tile_rows=16), "sm_100a", "one launch takes all"),
    ],
)
def test_refusals(config, arch, words):
    with pytest.raises((ValueError, NotImplementedError), match=words):
        config.check_values(arch)
