"""Decode over the whole accepted range of its numbers, compared with the definition in fp64."""

from __future__ import annotations

from gqa_lowlatency import decode
from kernelkit.compile.arch import written_for
from lab.problems.decode import Case, judge
from lab.tools.place import poisoned_outputs
from tests.support.extremes import GROUP, KV_HEADS, each_round, lengths, wrong

FP8 = {"kv_dtype": "e4m3", "scales": "heads"}
WINDOW = {"window": 20, "sink_tokens": 2, "sinks": True, "tokens": 2}
KINDS = {
    "sm_100a fp8": ("sm_100a", {**FP8, "sinks": True}),
    "sm_100a softcap": ("sm_100a", {**FP8, "softcap": 1.0, "dtype": "fp16"}),
    "sm_100a parts": ("sm_100a", {**WINDOW, "parts": 2}),
    "sm_90a fp8": ("sm_90a", {**FP8, "sinks": True}),
    "sm_90a softcap": ("sm_90a", {**FP8, "softcap": 1.0, "dtype": "fp16"}),
    "sm_90a window": ("sm_90a", {**WINDOW, "dtype": "fp16", "parts": 2}),
    "sm_89 fp8": ("sm_89", FP8),
}


def drawn(fields, pick):
    given = {"parts": 1, "cluster": 1, **fields}
    return Case(tuple(lengths(pick)), (KV_HEADS * GROUP, KV_HEADS), head_dim=64, **given)


def judged(case, arch):
    options = case.options() | case.launch_options(arch)
    with poisoned_outputs():
        results = decode(*case.inputs(), return_lse=True, backend="emulate", **options)
    return judge(case, written_for(arch), results)


@each_round(KINDS)
def test_extremes(kind, number):
    arch, fields = KINDS[kind]
    found = wrong(
        lambda case: judged(case, arch), lambda pick: drawn(fields, pick), f"{kind}.{number}"
    )
    assert not found, "\n".join(found)
