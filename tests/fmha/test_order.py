"""Which blocks a CTA computes: all of them once, whoever computes them, with the same bits."""

from __future__ import annotations

import pytest
import torch

from fmha.api import fields_of
from fmha.choose import choose_config, heads_of_section
from fmha.launch import ATTENTION
from ptxemu import Options
from workbench.problems import attention as cases
from workbench.problems.attention import Case

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

CASES = {
    "uneven heads": Case(200, 300, (6, 3), 2, causal=True, pack_heads=False, schedule="base"),
    "one tile": Case(1, 5, (1, 1), schedule="base"),
    "ping-pong": Case(300, 260, (3, 3), causal=True, schedule="pingpong"),
    "empty blocks": Case(
        0, 0, (2, 1), q_lens=(260, 0, 3), k_lens=(140, 40, 0), causal=True, schedule="base"
    ),
    "shared tiles": Case(90, 200, (6, 2), 2, causal=True, window=(60, None), pack_heads=True),
    "pair": Case(300, 140, (3, 1), causal=True, dims=(256, 256)),
    "pair of halves": Case(130, 140, (3, 1), causal=True, dims=(512, 512)),
}
CHECKED = Options(check=True, limit=cases.PATIENCE)


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_ctas_gives_the_same_bits(name, at_once):
    case, found = CASES[name], []
    for places in (148, 1, 3, 5):
        at_once(places)
        results, reports = cases.run_reported(case, CHECKED)
        assert not [f for report in reports for each in report.launches for f in each.findings]
        found.append(results)
    assert all(verdict.ok for verdict in cases.judge(case, found[0]))
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("seed", range(2))
def test_other_schedules_give_the_same_bits(seed):
    case = CASES["ping-pong"]
    expected, _ = cases.run_reported(case, "round-robin")
    for policy in ("random", "adversarial"):
        results, _ = cases.run_reported(case, policy, seed)
        assert torch.equal(results[0], expected[0])


def section(case: Case) -> int:
    """Without memory."""
    options = {name: given for name, given in case.arguments().items() if name != "return_lse"}
    arguments = ATTENTION.arguments(fields_of(*case.inputs("meta"), options))
    return heads_of_section(arguments, choose_config(arguments))


def test_the_longest_blocks_of_all_heads_come_first_where_they_differ():
    """At head dim 64 HBM delivers 148 heads of K and V at the pace of the products, at 128 half."""
    assert section(Case(8192, 8192, (32, 32), 4, causal=True)) == 128
    assert section(Case(8192, 8192, (16, 16), 4, causal=True, dims=(128, 128))) == 64
    assert section(Case(8192, 8192, (32, 32), 4, causal=True, dims=(128, 128))) == 1
    assert section(Case(8192, 8192, (64, 8), 4, causal=True, dims=(128, 128))) == 256
    assert section(Case(8192, 8192, (32, 32), 4)) == 1
    assert section(Case(8192, 8192, (32, 32), 4, causal=True, window=(127, None))) == 1
