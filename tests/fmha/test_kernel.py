"""The kernel, through the API and the emulator, compared with the fp64 definition.

Cases run under several schedules, and the bits must not depend on them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from fmha import AttentionConfig, attention, reference
from kernelkit.numerics import tolerance
from lab.problems import attention as cases
from lab.problems.attention import PATIENCE, POLICIES, Case
from ptxemu import Options
from tests.fmha.space import EDGES, MATRIX, PLAIN, QUICK, SWEPT

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

EVERY_POLICY = tuple(  # the checker listens to the first
    Options(policy=policy, check=policy == POLICIES[0], limit=PATIENCE) for policy in POLICIES
)
TWO_POLICIES = (  # what the checker finds does not depend on the schedule
    Options(policy="round-robin", check=True, limit=PATIENCE),
    Options(policy="adversarial", seed=1, limit=PATIENCE),
)
ADVERSARIAL = (Options(policy="adversarial", seed=2, check=True, limit=PATIENCE),)


def by_group(chosen: tuple[Case, ...]) -> list:
    """Cases with ids; those that share a compiled kernel share a worker."""
    return [
        pytest.param(case, id=str(case), marks=pytest.mark.xdist_group(f"fmha-{case.group}"))
        for case in chosen
    ]


def check(case: Case, schedules: tuple[Options, ...] = EVERY_POLICY, arch: str = "sm_100a") -> None:
    results = [cases.run(case, options, arch=arch) for options in schedules]
    for report in cases.judge(case, results[0]):
        assert report.ok, str(report)
    for schedule, other in zip(schedules[1:], results[1:], strict=True):
        assert cases.same_bits(results[0], other), f"{schedule.policy} changes bits"


def assert_right(results: tuple, inputs: tuple, **options: Any) -> None:
    """Compare (O, LSE) with the definition."""
    exact, rounded = (f(*inputs, **options) for f in (reference.definition, reference.rounded))
    for report in (
        tolerance.compare_output(results[0], exact.o, rounded.o, inputs[0].dtype),
        tolerance.compare_lse(results[1], exact.lse, rounded.lse),
    ):
        assert report.ok, str(report)


@pytest.mark.parametrize("case", by_group(PLAIN))
def test_shapes(case):
    check(case)


@pytest.mark.parametrize("case", by_group(EDGES[: len(EDGES) // 2]))
def test_edges_of_masks(case):
    check(case, TWO_POLICIES)


@pytest.mark.parametrize("case", by_group(EDGES[len(EDGES) // 2 :]))
def test_edges_of_masks_in_the_ping_pong_schedule(case):
    check(case, TWO_POLICIES)


MOVING = tuple(  # row maxima move from tile to tile, so that O is rescaled
    dataclasses.replace(case, amplitude=64.0)
    for case in QUICK
    if (case.schedule, case.page_size) == ("pingpong", 32)
)


EXACT = tuple(  # no page follows the table's last one, but a tile extends beyond it
    dataclasses.replace(
        case, skv=96, kv_lens=(96,) * case.batch, q_offset=(95,) * case.batch, amplitude=1.0
    )
    for case in MOVING
)


@pytest.mark.parametrize("case", by_group((*QUICK, *MOVING, *EXACT)))
def test_every_value_of_every_factor(case):
    check(case, ADVERSARIAL)


@pytest.mark.parametrize("case", by_group(MATRIX))
def test_every_pair_of_values(case):
    check(case, ADVERSARIAL)


@pytest.mark.parametrize("case", by_group(QUICK + MATRIX + SWEPT))
def test_every_pair_of_values_in_two_schedules(case):
    check(case, TWO_POLICIES)


EMPTY = (
    Case(0, 0, (2, 1), 2, q_lens=(0, 0), k_lens=(2, 1)),
    Case(0, 0, (2, 1), 2, q_lens=(2, 0), k_lens=(0, 0), sinks=True),
    Case(0, 5, (2, 1), 2, page_size=16, kv_lens=(5, 0)),
    Case(3, 0, (2, 1), 2, page_size=16, kv_lens=(0, 0), sinks=True),
    Case(3, 7, (2, 1), 2, kv_lens=(0, 0), normalize=False),
    Case(0, 0, (2, 1), 1, q_lens=(0,), kv_lens=(0,), normalize=False),
)


@pytest.mark.parametrize("case", by_group(EMPTY))
def test_nothing_to_sum(case):
    check(case)


@pytest.mark.xdist_group(f"fmha-{PLAIN[0].group}")
def test_keys_may_be_values_and_tokens_may_come_first_in_memory():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn((2, n, 2, 64), generator=generator).bfloat16() for n in (130, 200))
    q = q[:, :, :, None].expand(2, 130, 2, 3, 64).reshape(2, 130, 6, 64)
    assert_right(attention(q, k, k, return_lse=True), (q, k, k))


NO_KEYS = Case(130, 400, (2, 1), 3, causal=True, kv_lens=(400, 70, 1), normalize=False)


@pytest.mark.xdist_group(f"fmha-{NO_KEYS.group}")
def test_raw_rows_without_keys_are_minus_infinity():
    check(NO_KEYS)  # lengths 70 and 1 under 130 causal rows: most rows see nothing
    raw, lse, row_max = cases.run(NO_KEYS, "round-robin")
    unseen = torch.isneginf(lse)
    assert unseen[1, :, :60].all()
    assert unseen[2, :, :129].all()
    assert not unseen[0].any()
    assert torch.equal(unseen, torch.isneginf(row_max))
    assert not raw.transpose(1, 2)[unseen].any()


@pytest.mark.xdist_group(f"fmha-{EDGES[0].group}")
@pytest.mark.parametrize("sink", [-math.inf, -200.0, 90.0])
def test_extreme_sinks(sink):
    """-inf is no sink at all; a sink far above every score leaves O its relative precision."""
    case = EDGES[1]
    sinks = torch.tensor([sink, 0.5])
    results, _ = cases.run_reported(case, "round-robin", sinks=sinks)
    assert_right(results, case.inputs(), **(case.options() | {"sinks": sinks}))


@pytest.mark.xdist_group(f"fmha-{EDGES[0].group}")
def test_a_sink_leaves_nothing_beside_a_maximum_that_lags():
    """Scores rise from tile to tile by less than the maximum may lag. The weight left next to a
    sink of 92 is subnormal with the first tile's maximum, but not with the true one."""
    q, k = torch.zeros(1, 8, 1, 64), torch.zeros(1, 384, 1, 64)
    q[..., 0], k[..., 0] = 8.0, torch.linspace(9.7, 0, 384)[:, None]
    q, k, v = (x.bfloat16() for x in (q, k, torch.randn_like(k)))
    options = {"sinks": torch.tensor([92.0])}
    results = attention(q, k, v, return_lse=True, **options)
    assert_right(results, (q, k, v), **options)


