"""Attention over the whole accepted range of its numbers, compared with the definition in fp64.

Scales range from 1e-12 to 1e12, softcaps from 1e-6 to 4096. k_scale, q_scale and v_scale have any
sign; 0 and 3e38 are among them. Sinks have any size; ties lie in different tiles; scores grow along
the keys.
"""

from __future__ import annotations

import pytest

from fmha import attention, reference
from lab.problems.attention import Case, judge
from lab.tools.place import poisoned_outputs
from tests.support.extremes import BATCH, GROUP, KV_HEADS, each_round, lengths, wrong

HEADS = (KV_HEADS * GROUP, KV_HEADS)
FP8_KEYS = {"kv_dtype": "e4m3", "scales": True}
FP8 = {"dtype": "e4m3", "scales": True}
WINDOW = {"window": (20, 3), "sink_tokens": 2, "sinks": True}
KINDS = {
    "sm_100a fp8": ("sm_100a", {**FP8, "sinks": True}),
    "sm_100a window": ("sm_100a", {**WINDOW, "dtype": "fp16"}),
    "sm_100a softcap": ("sm_100a", {**FP8_KEYS, "softcap": 1.0}),
    "sm_100a pingpong": ("sm_100a", {"schedule": "pingpong", "causal": True}),
    "sm_90a fp8": ("sm_90a", {**FP8_KEYS, "sinks": True}),
    "sm_90a seesaw": ("sm_90a", {"dims": (128, 128), "dtype": "fp16"}),
    "sm_90a softcap": ("sm_90a", {**FP8, "softcap": 1.0}),
    "sm_90a window": ("sm_90a", WINDOW),
    "sm_89": ("sm_89", {"sinks": True}),
    "sm_89 keys": ("sm_89", {"schedule": "keys", "dims": (128, 128)}),
}


def drawn(fields, pick):
    """A random case. Lengths of keys may be 0; queries may have any position."""
    keys = lengths(pick)
    queries = pick.choice((1, 5, 20))
    return Case(queries, max(keys), HEADS, BATCH, kv_lens=tuple(keys), **fields)


def judged(case, arch):
    with poisoned_outputs():
        results = attention(*case.inputs(), **case.arguments(), arch=arch, backend="emulate")
    return judge(case, results)


@each_round(KINDS)
def test_extremes(kind, number):
    arch, fields = KINDS[kind]
    found = wrong(
        lambda case: judged(case, arch), lambda pick: drawn(fields, pick), f"{kind}.{number}"
    )
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["k_scale", "q_scale", "v_scale", "scale"])
def test_another_number_is_noticed(name):
    """Given results in the dtypes of the kernel, the judge notices a changed number."""
    reports = []
    for seed in range(1, 5):
        case = Case(5, 40, HEADS, BATCH, **FP8, extreme=seed, scale=0.1)
        options = case.options()
        assert all(report.ok for report in judge(case, kernel_like(case, options)))
        options[name] = 0.3 if name == "scale" else -options[name]
        reports += judge(case, kernel_like(case, options))
    assert not all(report.ok for report in reports)


def kernel_like(case, options):
    """(O, LSE) of the definition in the dtypes of a kernel, in its range."""
    exact = reference.definition(*case.inputs(), **options)
    return exact.o.bfloat16(), exact.lse.clamp(-1e38, 1e38).float()
