"""Layers with few rows in one launch, on a Hopper GPU: each of many runs has the same bits, eagerly
and in a CUDA graph, with weights in L2 and without; granules agree; the steps give nearly the same.

`python -m pytest --hw -m hw tests/moe/test_few_hw.py` on compute capability 9.0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lab.tools.place import why_not_here
from moe import Router, SwiGLU, fused_moe_plan
from moe.mixed.few.launch import FewArguments
from moe.mixed.fragments import ArrangedExperts, Fragments, unit_bytes

pytestmark = [pytest.mark.hw, pytest.mark.xdist_group("moe-few-hw")]

RUNS = 200
EXPERTS, SLOTS, HIDDEN = 128, 4, 2880  # of gpt-oss-120b
GPT_OSS = SwiGLU(1.702, 1.0, 7.0)
FLUSHED = 256 << 20  # bytes, more than L2 holds
ROUNDING = 8e-3  # of bf16, of h and of both results
SCALES = (246, 249)  # of mxfp4, of normal weights


@pytest.fixture(autouse=True, scope="module")
def hopper():
    """Skip on other GPUs."""
    if reason := why_not_here(("sm_90a",)):
        pytest.skip(reason)


@pytest.fixture(scope="module")
def experts(hopper) -> ArrangedExperts:
    generator = torch.Generator("cuda").manual_seed(0)

    def weights(rows: int, *, pairs: bool) -> Fragments:
        units, size = -(-rows // 64) * -(-HIDDEN // 64), unit_bytes("mxfp4")
        given: dict[str, Any] = {"device": "cuda", "generator": generator}
        data = torch.randint(0, 256, (EXPERTS, units, size), dtype=torch.uint8, **given)
        scales = data[:, :, 2048:]
        scales.copy_(torch.randint(*SCALES, scales.shape, dtype=torch.uint8, **given))
        ones = torch.ones(EXPERTS, device="cuda")
        return Fragments(data.view(EXPERTS, -1), ones, rows, HIDDEN, "mxfp4", pairs)

    bias = [
        torch.randn(EXPERTS, rows, device="cuda", generator=generator) * 0.1
        for rows in (2 * HIDDEN, HIDDEN)
    ]
    return ArrangedExperts(
        weights(2 * HIDDEN, pairs=True), weights(HIDDEN, pairs=False), bias[0], bias[1]
    )


@pytest.mark.parametrize(
    ("tokens", "among"),
    [*((tokens, EXPERTS) for tokens in (1, 2, 4, 8, 16, 32, 64)), (32, 8), (64, 8)],
)
def test_every_run_has_the_same_bits(tokens, among, experts, monkeypatch):
    """among: experts that tokens choose of; of 8 each has more rows than an item."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, device="cuda", generator=generator).bfloat16()
    logits = torch.randn(tokens, EXPERTS, device="cuda", generator=generator)
    logits[:, among:] -= 50.0
    given = x, experts, logits, Router(SLOTS)
    plain, results = FewArguments.config.fget, []
    steps = fused_moe_plan(*given, activation=GPT_OSS)
    steps()
    for granule in (4, 1, 2):
        config = property(lambda self, n=granule: replace(plain(self), granule=n))
        monkeypatch.setattr(FewArguments, "config", config)
        results.append(_same_bits(fused_moe_plan(*given, activation=GPT_OSS, few_rows=True)))
    assert all(torch.equal(results[0], other) for other in results[1:])
    error = (results[0].double() - steps.result.double()).norm() / steps.result.double().norm()
    assert error < ROUNDING


def _same_bits(plan: Any) -> torch.Tensor:
    """Return the result of a plan, which all runs have."""
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    plan()
    first, graph = plan.result.clone(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        plan()
    other = torch.zeros((), dtype=torch.int64, device="cuda")
    for run in range(RUNS):
        if run % 4 == 0:
            flush.zero_()
        plan.result.fill_(torch.nan)
        (graph.replay if run % 2 else plan)()
        other += (plan.result != first).any()  # NaN differs from all
    assert not other.item(), f"{other.item()} of {RUNS} runs differ"
    return first
