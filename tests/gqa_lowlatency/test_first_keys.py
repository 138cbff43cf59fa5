"""Entries that begin after the first key of their cache, such as prompts with pads on the left."""

from __future__ import annotations

import pytest
import torch

from gqa_lowlatency import decode, decode_plan
from gqa_lowlatency.portable import stream
from gqa_lowlatency.shared import split
from lab.problems.attention import PATIENCE
from lab.problems.decode import Case, judge
from ptxemu import Options
from tests.gqa_lowlatency.cases import check, run

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

CHECKED = Options(policy="round-robin", check=True, limit=PATIENCE)
ADVERSARIAL = Options(policy="adversarial", seed=1, limit=PATIENCE)
# Hidden keys: none, a tile and one more, a tile, all; and a first key after the last one.
ENDS = {"lens": (300, 130, 257, 64, 40), "firsts": (0, 129, 128, 64, 90)}
CASES = [
    Case(**ENDS),
    Case(**ENDS, tokens=3, heads=(4, 2), head_dim=64, window=100, keys=16, dtype="fp16"),
    Case(**ENDS, kv_dtype="e4m3", scales="heads", keys=128, sinks=True, softcap=15.0, parts=2),
    Case((700, 650), (16, 1), firsts=(513, 7), tokens=2, head_dim=256, causal=False, cluster=1),
]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_89"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_as_if_they_were_not_there(case, arch):
    check(case, arch, CHECKED, ADVERSARIAL)


def test_bits_are_those_of_the_same_keys_alone():
    """The first key begins a tile: keys before it change nothing."""
    q, k, v = (torch.randn(2, n, 1, 64).bfloat16() for n in (1, 300, 300))
    first = torch.full((2,), 128, dtype=torch.int32)
    alone = decode(q, k[:, 128:], v[:, 128:], arch="sm_90a")
    assert torch.equal(decode(q, k, v, first_keys=first, arch="sm_90a"), alone)


def test_a_plan_takes_others():
    q, k, v = (torch.randn(2, n, 1, 64).bfloat16() for n in (1, 200, 200))
    first = torch.tensor([3, 150], dtype=torch.int32)
    plan = decode_plan(q, k, v, first_keys=first)
    other = torch.tensor([64, 0], dtype=torch.int32)
    assert torch.equal(plan(q, k, v, first_keys=other)[0], decode(q, k, v, first_keys=other))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (torch.tensor([0, -1]).int(), ValueError, "first_keys -1 of entry 1: at least 0"),
        (torch.tensor([0, 1]), ValueError, "first_keys"),
        (torch.tensor([0]).int(), ValueError, "first_keys"),
    ],
)
def test_what_is_no_table_is_refused(given, error, words):
    q, k, v = (torch.zeros(2, n, 1, 64).bfloat16() for n in (1, 20, 20))
    with pytest.raises(error, match=words):
        decode(q, k, v, first_keys=given)


def test_not_with_the_first_keys_of_a_window():
    q, k, v = (torch.zeros(1, n, 1, 64).bfloat16() for n in (1, 20, 20))
    first = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="sink_tokens with first_keys"):
        decode(q, k, v, first_keys=first, window=4, sink_tokens=2)


def test_a_row_that_looks_before_it_is_noticed(changed):
    """Scores before the first key must not count in that key's tile."""
    words = "seen & inside", "seen"
    changed(split, [stream], "row_sees", words)
    case = CASES[0]
    assert not all(report.ok for report in judge(case, "sm_90a", run(case, "sm_90a")))
