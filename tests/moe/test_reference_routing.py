"""The reference of routing, expert by expert, slot by slot."""

from __future__ import annotations

import math

import pytest
import torch

from moe.reference_routing import combine, permutation, route

INF, NAN = math.inf, math.nan
LARGEST = torch.finfo(torch.float32).max


def by_expert(logits, top_k, options):
    """(ids, weights) of one token: scores in fp32 as numbers, everything else in plain Python."""
    linear = options.get("logit_bias", torch.zeros(len(logits))).tolist()
    logits = [x + b for x, b in zip(logits, linear, strict=True)]
    clean = [-INF if math.isnan(x) else min(x, LARGEST) for x in logits]
    if options.get("scoring") == "sigmoid":
        scores = torch.sigmoid(torch.tensor(clean)).tolist()
    elif options.get("scoring") == "sqrtsoftplus":
        scores = [math.sqrt(max(x, 0.0) + math.log1p(math.exp(-abs(x)))) for x in clean]
    else:
        top = max(clean)
        scores = [0.0 if x == -INF else math.exp(x - top) for x in clean]
        total = sum(scores) or 1.0
        scores = [s / total for s in scores]
    bias = options.get("bias", torch.zeros(len(scores))).tolist()
    chosen_by = [s + b for s, b in zip(scores, bias, strict=True)]
    groups = options.get("n_group", 1)
    size = len(scores) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    best = [sum(sorted((chosen_by[e] for e in group), reverse=True)[:2]) for group in members]
    open_groups = sorted(range(groups), key=lambda g: -best[g])[: options.get("topk_group", 1)]
    eligible = sorted(e for g in open_groups for e in members[g])
    ids = sorted(eligible, key=lambda e: -chosen_by[e])[:top_k]
    weights = [scores[e] for e in ids]
    total = (sum(weights) or 1.0) if options.get("renormalize", True) else 1.0
    weights = [w / total * options.get("scale", 1.0) for w in weights]
    shared = range(len(scores), len(scores) + options.get("shared", 0))
    return [*ids, *shared], weights + [options.get("shared_weight", 1.0)] * len(shared)


