"""Routing on the GPU itself: random problems of any size, captured graphs, equal bits.

`python -m pytest --hw -m hw tests/moe/test_routing_hw.py` on compute capability 9.0 or 10.x.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from moe import Router
from moe import reference_routing as reference
from moe.routing import combine, permutation, route, route_tokens
from moe.routing.config import SCORINGS
from tests.moe.routing_cases import (
    DTYPES,
    Linear,
    Routing,
    Sum,
    build,
    check_combine,
    check_exact,
    check_normal,
    check_permutation,
    check_route,
)

pytestmark = [pytest.mark.hw, pytest.mark.xdist_group("moe-routing-hw")]

TOKENS = (1, 2, 127, 128, 129, 1000, 5000, 40_000)


def random_case(seed: int) -> Routing:
    """A random call of `route`."""
    draw = random.Random(seed)
    n_group = draw.choice((1, 1, 4, 8))
    experts = draw.choice((1, 2, 8, 64, 257, 384, 512) if n_group == 1 else (16, 64, 256, 384))
    topk_group = draw.randint(1, n_group)
    top_k = draw.randint(1, min(16, experts // n_group * topk_group))
    return Routing(
        tokens=draw.choice(TOKENS[:-1] if n_group == 1 else TOKENS[:6]),
        experts=experts,
        top_k=top_k,
        dtype=draw.choice(sorted(DTYPES)),
        scoring=draw.choice(SCORINGS),
        bias=draw.random() < 0.5,
        groups=(n_group, topk_group),
        renormalize=draw.random() < 0.5,
        scale=draw.choice((1.0, 2.5)),
        seed=seed,
        logit_bias=draw.random() < 0.5,
        shared=draw.choice((0, 1, 2)) if experts < 510 and top_k < 15 else 0,
    )


@pytest.mark.parametrize("seed", range(60))
def test_route(seed):
    check_route(random_case(seed), device="cuda")


def random_linear(seed: int) -> Linear:
    """A random call of `route_tokens`, with experts and tokens of `random_case`."""
    draw, case = random.Random(seed), random_case(seed)
    return Linear(
        replace(case, tokens=draw.randint(1, 70), dtype=draw.choice(("bf16", "fp16"))),
        hidden=8 * draw.choice((1, 9, 64, 255, 360, 512, 896)),
        bias=draw.random() < 0.5,
        ready=draw.random() < 0.5,
        hostile=draw.random() < 0.3,
    )


@pytest.mark.parametrize("seed", range(60))
def test_route_tokens(seed):
    check_exact(random_linear(seed), device="cuda")


@pytest.mark.parametrize("tokens", [1, 8, 33, 64])
@pytest.mark.parametrize(("experts", "top_k", "hidden"), [(32, 4, 2880), (256, 8, 7168)])
def test_route_tokens_of_normal_numbers(experts, top_k, hidden, tokens):
    check_normal(Linear(Routing(tokens, experts, top_k, "bf16"), hidden, bias=True), device="cuda")


@pytest.mark.parametrize("tokens", [1, 9, 64])
def test_route_tokens_between_launches_of_a_graph(tokens):
    """The previous launch writes the tokens, and the next one reads the weights, repeatedly."""
    case = Linear(Routing(tokens, 32, 4, "bf16"), 2880, bias=True)
    x, layer = case.normal(tokens, "cuda")
    y, rows = torch.randn(4 * tokens, 512, device="cuda"), torch.arange(4 * tokens).int().cuda()
    ones = torch.ones(tokens, 1, device="cuda")

    def run() -> tuple[torch.Tensor, ...]:
        given = combine(x.contiguous(), ones, rows[:tokens])
        ids, weights = route_tokens(given, layer, Router(4))
        return given, ids, weights, combine(y, weights, rows)

    wanted = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [run() for _ in range(20)]
    for _ in range(20):
        graph.replay()
        for found in captured:
            assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("seed", range(60))
def test_permutation(seed):
    draw = random.Random(seed)
    experts = draw.choice((1, 2, 8, 64, 257, 384, 512))
    shape = (draw.choice((*TOKENS, 65_536)), draw.randint(1, 16))
    torch.manual_seed(seed)
    ids = torch.randint(experts, shape, device="cuda", dtype=torch.int32)
    if draw.random() < 0.3:
        ids.fill_(draw.randrange(experts))
    if draw.random() < 0.5:
        nobody = draw.choice((-1, experts, 1 << 30, -(1 << 31)))
        ids[torch.rand(shape, device="cuda") < 0.3] = nobody
    check_permutation(ids, experts)
    first = draw.randrange(experts)
    check_permutation(ids, experts, expert_range=(first, draw.randint(first + 1, experts)))


@pytest.mark.parametrize("seed", range(60))
def test_combine(seed):
    draw = random.Random(seed)
    dtypes = draw.choices(sorted(DTYPES), k=2)
    hidden = 8 * draw.choice((1, 9, 128, 360, 896))
    tokens = draw.choice(TOKENS[:6] if hidden > 1000 else TOKENS[:-1])
    case = Sum(tokens, draw.randint(1, 16), hidden, *dtypes, draw.random() < 0.8, seed)
    check_combine(case, device="cuda")


@pytest.mark.parametrize("tokens", [1, 129, 5000])
def test_slots_without_rows(tokens):
    """Two ranks together add what one adds, choice by choice in fp32; one may have no rows."""
    y, weights, rows = Sum(tokens, 8, 2880, "bf16", "fp32").inputs("cuda")
    rows = rows.view(tokens, 8)
    is_here = torch.rand(tokens, 8, device="cuda") < 0.4
    for mine in (is_here, ~is_here, torch.zeros_like(is_here)):
        own = rows.masked_fill(~mine, -1)
        got = combine(y, weights, own, out_dtype=torch.float32, partial=True)
        whole = combine(y, weights.masked_fill(~mine, 0.0), rows, out_dtype=torch.float32)
        assert torch.equal(got, whole)


def test_rows_behind_two_gigabytes():
    """The elements of y exceed 32-bit offsets."""
    rows, hidden = 330_000, 7168
    y = torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda")
    y[-1] = 3.0
    where = torch.tensor([[rows - 1, 0]], dtype=torch.int32, device="cuda")
    got = combine(y, torch.tensor([[2.0, 1.0]], device="cuda"), where)
    assert torch.equal(got, torch.full_like(got, 6.0))


@pytest.mark.parametrize("tokens", [4, 3000])
def test_captured_in_a_graph(tokens):
    """Routing from logits to combined rows: replays with new contents give the same bits as
    before."""
    logits, _ = build(Routing(tokens, 256, 8, "bf16", hostile=False), "cuda")
    y = torch.randn(tokens * 8, 512, device="cuda").bfloat16()

    def run() -> tuple[torch.Tensor, ...]:
        ids, weights = route(logits, 8)
        found = permutation(ids, 256)
        out = combine(y, weights, found.row_of_slot)
        return ids, weights, found.offsets, found.slot_of_row, found.row_of_slot, out

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in (1, 2, 3):
        logits.copy_(build(Routing(tokens, 256, 8, "bf16", hostile=False, seed=seed))[0])
        graph.replay()
        for _ in range(10):
            for got, again in zip(captured, run(), strict=True):
                assert torch.equal(got, again)
        expected = reference.permutation(captured[0], 256)
        assert torch.equal(captured[2], expected.offsets)
        assert torch.equal(captured[4], expected.row_of_slot)
