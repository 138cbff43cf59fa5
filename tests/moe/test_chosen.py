"""`fused_moe` with choices made by an engine: the bits of the routed layer, and the right sum for
slots without an expert, with a foreign expert, or with an expert twice.
"""

from __future__ import annotations

import pytest
import torch

from moe import Chosen, Router, arrange, fused_moe, fused_moe_plan, pack, route
from moe.api import OTHER_NAMES

EXPERTS, HIDDEN, INNER = 6, 256, 128


def weights(fmt="mxfp8"):
    generator = torch.Generator().manual_seed(3)
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) * HIDDEN**-0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) * INNER**-0.5
    return pack(w13.bfloat16(), w2.bfloat16(), fmt)


def tokens(count=5):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
    return x, torch.randn(count, EXPERTS, generator=generator)


FORMS = {
    "packed": (weights, {}),
    "arranged": (lambda: arrange(weights("mxfp4")), {"arch": "sm_90a"}),
}


@pytest.fixture(params=FORMS)
def form(request):
    make, options = FORMS[request.param]
    return make(), options


@pytest.mark.parametrize("count", [1, 5])
def test_the_bits_of_the_routed_layer(form, count):
    experts, options = form
    x, logits = tokens(count)
    ids, shares = route(logits, 2, **options)
    wanted = fused_moe(x, experts, logits, Router(2), **options)
    for kind in (torch.int32, torch.int64):
        found = fused_moe(x, experts, Chosen(ids.to(kind), shares), **options)
        assert torch.equal(found, wanted)
    plan = fused_moe_plan(x, experts, Chosen(ids, shares), **options)
    assert torch.equal(plan(), wanted)


def test_slots_without_an_expert_and_an_expert_twice(form):
    """A token without an expert gives zeros; an expert that is chosen twice counts twice."""
    experts, options = form
    x, _ = tokens()
    ids = torch.tensor([[0, 5], [-1, 2], [-1, -1], [3, 3], [5, -1]], dtype=torch.int32)
    shares = torch.tensor([[0.5, 0.25], [9.0, 1.0], [1.0, 1.0], [0.75, 0.5], [2.0, 0.0]])
    found = fused_moe(x, experts, Chosen(ids, shares), **options)
    assert not found[2].any()
    real = torch.where(ids < 0, 0.0, shares)
    one = [fused_moe(x, experts, Chosen(ids[:, [n]], torch.ones(5, 1)), **options) for n in (0, 1)]
    wanted = sum(y.double() * real[:, [n]] for n, y in enumerate(one))
    assert (found.double() - wanted).abs().max() <= 2**-7 * wanted.abs().max()


def test_experts_of_a_rank_add_up(form):
    experts, options = form
    x, _ = tokens()
    ids = torch.tensor([[0, 5], [1, 2], [-1, 4], [3, 3], [5, 0]], dtype=torch.int32)
    chosen = Chosen(ids, torch.full((5, 2), 0.5), EXPERTS)
    whole = fused_moe(x, experts, chosen, **options)
    w13, w2 = torch.randn(2, 2 * INNER, HIDDEN), torch.randn(2, HIDDEN, INNER)
    rank = pack(w13.bfloat16(), w2.bfloat16(), "mxfp8")
    part = fused_moe(x, rank, chosen, expert_range=(2, 4))
    assert part[[0, 2, 4]].count_nonzero() == 0
    assert part[[1, 3]].count_nonzero() > 0
    assert whole.isfinite().all()


@pytest.mark.parametrize(
    ("chosen", "options", "error", "words"),
    [
        (Chosen(torch.zeros(5, 2), torch.zeros(5, 2)), {}, ValueError, "chosen.ids is torch.fl"),
        (Chosen(torch.zeros(5, 2).int(), torch.zeros(5, 3)), {}, ValueError, "chosen.weights is"),
        (Chosen(torch.zeros(4, 2).int(), torch.zeros(4, 2)), {}, ValueError, "chosen.ids"),
        (Chosen(torch.full((5, 2), 6).int(), torch.zeros(5, 2)), {}, ValueError, "0 to 5, and -1"),
        (Chosen(torch.zeros(5, 2).int(), torch.zeros(5, 2), 8), {}, ValueError, "chosen.experts 8"),
        (Chosen(torch.zeros(5).int(), torch.zeros(5)), {}, ValueError, "chosen.ids"),
        (Chosen(torch.zeros(5, 2).int(), torch.zeros(5, 2)), {"router": Router(2)}, ValueError,
         "router with Chosen"),
        (Chosen(torch.zeros(5, 2).int(), torch.zeros(5, 2)), {"expert_range": (0, 6)}, ValueError,
         "chosen.experts is None"),
        (None, {}, TypeError, "router is NoneType"),
    ],
)  # fmt: skip
def test_choices_that_are_refused(chosen, options, error, words):
    x, logits = tokens()
    with pytest.raises(error, match=words):
        fused_moe(x, weights(), logits if chosen is None else chosen, **options)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_vllm_are_answered(name):
    x, logits = tokens()
    known = OTHER_NAMES[name] in ("x", "router_logits")
    words = f"fused_moe has no argument {name}"
    words += f"; it is called {OTHER_NAMES[name]} here" if known else f": {OTHER_NAMES[name]}"
    with pytest.raises(TypeError) as refused:
        fused_moe(x, None, logits, **{name: None})
    assert words in str(refused.value)


def test_calls_that_are_written_as_vllms_are_answered():
    x, _ = tokens()
    ids, shares = torch.zeros(5, 2).int(), torch.ones(5, 2)
    with pytest.raises(TypeError, match=r"router_logits is tuple, expected .* or Chosen"):
        fused_moe(x, weights(), (shares, ids))
    with pytest.raises(TypeError, match="fused_moe has 5 arguments by position: it takes x, exp"):
        fused_moe(x, torch.ones(()), torch.ones(()), shares, ids)
