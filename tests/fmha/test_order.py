"""Blocks that a CTA computes: together all of them once, with the same bits in every order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmha.api import attention, fields_of
from fmha.choose import choose_config, problem_of
from fmha.launch import ATTENTION, MAX_BLOCKS
from fmha.sections import heads_of_section, most_even, unevenness
from kernelkit.plan import hw
from lab.problems import attention as cases
from lab.problems.attention import Case
from ptxemu import Options

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
def test_any_number_of_ctas_gives_the_same_bits(name, at_once, monkeypatch):
    case, found = CASES[name], []
    for places, section in ((148, 6), (1, 1), (3, 2), (5, 3)):
        at_once(places)
        monkeypatch.setattr("fmha.launch.heads_of_section", sections_of(section))
        results, reports = cases.run_reported(case, CHECKED)
        assert not [f for report in reports for each in report.launches for f in each.findings]
        found.append(results)
    assert all(verdict.ok for verdict in cases.judge(case, found[0]))
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def sections_of(size: int) -> Callable[..., tuple[int, int]]:
    """Replace the choice of a section's heads by `size` heads each, if rows differ in length."""

    def chosen(arguments, config, *place):
        if config.even_rows:
            return heads_of_section(arguments, config, *place)
        return size, size

    return chosen


@pytest.mark.parametrize("seed", range(2))
def test_other_schedules_give_the_same_bits(seed):
    case = CASES["ping-pong"]
    expected, _ = cases.run_reported(case, "round-robin")
    for policy in ("random", "adversarial"):
        results, _ = cases.run_reported(case, policy, seed)
        assert torch.equal(results[0], expected[0])


def order(case: Case, arch: str = "sm_100a", places: int = 148) -> tuple[int, int]:
    """Return the heads of a section, for tensors without memory."""
    options = {name: given for name, given in case.arguments().items() if name != "return_lse"}
    arguments = ATTENTION.arguments(fields_of(*case.inputs("meta"), options))
    return heads_of_section(problem_of(arguments), choose_config(arguments, arch), arch, places)


def test_the_longest_blocks_come_first_of_as_many_heads_as_l2_holds():
    long = Case(8192, 8192, (32, 32), 4, causal=True, dims=(128, 128))
    section, near = order(long)
    assert section == near
    assert 8192 * 512 < section * 8192 * 512 < hw.L2_BYTES_OF["sm_100a"]
    assert order(long, "sm_90a", 132)[0] < section  # its L2 is smaller
    apart = dataclasses.replace(long, heads=(32, 4), pack_heads=False)  # 8 heads read the same keys
    assert order(apart)[0] > section


@pytest.mark.parametrize(
    "change",
    [{"causal": False}, {"window": (127, None)}, {"skv": 65536}],
    ids=["no mask", "a window", "a long past"],
)
def test_heads_follow_each_other_where_blocks_are_as_long(change):
    case = dataclasses.replace(Case(8192, 8192, (32, 32), 4, causal=True), **change)
    assert order(case) == (128, 1)


def refusal_of(entries: int, tokens: int, **options) -> str:
    """Return the error of `attention` for packed entries without memory, '' if it would launch."""
    table = {"dtype": torch.int32, "device": "meta"}
    q, k = (torch.empty(tokens, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (8, 2))
    starts = torch.empty(entries + 1, **table)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "pack_heads": False}
    try:
        attention(q, k, k, **packed, **options)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a", "sm_89"])
def test_entries_are_limited_by_what_a_launch_counts(arch):
    """The grid has one dimension, with as many CTAs as run at once, for any problem."""
    ctas = {"arch": arch, "causal": True}
    assert not refusal_of(70_000, 70_000, max_seqlen_q=1, **ctas)
    most = (MAX_BLOCKS - 1) // 8
    assert not refusal_of(most, 4, max_seqlen_q=1, **ctas)
    assert f"{8 * most + 8} query blocks: {most + 1} entries x 8 heads x 1 blocks" in refusal_of(
        most + 1, 4, max_seqlen_q=1, **ctas
    )
    assert "Give max_seqlen_q" in refusal_of(70_000, 1 << 20, **ctas)  # the sum of all lengths


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 200), blocks=st.integers(1, 70), places=st.sampled_from([66, 132, 148]),
    most=st.integers(1, 60), past=st.sampled_from([0, 500]),
)  # fmt: skip
def test_a_section_is_no_less_even_than_what_l2_holds(heads, blocks, places, most, past):
    most = min(most, heads)
    section, near = most_even(heads, blocks, places, most, past, 128)
    assert near in (1, section)
    assert section <= most or (section, near) == (heads, 1)
    lengths = [past + 128 * (blocks - place) for place in range(blocks)]
    others = unevenness(heads, places, most, most, lengths)
    assert unevenness(heads, places, section, near, lengths) <= others * 1.02 + 0.01