BIAS = torch.linspace(-0.3, 0.3, 16).flip(0)
OPTIONS = {
    "softmax": {},
    "sigmoid": {"scoring": "sigmoid"},
    "weights as they are": {"renormalize": False, "scale": 2.5},
    "bias": {"scoring": "sigmoid", "bias": BIAS},
    "DeepSeek-V4": {"scoring": "sqrtsoftplus", "bias": BIAS, "scale": 1.5},
    "groups": {"n_group": 4, "topk_group": 2, "scoring": "sigmoid"},
    "gpt-oss": {"logit_bias": 4 * BIAS},
    "shared": {"logit_bias": BIAS, "bias": BIAS, "scale": 2.5, "shared": 3, "shared_weight": 0.5},
    "groups of one": {"n_group": 16, "topk_group": 5},
    "DeepSeek-V3": {
        "scoring": "sigmoid", "bias": BIAS, "n_group": 8, "topk_group": 4, "scale": 2.5,
        "shared": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("top_k", [1, 4])
def test_every_option_expert_by_expert(options, top_k):
    """Of random logits, of few different ones (ties), and of some that are no numbers."""
    generator = torch.Generator().manual_seed(0)
    random = 2 * torch.randn(40, 16, generator=generator)
    tied = torch.randint(0, 3, (40, 16), generator=generator).float()
    hostile = random.clone()
    hostile[torch.rand(40, 16, generator=generator) < 0.4] = NAN
    hostile[torch.rand(40, 16, generator=generator) < 0.2] = -INF
    hostile[torch.rand(40, 16, generator=generator) < 0.02] = INF
    hostile[0], hostile[1], hostile[2] = NAN, -INF, INF
    logits = torch.cat((random, tied, hostile))
    ids, weights = route(logits, top_k, **options)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    for token, row in enumerate(logits.tolist()):
        expected = by_expert(row, top_k, options)
        assert ids[token].tolist() == expected[0], row
        assert weights[token].tolist() == pytest.approx(expected[1], rel=1e-5, abs=1e-30)


def test_softmax_of_the_chosen_alone():
    """gpt-oss and Mixtral: the sum over all experts cancels, but for its rounding."""
    logits = 4 * torch.randn(60, 32, generator=torch.Generator().manual_seed(1))
    _, weights = route(logits, 4)
    alone = logits.topk(4, dim=-1).values.double().softmax(-1)
    torch.testing.assert_close(weights.double(), alone, rtol=1e-6, atol=0)
    _, plain = route(logits, 4, renormalize=False)
    assert (plain.sum(-1) < 1 - 1e-3).any()


def test_of_equal_experts_the_lower_ones_come_first():
    ids, weights = route(torch.zeros(2, 8, dtype=torch.bfloat16), 3)
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(weights, torch.tensor(1 / 3))


def test_excluded_groups_lose_even_against_no_score():
    """A bias of -inf is still better than a group that is closed."""
    bias = torch.tensor([-INF, -INF, 5.0, -INF, -INF, -INF])
    ids, _ = route(torch.zeros(1, 6), 3, bias=bias, n_group=2, topk_group=1)
    assert ids.tolist() == [[2, 0, 1]]


def test_softmax_over_the_chosen_experts():
    """What gpt-oss computes is softmax with renormalize."""
    logits = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    ids, weights = route(logits, 4, renormalize=True)
    assert torch.allclose(weights, logits.gather(-1, ids.long()).softmax(-1), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scoring": "tanh"}, "scoring 'tanh': one of softmax, sigmoid, sqrtsoftplus"),
        ({"top_k": 0}, "top_k 0: from 1 to 12"),
        ({"top_k": 13}, "top_k 13: from 1 to 12"),
        ({"n_group": 5}, "n_group 5: a divisor of 12 experts"),
        ({"n_group": 0}, "n_group 0"),
        ({"n_group": 3, "topk_group": 4}, "topk_group 4: from 1 to n_group = 3"),
        ({"n_group": 3, "topk_group": 1, "top_k": 5}, "top_k 5: from 1 to 4, .* 1 groups"),
    ],
)
def test_route_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        route(torch.zeros(1, 12), **{"top_k": 2, **options})


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 1, 1), (7, 5, 2), (50, 3, 3), (0, 4, 2)]
)
def test_permutation_slot_by_slot(tokens, experts, top_k):
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k].int()
    rows = permutation(ids, experts)
    slots = ids.flatten().tolist()
    by_hand = [slot for e in range(experts) for slot, expert in enumerate(slots) if expert == e]
    assert rows.slot_of_row.tolist() == by_hand
    assert [by_hand[row] for row in rows.row_of_slot.tolist()] == list(range(len(slots)))
    counts = [slots.count(e) for e in range(experts)]
    assert rows.offsets.tolist() == [sum(counts[:e]) for e in range(experts + 1)]
    assert {t.dtype for t in (rows.offsets, rows.slot_of_row, rows.row_of_slot)} == {torch.int32}


def test_combine_adds_choice_by_choice():
    """1 is lost beside 2^25 in fp32 unless it comes after it has gone: the order shows."""
    y = torch.tensor([[2.0**25], [1.0], [-(2.0**25)]])
    weights = torch.ones(2, 3)
    row_of_slot = torch.tensor([0, 1, 2, 0, 2, 1]).int()
    assert combine(y, weights, row_of_slot).tolist() == [[0.0], [1.0]]
    assert combine(y, weights, row_of_slot, dtype=torch.float64).tolist() == [[1.0], [1.0]]


def test_combine_with_weights_and_without():
    generator = torch.Generator().manual_seed(0)
    y, weights = torch.randn(12, 8, generator=generator).bfloat16(), torch.rand(4, 3)
    row_of_slot = torch.randperm(12, generator=generator).int()
    total = combine(y, weights, row_of_slot, dtype=torch.float64)
    rows = y.double()[row_of_slot.long()].reshape(4, 3, 8)
    assert torch.allclose(total, (rows * weights.double()[..., None]).sum(1))
    plain = combine(y, None, row_of_slot.reshape(4, 3), dtype=torch.float64)
    assert torch.allclose(plain, rows.sum(1))
    assert combine(y, weights, row_of_slot).dtype == torch.float32
