"""The kernel of all other GPUs: attention on mma.sync, on the problems of the others and its own."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from ptxemu import Options
from tests.fmha import test_kernel
from tests.fmha.pairwise import Rule, Space, covering
from tests.fmha.space import EDGES, FACTORS, PLAIN, case_of, quick_rows
from tests.fmha.space import RULES as SHARED_RULES
from tests.fmha.test_kernel import by_group
from workbench.problems.attention import PATIENCE, Case

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

CHECKED = Options(policy="adversarial", seed=2, check=True, limit=PATIENCE)
FRIENDLY = Options(policy="round-robin", limit=PATIENCE)
ARCHS = ("sm_89", "sm_120a")
DIMS = (
    (16, 16), (48, 48), (64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256),
    (512, 512), (192, 128), (32, 144), (144, 32),
)  # fmt: skip
SPACE = Space(
    FACTORS | {"dims": DIMS, "tile_n": (0, 16, 48), "schedule": ("",)},
    (
        *SHARED_RULES,
        Rule(("dims", "tile_n"), lambda dims, keys: keys != 48 or max(dims) < 192),
        Rule(("dims", "rope_dim"), lambda dims, turned: turned <= dims[1]),
    ),
)
ROWS = covering(SPACE)
QUICK_ROWS = quick_rows(ROWS)
MATRIX_ROWS = [row for row in ROWS if row not in QUICK_ROWS]


def check(case: Case, *schedules: Options, arch: str = ARCHS[0]) -> None:
    portable = dataclasses.replace(case, instructions="mma.sync", schedule="")
    test_kernel.check(portable, schedules, arch)


def with_archs(rows: list) -> list:
    """The problems of rows, each on one architecture in turn."""
    turns = itertools.cycle(ARCHS)
    return [
        pytest.param(case, arch, id=f"{case}-{arch}")
        for case, arch in zip(map(case_of, rows), turns, strict=False)
    ]


@pytest.mark.parametrize("case", by_group(PLAIN))
def test_shapes(case):
    check(case, CHECKED, FRIENDLY)


@pytest.mark.parametrize(("case", "arch"), with_archs(QUICK_ROWS))
def test_every_value_of_every_factor(case, arch):
    check(case, CHECKED, arch=arch)


@pytest.mark.parametrize(("case", "arch"), with_archs(MATRIX_ROWS))
def test_every_pair_of_values(case, arch):
    check(case, CHECKED, arch=arch)


@pytest.mark.parametrize("case", by_group(EDGES[: len(EDGES) // 2]))
def test_edges_of_masks(case):
    check(case, CHECKED, FRIENDLY)
