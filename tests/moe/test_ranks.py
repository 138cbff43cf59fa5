"""Experts of a rank, and shared experts: what each rank adds, beside the whole layer."""

from __future__ import annotations

import pytest
import torch

from lab.problems.grouped_gemm import checked
from moe import reference
from moe.api import fused_moe, fused_moe_plan
from moe.arguments import Router, Scales
from moe.packing import PackedExperts, pack, unpack
from moe.reference_routing import route
from moe.warm import kernels_for

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS = 7, 128, 64, 5
SHARED = Router(2, "sigmoid", scale=2.5, shared=1)
RANKS = ((0, 2), (2, 3), (3, 6))  # the last one has the shared expert, too

pytestmark = pytest.mark.usefixtures("poisoned_outputs", "three_ctas")

torch.manual_seed(0)
X = torch.randn(TOKENS, HIDDEN).bfloat16()
LOGITS = torch.randn(TOKENS, EXPERTS)
W13 = (torch.randn(EXPERTS + 1, 2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5).bfloat16()
W2 = (torch.randn(EXPERTS + 1, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5).bfloat16()


def packed(fmt: str, first: int = 0, end: int = EXPERTS + 1) -> PackedExperts:
    return pack(W13[first:end], W2[first:end], fmt)


def run(experts: PackedExperts, logits: torch.Tensor = LOGITS, **options) -> torch.Tensor:
    with checked():
        return fused_moe(X, experts, logits, options.pop("router", SHARED), **options)


def apart(mine: torch.Tensor, other: torch.Tensor) -> float:
    """Relative, in the norm."""
    return ((mine.double() - other.double()).norm() / other.double().norm()).item()


def test_shared_experts_beside_the_reference():
    experts = packed("mxfp8")
    ids, weights = route(LOGITS, **vars(SHARED))
    assert ids[:, 2].tolist() == [EXPERTS] * TOKENS
    y = run(experts)
    expected = reference.layer(X, *unpack(experts), (ids, weights), fmt="mxfp8")
    assert apart(y, expected) < 5e-3
    without = reference.layer(X, *unpack(experts), (ids[:, :2], weights[:, :2]), fmt="mxfp8")
    assert apart(y, without) > 0.1


@pytest.mark.parametrize(("fmt", "scales"), [
    ("mxfp8", Scales()), ("nvfp4", Scales()), ("nvfp4", Scales("token", "tensor")),
], ids=["mxfp8", "nvfp4", "nvfp4-tensor"])  # fmt: skip
def test_the_sum_over_ranks_is_the_layer(fmt, scales):
    """Where scales do not depend on the rank, but for the rounding of each rank's output."""
    whole = run(packed(fmt), scales=scales)
    parts = [run(packed(fmt, *rank), expert_range=rank, scales=scales) for rank in RANKS]
    total = sum(part.double() for part in parts)
    # A scale of the tensor h is found from the rows of a rank, which then are quantised otherwise.
    assert apart(total, whole) < (0.2 if scales.h == "tensor" else 8e-3)
    assert all(part.any() for part in parts)


def test_every_rank_beside_the_reference():
    """What is elsewhere has no weight."""
    ids, weights = route(LOGITS, **vars(SHARED))
    for first, end in RANKS:
        is_here = (ids >= first) & (ids < end)
        routed = torch.where(is_here, ids, 0), weights.masked_fill(~is_here, 0.0)
        mine = run(packed("mxfp8", first, end), expert_range=(first, end))
        expected = reference.layer(X, *unpack(packed("mxfp8")), routed, fmt="mxfp8")
        assert apart(mine, expected) < 5e-3
        alone = ~is_here.any(-1)
        assert not mine[alone].any()


PLAIN = Router(2)
OF_TWO = LOGITS.clone()
OF_TWO[:, 2:] -= 50.0  # only the experts 0 and 1 are chosen


@pytest.mark.parametrize(("fmt", "scales"), [
    ("mxfp8", Scales()), ("nvfp4", Scales("tensor", "tensor")),
    ("nvfp4", Scales(h_amax=torch.zeros(1))),
], ids=["mxfp8", "nvfp4-tensor", "nvfp4"])  # fmt: skip
def test_all_tokens_are_foreign(fmt, scales):
    """Zeros, whatever the rows of nobody hold; the largest |h| is that of nothing."""
    y = run(packed(fmt, 2, 4), OF_TWO, router=PLAIN, scales=scales, expert_range=(2, 4))
    assert not y.any()
    if scales.h_amax is not None:
        assert scales.h_amax.item() == 0.0


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_no_token_is_foreign(fmt):
    """The bits of the whole layer, also where scales are found."""
    whole = run(packed(fmt, 0, 5), OF_TWO, router=PLAIN)
    assert torch.equal(run(packed(fmt, 0, 2), OF_TWO, router=PLAIN, expert_range=(0, 2)), whole)
    assert torch.equal(run(packed(fmt, 0, 5), OF_TWO, router=PLAIN, expert_range=(0, 5)), whole)


def test_one_expert_of_the_layer():
    """A token has at most one row: there is room for no more."""
    whole = run(packed("mxfp8", 0, 5), OF_TWO, router=PLAIN)
    parts = [
        run(packed("mxfp8", e, e + 1), OF_TWO, router=PLAIN, expert_range=(e, e + 1)).double()
        for e in (0, 1)
    ]
    assert apart(parts[0] + parts[1], whole) < 8e-3


def test_a_plan_of_a_rank():
    experts, known = packed("nvfp4", 2, 4), Scales(torch.tensor([500.0]), torch.tensor([300.0]))
    with checked():
        plan = fused_moe_plan(X, experts, LOGITS, SHARED, scales=known, expert_range=(2, 4))
        assert torch.equal(
            plan(), fused_moe(X, experts, LOGITS, SHARED, scales=known, expert_range=(2, 4))
        )


def test_a_warm_up_knows_the_kernels_of_a_rank():
    given = X, packed("mxfp8", 2, 4), LOGITS, SHARED, [TOKENS]
    keys = kernels_for(*given, expert_range=(2, 4), arch="sm_100a")
    partial = {type(key.config).__name__ for key in keys if getattr(key.config, "partial", False)}
    assert partial == {"PermutationConfig", "QuantiseConfig", "CombineConfig"}
