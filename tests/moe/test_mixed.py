"""The grouped GEMM of 4-bit weights and bf16 rows, in the emulator."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from unittest import mock

import pytest
import torch

from kernelkit.compile import compiler as kernel_compile
from kernelkit.compile import store
from lab.mutation.subjects import SUBJECTS
from lab.problems import mixed_gemm as cases
from lab.problems.grouped_gemm import CHECKED, PATIENCE
from lab.problems.mixed_gemm import Case, arguments_of
from moe.mixed.choose import BY_AVERAGE, choose_tile_rows
from moe.mixed.config import MixedConfig
from moe.mixed.plan import ProductPlan
from moe.mixed.shared import load
from moe.mixed.sm90 import kernel
from moe.mixed.sm100 import kernel as blackwell
from ptxemu import Deadlock, Options
from tests.moe.mixed_space import (
    FIRST,
    FOURTH,
    MATRIX,
    MATRIX_ON_BLACKWELL,
    QUICK,
    QUICK_ON_BLACKWELL,
    SECOND,
    THIRD,
    TILES_OF,
    random_case,
)

# ---- The grouped GEMM of 4-bit weights and bf16 rows, on Hopper and Blackwell, in the emulator:
# values under the checker, bits under every schedule and with every tile, and the two deadlocks
# that it once had

pytestmark = pytest.mark.usefixtures("two_ctas")

GROUPS = 4
SEEDS = 100  # of the sweep
# Rows that no tile divides, and more of them than the largest tile has.
MANY_TILES = replace(FIRST, counts=(33, 0, 257, 1), k=96, slots=0)


def in_groups(given: Iterable) -> list:
    """Parameters in groups of xdist: cases hardly share kernels, so they can be split between
    workers."""
    marks = [pytest.mark.xdist_group(f"moe-mixed-{number}") for number in range(GROUPS)]
    return [pytest.param(each, marks=marks[i % GROUPS]) for i, each in enumerate(given)]


def check(case: Case, options: Options = CHECKED) -> torch.Tensor:
    inputs = case.inputs()
    result = cases.run(case, options)
    for report in cases.judge(case, result, inputs):
        assert report.ok, f"{case}: {report}"
    return result


@functools.cache
def expected(case: Case) -> torch.Tensor:
    """Result of the kernel under a friendly schedule."""
    return cases.run(case, Options(limit=PATIENCE))


def same_bits(case: Case, other: Case, options: Options = CHECKED) -> bool:
    """Compare with the expected bits; unused rows are NaN in both."""
    result = cases.run(other, options)
    return torch.equal(expected(case).view(torch.int16), result.view(torch.int16))


BOTH = pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
EDGES = pytest.mark.parametrize(
    "case", [FIRST, SECOND, THIRD, FOURTH], ids=["first", "second", "third", "fourth"]
)


@pytest.mark.parametrize("case", [*QUICK, *QUICK_ON_BLACKWELL], ids=str)
def test_quick(case):
    check(case)


@pytest.mark.parametrize("case", in_groups(MATRIX), ids=str)
def test_matrix(case):
    check(case)


@pytest.mark.parametrize("case", in_groups(MATRIX_ON_BLACKWELL), ids=str)
def test_matrix_on_blackwell(case):
    check(case)


@BOTH
@pytest.mark.parametrize("seed", range(SEEDS), ids="seed-{}".format)
def test_any(seed, arch):
    """A random problem of the whole space, in two orders of events."""
    case = random_case(seed, arch)
    check(case)
    late = Options("adversarial" if seed % 4 == 0 else "random", seed, limit=PATIENCE)
    assert same_bits(case, case, late), case


@pytest.mark.parametrize("seed", [0, 1])
@EDGES
def test_an_adversarial_schedule_gives_the_same_bits(case, seed):
    assert same_bits(case, case, Options("adversarial", seed, limit=PATIENCE))


@pytest.mark.parametrize("case", [FIRST, THIRD], ids=["first", "third"])
@pytest.mark.parametrize("ctas", [1, 5, 132])
def test_any_number_of_ctas_gives_the_same_bits(ctas, case, monkeypatch):
    wanted = expected(case)
    monkeypatch.setattr("moe.mixed.launch.sms_of", lambda device: ctas)
    result = cases.run(case)
    assert torch.equal(wanted.view(torch.int16), result.view(torch.int16))


@pytest.mark.parametrize(
    ("arch", "tile"),
    [(arch, tile) for arch in ("sm_90a", "sm_100a") for tile in TILES_OF[arch]],
    ids=lambda tile: tile if isinstance(tile, str) else "x".join(map(str, tile.values())),
)
def test_every_tile_gives_the_same_bits(arch, tile):
    """K is added up in the same order, and sums are processed alike."""
    other = replace(MANY_TILES, **tile, arch=arch)
    assert same_bits(MANY_TILES, other, Options(limit=PATIENCE))


@BOTH
@pytest.mark.parametrize("changes", [{"pdl": True}, {"slots": 0}, {"tile_rows": None}], ids=str)
def test_other_ways_to_the_same_bits(changes, arch):
    """A dependent launch, and chosen tiles; rows fetched by TMA are those that are gathered."""
    case = FIRST if arch == "sm_90a" else THIRD
    if "slots" not in changes:
        assert same_bits(case, replace(case, **changes, teams=None, parts=None))
        return
    inputs = case.inputs()
    gathered = expected(case)[: case.rows]
    slots = inputs.rows[: case.rows].long()
    x = inputs.x[slots // case.slots].contiguous()
    by_tma = cases.run(case, x=x, rows=None, slots=1)
    assert torch.equal(gathered, by_tma)


@EDGES
def test_nan_and_infinities_of_a_token_stay_in_its_row(case):
    inputs = case.inputs()
    sound = expected(case)[: case.rows]
    x, broken = inputs.x.clone(), {1: math.nan, 4: math.inf, case.rows - 1: -math.inf}
    places = [row if inputs.rows is None else int(inputs.rows[row]) // case.slots for row in broken]
    for place, value in zip(places, broken.values(), strict=True):
        x[place, place % case.k] = value
    result = cases.run(case, x=x)[: case.rows]
    tokens = torch.arange(case.rows) if inputs.rows is None else inputs.rows[: case.rows]
    mine = torch.isin(tokens // max(case.slots, 1), torch.tensor(places))
    assert torch.equal(result[~mine], sound[~mine])
    assert not result[mine].isfinite().all(1).any()


def test_rows_of_two_products_meet_in_no_row():
    """Experts without rows change nothing, whatever the weights of others are."""
    case = replace(FIRST, counts=(3, 0, 2), room=0)
    grown = replace(case, counts=(0, 3, 0, 0, 2, 0))
    inputs, others = case.inputs(), grown.inputs()
    data, factor, bias = others.w.data.clone(), others.w.factor.clone(), others.bias.clone()
    for here, there in ((0, 1), (2, 4)):
        data[there], factor[there] = inputs.w.data[here], inputs.w.factor[here]
        bias[there] = inputs.bias[here]
    w = replace(others.w, data=data, factor=factor)
    given = {"x": inputs.x, "rows": inputs.rows, "w": w, "bias": bias}
    assert torch.equal(cases.run(grown, **given), expected(case))


# -- former deadlocks -----------------------------------------------------------------------------

GATHERED = replace(
    FIRST, k=1472, columns=8, tile_rows=128, teams=3, parts=1, room=0, form=None
)  # fmt: skip


def stands_still(case: Case) -> bool:
    try:
        cases.run(case, Options(limit=PATIENCE))
    except Deadlock as error:
        return "(gather)" in str(error)
    return False


def test_who_computes_frees_a_stage_when_it_has_the_next_one(monkeypatch):
    """Therefore two stages of the ring are never in flight."""
    plan = cases.plan_of(GATHERED)
    assert plan.stages < 23 / 2
    assert plan.ahead == plan.stages - plan.lag - 1
    assert not stands_still(GATHERED)
    monkeypatch.setattr(ProductPlan, "ahead", property(lambda plan: plan.stages - 1))
    monkeypatch.setattr(kernel_compile, "_compiled", {})
    monkeypatch.setenv(store.VARIABLE, "off")
    assert stands_still(GATHERED)


@pytest.mark.parametrize("like", [FIRST, THIRD], ids=["first", "third"])
def test_tiles_of_one_step_are_told_before_others_begin(like, changed, monkeypatch):
    """The queue has two tiles, so at most three of their steps are in flight."""
    case = replace(like, counts=(9,) * 8, k=96)
    assert not stands_still(case)
    both = "(going == 0) | (steps * TILE_STAGES < plan.ahead)"
    changed(load, [kernel], "Gather", (both, "going == 0"))
    monkeypatch.setattr(blackwell.Gather, "run", kernel.Gather.run)
    assert stands_still(case)


@pytest.mark.parametrize(
    "tile", TILES_OF["sm_100a"], ids=lambda tile: "x".join(map(str, tile.values()))
)
def test_groups_in_turn_meet_the_same_stages(tile):
    """This holds on Blackwell, for each ring: a group that has not waited for a phase would take it
    for the next."""
    for fmt, slots in itertools.product(("nvfp4", "mxfp4"), (0, 2)):
        plan = cases.plan_of(replace(THIRD, **tile, fmt=fmt, slots=slots))
        assert plan.stages % plan.turns == plan.a_stages % plan.turns == 0 < plan.stages


def test_an_odd_number_of_stages(monkeypatch):
    """An odd number would fit, but weights of an early stage would come later than those of the
    next."""
    monkeypatch.setattr("moe.mixed.sm100.plan.MAX_STAGES", 3)
    monkeypatch.setattr(kernel_compile, "_compiled", {})
    monkeypatch.setenv(store.VARIABLE, "off")
    case = replace(THIRD, counts=(9, 0, 17), k=704, tile_rows=16, teams=2, parts=1)
    for seed in range(2):
        assert same_bits(case, case, Options("adversarial", seed, limit=PATIENCE))


# ---- Two launches of a product, one for experts whose rows fit a tile and one for the others: they
# give the bits of one launch, for any rows, under the checker

SIZES = 8, 16
COUNTS = {
    "some of each": (0, 8, 9, 3, 17, 0, 1, 40, 16, 8),
    "all are small": (8, 1, 0, 7, 8),
    "all are great": (9, 33, 0, 16),
    "no rows": (0, 0, 0),
}
PLAIN = Case((), 160, 136, form=None, bias=True, room=3, tile_rows=None, teams=None, parts=None)
LATE = Options("adversarial", 1, check=True, limit=PATIENCE)


def two_launches():
    """Choose two launches for any sizes."""
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
    """Mutants remove the wait of either launch of both products. The first launch waits for
    nothing, and nothing waits for the last."""
    subject = SUBJECTS["moe mixed beside each other"]
    waits = [each for each in subject.mutants() if each[1].kind.name == "remove dependency wait"]
    judge = subject.judge({"checked": {"check": True}})
    assert sorted(judge.verdict(*each).noticed for each in waits) == [False, False, True, True]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_first_tile_holds_the_average(arch):
    """Otherwise it is one of the largest tiles."""
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
        (MixedConfig(most=8, tile_rows=16), "sm_100a", "one launch computes all"),
    ],
)
def test_refusals(config, arch, words):
    with pytest.raises((ValueError, NotImplementedError), match=words):
        config.check_values(arch)