@pytest.mark.parametrize("schedule", ["base", "pingpong"])
def test_a_cache_may_hold_anything_behind_the_offset(schedule):
    """Queries in the middle of a preallocated cache, without kv_lens."""
    case = Case(5, 300, (2, 1), 2, q_offset=(130, 60), causal=True, schedule=schedule)
    q, k, v = case.inputs()
    for entry, end in enumerate((135, 65)):
        k[entry, end:] = v[entry, end:] = math.nan
    options = {"causal": True, "q_offset": torch.tensor(case.q_offset, dtype=torch.int32)}
    config = AttentionConfig(schedule=schedule)
    results = attention(q, k, v, return_lse=True, config=config, **options)
    assert_right(results, (q, k, v), **options)


def test_a_bound_on_packed_lengths_may_be_too_large():
    case = Case(0, 0, (2, 1), 3, q_lens=(130, 0, 3), k_lens=(64, 7, 300), causal=True)
    results, _ = cases.run_reported(case, "adversarial")
    more, _ = cases.run_reported(case, "adversarial", max_seqlen_q=400)
    assert all(report.ok for report in cases.judge(case, results))
    assert cases.same_bits(results, more)


JUDGED = Case(
    40, 300, (4, 2), 2, kv_lens=(300, 140), window=(60, 9), sink_tokens=5, softcap=5.0, sinks=True,
    q_offset=(120, 100), rope_dim=16,
)  # fmt: skip
WRONG = {
    "right by one": {"window": (60, 10)},
    "left by one": {"window": (59, 9)},
    "sink tokens by one": {"sink_tokens": 6},
    "offset by one": {"q_offset": (121, 100)},
    "length by one": {"kv_lens": (300, 139)},
    "no softcap": {"softcap": 0.0},
    "softcap of another size": {"softcap": 5.5},
    "no sinks": {"sinks": False},
    "no rope": {"rope_dim": 0},
    "scale": {"scale": 0.126},
}


@pytest.mark.parametrize("name", WRONG)
def test_the_judge_tells_another_problem_from_this_one(name):
    """Judge the result that a kernel with one mistake would return; nothing is compiled."""
    none = {"sinks": None, "rope": None}
    for wrong, expected in ((JUDGED, True), (dataclasses.replace(JUDGED, **WRONG[name]), False)):
        result = reference.rounded(*JUDGED.inputs(), **(none | wrong.options()))
        reports = cases.judge(JUDGED, (result.o, result.lse))
        assert all(report.ok for report in reports) == expected


@pytest.mark.parametrize(
    ("kernel", "rounded", "right"),
    [(995.0, 1000.0, True), (993.0, 1000.0, False), (993.0, 998.5, True), (1001.0, 1000.0, False)],
)
def test_a_raw_maximum_may_lag_and_is_as_exact_as_the_reference(kernel, rounded, right):
    """The maximum may lag by 2 ** 8, which is 5.5 in natural log."""
    row_max, exact, other = (torch.tensor([x, -math.inf]) for x in (kernel, 1000.0, rounded))
    assert cases.compare_row_max(row_max, exact, other, 8.0).ok == right
