"""Whole layers of arranged experts in the emulator: five launches, compared with the definition in
fp64.

Beyond the weights' own error they add that of bf16: for h, the rows of the second product and y.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._pytree import tree_map_only

from kernelkit.call.launch import watching
from lab.problems.grouped_gemm import CHECKED, PATIENCE, checked
from moe import (
    ExpertWeights,
    Router,
    Scales,
    SwiGLU,
    arrange,
    combine,
    fused_moe,
    fused_moe_plan,
    mixed_gemm,
    pack,
    permutation,
    reference,
    unpack,
    unpack_biases,
)
from moe.mixed.fragments import ArrangedExperts
from moe.mixed.layer import FUSED_MIXED, MixedLayer, run_layer
from moe.packing import PackedExperts
from moe.reference_routing import route
from moe.warm import kernels_for
from ptxemu import Options
from tests.support.attentions import Watched

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS = 7, 160, 96, 5
GPT_OSS = SwiGLU(1.702, 1.0, 7.0)
PLAIN = Router(2)
SHARED = Router(2, "sigmoid", scale=2.5, shared=1)
RANKS = ((0, 2), (2, 3), (3, 6))  # the last one also has the shared expert
ROUNDING = 4e-3  # of bf16, three times
IN_STEPS = {"few_rows": False}  # not in the one launch of so few rows, see test_few.py

pytestmark = pytest.mark.usefixtures("poisoned_outputs", "two_ctas")
BOTH = pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


X = normal(TOKENS, HIDDEN).bfloat16()
LOGITS = normal(TOKENS, EXPERTS)
OF_TWO = LOGITS.clone()
OF_TWO[:, 2:] -= 50.0  # only the experts 0 and 1 are chosen
W13 = normal(EXPERTS + 1, 2 * INTERMEDIATE, HIDDEN) * 4 * HIDDEN**-0.5  # beyond the limit
W2 = normal(EXPERTS + 1, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5
BIASES = normal(EXPERTS + 1, 2 * INTERMEDIATE), normal(EXPERTS + 1, HIDDEN)


def packed(fmt: str = "mxfp4", first: int = 0, end: int = EXPERTS) -> PackedExperts:
    biases = tuple(bias[first:end] for bias in BIASES)
    return pack(W13[first:end], W2[first:end], fmt, biases=biases)


def steps(ids: torch.Tensor, weights: torch.Tensor, arch: str) -> torch.Tensor:
    """Call a layer step by step, like an engine with its own routing."""
    where, experts = {"arch": arch}, arrange(packed())
    with checked():
        order = permutation(ids, EXPERTS, **where)
        h = mixed_gemm(
            X, experts.w13, order.offsets, bias=experts.bias13, activation=GPT_OSS,
            rows=order.slot_of_row, slots=ids.shape[1], **where,
        )  # fmt: skip
        y = mixed_gemm(h, experts.w2, order.offsets, bias=experts.bias2, **where)
        return combine(y, weights, order.row_of_slot, **where)


@BOTH
def test_an_id_of_minus_one_is_no_expert(arch):
    """Such an id adds nothing, whatever its weight; other tokens keep their bits."""
    ids, weights = route(LOGITS, 2)
    whole = steps(ids, weights, arch)
    padded, shares = ids.clone(), weights.clone()
    padded[2], padded[4, 1], padded[TOKENS - 1] = -1, -1, -1
    shares[padded < 0] = torch.nan
    mine = steps(padded, shares, arch)
    own = torch.tensor([0, 1, 3, 5])
    assert torch.equal(mine[own], whole[own])
    assert not mine[[2, TOKENS - 1]].any()
    alone = steps(ids[:, :1].contiguous(), weights[:, :1].contiguous(), arch)
    torch.testing.assert_close(mine[4], alone[4])


def run(
    experts: ArrangedExperts,
    logits: torch.Tensor = LOGITS,
    router: Router = PLAIN,
    schedule: Options = CHECKED,
    arch: str = "sm_90a",
    **options,
) -> torch.Tensor:
    given = {"activation": GPT_OSS, "arch": arch} | IN_STEPS | options
    with checked(schedule):
        return fused_moe(X, experts, logits, router, **given)


def definition(experts: PackedExperts, routed: tuple, **form) -> torch.Tensor:
    form = vars(GPT_OSS) | form
    return reference.layer(X, *unpack(experts), routed, biases=unpack_biases(experts), **form)


def apart(mine: torch.Tensor, other: torch.Tensor) -> float:
    """Relative difference in the norm."""
    return ((mine.double() - other.double()).norm() / other.double().norm()).item()


@BOTH
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_the_form_of_gpt_oss_beside_the_reference(fmt, arch):
    experts, routed = packed(fmt), route(LOGITS, **vars(PLAIN))
    y = run(arrange(experts), arch=arch)
    assert apart(y, definition(experts, routed)) < ROUNDING
    for other in ({"alpha": 1.0}, {"beta": 0.0}, {"limit": None}):
        assert apart(y, definition(experts, routed, **other)) > 5 * ROUNDING


def launches_of(tokens: int) -> list[str]:
    """Names of the kernels of a layer on Hopper."""
    seen = []
    with watching(lambda prepared, _: seen.append(prepared)), checked(CHECKED):
        x, logits = (
            X[:1].expand(tokens, -1).contiguous(),
            LOGITS[:1].expand(tokens, -1).contiguous(),
        )
        given = {"activation": GPT_OSS, "arch": "sm_90a"} | IN_STEPS
        fused_moe(x, arrange(packed()), logits, PLAIN, **given)
    return seen


def test_five_launches():
    """There are five while no expert has more rows than a tile. Above, rows are sorted first, and
    both products have two launches."""
    assert len(launches_of(8)) == 5
    assert len(launches_of(9)) == 5 + 3


def test_the_host_never_waits_nor_computes(launches):
    """This includes a rank, whose number of rows is known only on the GPU."""
    there = partial(torch.empty_like, device="cuda")
    for rank in ({}, {"first_expert": 1, "end_expert": 6}):
        logits = torch.empty(700, EXPERTS + 3 * bool(rank))
        layer = MixedLayer(X.repeat(100, 1), logits, arrange(packed()), PLAIN, GPT_OSS, **rank)
        flat = FUSED_MIXED.schema.flat(vars(layer))
        with FakeTensorMode(allow_non_fake_inputs=True):
            given = FUSED_MIXED.schema.build(tree_map_only(torch.Tensor, there, flat))
            with Watched() as watched:
                (y,) = run_layer(given)
        assert not watched.waits
        assert all("empty" in name for name in watched.made)
        assert (y.shape, y.dtype) == ((700, HIDDEN), torch.bfloat16)
    assert len(launches) == 2 * 6


@BOTH
@pytest.mark.parametrize("seed", [0, 1])
def test_an_adversarial_schedule_gives_the_same_bits(seed, arch):
    experts = arrange(packed())
    late = Options("adversarial", seed, limit=PATIENCE)
    assert torch.equal(run(experts, schedule=late, arch=arch), run(experts, arch=arch))


@BOTH
@pytest.mark.parametrize("tile_rows", [16, 64])
def test_every_tile_gives_the_same_bits(tile_rows, arch):
    """Blackwell has the bits of Hopper."""
    experts = arrange(packed())
    assert torch.equal(run(experts, tile_rows=tile_rows, arch=arch), run(experts))


def test_shared_experts_beside_the_reference():
    experts = packed(end=EXPERTS + 1)
    ids, weights = route(LOGITS, **vars(SHARED))
    assert ids[:, 2].tolist() == [EXPERTS] * TOKENS
    y = run(arrange(experts), router=SHARED)
    assert apart(y, definition(experts, (ids, weights))) < ROUNDING
    assert apart(y, definition(experts, (ids[:, :2], weights[:, :2]))) > 5 * ROUNDING


@BOTH
def test_every_rank_beside_the_reference(arch):
    """Experts of other ranks have no weight; the sum over ranks is the layer."""
    whole = packed(end=EXPERTS + 1)
    ids, weights = route(LOGITS, **vars(SHARED))
    total = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for first, end in RANKS:
        is_here = (ids >= first) & (ids < end)
        routed = torch.where(is_here, ids, 0), weights.masked_fill(~is_here, 0.0)
        here = {"expert_range": (first, end), "arch": arch}
        mine = run(arrange(packed(first=first, end=end)), router=SHARED, **here)
        assert apart(mine, definition(whole, routed)) < ROUNDING
        assert not mine[~is_here.any(-1)].any()
        total += mine.double()
    assert apart(total, definition(whole, (ids, weights))) < ROUNDING


def test_all_tokens_are_foreign():
    """Results are zeros, whatever unused rows hold."""
    y = run(arrange(packed(first=2, end=4)), OF_TWO, expert_range=(2, 4))
    assert torch.equal(y, torch.zeros_like(y))


def test_no_token_is_foreign():
    """Bits are those of the whole layer."""
    whole = run(arrange(packed()), OF_TWO)
    assert torch.equal(run(arrange(packed(end=2)), OF_TWO, expert_range=(0, 2)), whole)


def test_all_tokens_choose_one_expert():
    """The chosen expert has more rows than a tile, and no other has any."""
    logits = LOGITS.clone()
    logits[:, 3] += 100.0
    experts, router = packed(), Router(1)
    y = run(arrange(experts), logits, router, tile_rows=8)
    assert apart(y, definition(experts, route(logits, **vars(router)))) < ROUNDING


def test_a_module_gives_its_experts():
    """Loaded from a state dict, moved, and arranged, it gives the same bits."""
    experts = packed()
    module = ExpertWeights.empty(
        (EXPERTS, HIDDEN, INTERMEDIATE), experts.fmt, granularity=experts.granularity, biases=True
    )
    module.load_state_dict(copy.deepcopy(ExpertWeights(experts).state_dict()))
    arranged = arrange(module.bfloat16().packed)
    assert torch.equal(run(arranged), run(arrange(experts)))


@BOTH
def test_a_planned_layer_gives_the_bits_of_a_call_whenever_contents_change(arch):
    experts, x, logits = arrange(packed()), X.clone(), LOGITS.clone()
    given = {"activation": GPT_OSS, "arch": arch} | IN_STEPS
    with checked():
        plan = fused_moe_plan(x, experts, logits, PLAIN, **given)
        first = plan.result.clone()
        assert torch.equal(first, run(experts, arch=arch))
        x.mul_(-1.5)
        logits.copy_(logits.flip(1))
        assert plan() is plan.result
        assert torch.equal(plan.result, fused_moe(x, experts, logits, PLAIN, **given))
    assert not torch.equal(first, plan.result)


def test_compiled_code_runs_the_layer():
    experts = arrange(packed())

    def step(x, logits):
        return fused_moe(x * 2, experts, logits, PLAIN, activation=GPT_OSS) + 1

    with checked():
        wanted = step(X, LOGITS)
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(X, LOGITS), wanted)


def test_opcheck_of_the_layer():
    flat = FUSED_MIXED.schema.flat(vars(MixedLayer(X, LOGITS, arrange(packed()), PLAIN, GPT_OSS)))
    tests = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    opcheck(FUSED_MIXED.default, (), flat, test_utils=tests)


@pytest.mark.usefixtures("no_compile")
@pytest.mark.parametrize(("error", "words", "changes"), [
    (NotImplementedError, "x is torch.float16: expected bfloat16 with arranged", {"x": X.half()}),
    (ValueError, r"x \(7, 128\) and router_logits", {"x": X[:, :128]}),
    (ValueError, r"scales with arranged experts", {"scales": Scales(h=torch.ones(1))}),
    (ValueError, r"expert_range \(0, 2\), but 5 are packed", {"expert_range": (0, 2)}),
    (ValueError, r"router_logits \(7, 4\), expected \[T, 160\] and \[T, 5\]", {
        "router_logits": LOGITS[:, :4]}),
    (TypeError, "activation is", {"activation": 1.0}),
])  # fmt: skip
def test_refused(error, words, changes):
    given = {"x": X, "router_logits": LOGITS, "router": PLAIN, "experts": arrange(packed())}
    with pytest.raises(error, match=words):
        fused_moe(**given | changes)


@pytest.mark.usefixtures("no_compile")
def test_a_b300_runs_what_is_written_for_a_b200():
    given = X, arrange(packed()), LOGITS, PLAIN, [1, TOKENS, 500]
    found = ([*kernels_for(*given, arch=arch)] for arch in ("sm_100a", "sm_103a"))
    b200, b300 = ([(key.source, key.config) for key in keys] for keys in found)
    assert b200 == b300


@pytest.mark.usefixtures("no_compile")
def test_no_tokens():
    y = fused_moe(X[:0], arrange(packed()), LOGITS[:0], PLAIN, activation=GPT_OSS)
    assert y.shape == (0, HIDDEN)
