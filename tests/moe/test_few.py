"""The launch that computes both products and the sum of a layer with few rows, in the emulator,
compared with the definition in fp64.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass.cute as cute
import pytest
import torch

from kernelkit.call.launch import watching
from lab.problems.grouped_gemm import CHECKED, PATIENCE, checked
from moe import (
    Chosen,
    Router,
    RouterLinear,
    SwiGLU,
    arrange,
    fused_moe,
    fused_moe_plan,
    pack,
    reference,
    unpack,
    unpack_biases,
)
from moe.mixed.few import limits
from moe.mixed.few.config import FewConfig, warps_for
from moe.mixed.few.launch import FewArguments
from moe.mixed.few.load import Weights
from moe.mixed.few.plan import make_plan
from moe.packing import PackedExperts
from moe.reference_routing import route
from ptxemu import Options

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS = 7, 160, 96, 5
GPT_OSS = SwiGLU(1.702, 1.0, 7.0)
ROUTER = Router(2)
ROUNDING = 4e-3  # of bf16, of h and of the result
CTAS, FORM = 3, {"warps": 4}  # fields of every config

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


X, LOGITS = normal(40, HIDDEN).bfloat16(), normal(40, EXPERTS)
W13 = normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN) * 4 * HIDDEN**-0.5  # beyond the limit
W2 = normal(EXPERTS, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5
BIASES = normal(EXPERTS, 2 * INTERMEDIATE), normal(EXPERTS, HIDDEN)


@pytest.fixture(autouse=True)
def small(monkeypatch, poisoned_outputs):
    """Launch few CTAs with few warps: each has several chunks, of several experts."""
    plain = FewArguments.config.fget
    monkeypatch.setattr("moe.mixed.few.launch.sms_of", lambda device: CTAS)
    monkeypatch.setattr(FewArguments, "config", property(lambda self: replace(plain(self), **FORM)))


def packed(fmt: str = "mxfp4", first: int = 0, end: int = EXPERTS, **given) -> PackedExperts:
    biases = tuple(bias[first:end] for bias in BIASES)
    return pack(W13[first:end], W2[first:end], fmt, **{"biases": biases} | given)


def run(
    experts: PackedExperts, tokens: int = TOKENS, logits=LOGITS, schedule=CHECKED, **options
) -> torch.Tensor:
    given = {"activation": GPT_OSS, "arch": "sm_90a", "few_rows": True} | options
    router = ROUTER if isinstance(logits, torch.Tensor) else None
    chosen = logits[:tokens] if router else logits
    with checked(schedule):
        return fused_moe(X[:tokens], arrange(experts), chosen, router, **given)


def definition(experts: PackedExperts, routed: tuple, **form) -> torch.Tensor:
    form = vars(GPT_OSS) | form
    tokens = X[: len(routed[0])]
    return reference.layer(tokens, *unpack(experts), routed, biases=unpack_biases(experts), **form)


def apart(mine: torch.Tensor, other: torch.Tensor) -> float:
    """Relative difference in the norm."""
    return ((mine.double() - other.double()).norm() / other.double().norm()).item()


@pytest.mark.parametrize(("fmt", "arch"), [("mxfp4", "sm_90a"), ("nvfp4", "sm_100a")])
def test_beside_the_definition(fmt, arch):
    experts, routed = packed(fmt), route(LOGITS[:TOKENS], 2)
    y = run(experts, arch=arch)
    assert apart(y, definition(experts, routed)) < ROUNDING
    for other in ({"alpha": 1.0}, {"beta": 0.0}, {"limit": None}):
        assert apart(y, definition(experts, routed, **other)) > 5 * ROUNDING


def test_without_biases_and_limit():
    """K of both products is whole units, as for gpt-oss."""
    w13, w2, x = normal(3, 2 * 64, 128) * 0.1, normal(3, 128, 64) * 0.1, normal(5, 128).bfloat16()
    experts, logits = pack(w13, w2, "mxfp4"), normal(5, 3)
    with checked():
        y = fused_moe(x, arrange(experts), logits, ROUTER, arch="sm_90a", few_rows=True)
    wanted = reference.layer(x, *unpack(experts), route(logits, 2))
    assert apart(y, wanted) < ROUNDING


@pytest.mark.parametrize("slots", [1, 2])
def test_choices_in_wider_tables(slots):
    ids, weights = (table[:TOKENS] for table in route(LOGITS, 3))
    views = ids[:, :slots], weights[:, :slots]
    found, wanted = (
        run(packed(), logits=Chosen(*given))
        for given in (views, [view.contiguous() for view in views])
    )
    assert torch.equal(found, wanted)


def test_experts_with_more_rows_than_an_item():
    """Forty tokens choose among two experts, whose weights are read five times."""
    logits = LOGITS.clone()
    logits[:, 2:] -= 50.0
    experts = packed()
    assert apart(run(experts, 40, logits), definition(experts, route(logits, 2))) < ROUNDING


def test_a_token_alone_has_the_same_bits():
    experts = packed()
    whole = run(experts, 9)
    with checked():
        for token in (0, 4, 8):
            row = slice(token, token + 1)
            given = X[row], arrange(experts), LOGITS[row], ROUTER
            mine = fused_moe(*given, activation=GPT_OSS, arch="sm_90a", few_rows=True)
            assert torch.equal(mine, whole[row])


@pytest.mark.parametrize("seed", [0, 1])
def test_an_adversarial_schedule_gives_the_same_bits(seed):
    experts, late = packed(), Options("adversarial", seed, limit=PATIENCE, check=True)
    assert torch.equal(run(experts, schedule=late), run(experts))


@pytest.mark.parametrize("seed", [0, 2])
def test_all_ctas_find_the_same_rows_in_an_item(seed):
    """Experts have several items, and the slots of several warps."""
    logits = LOGITS.clone()
    logits[:, 2:] -= 50.0
    experts, late = packed(), Options("adversarial", seed, limit=PATIENCE)
    assert torch.equal(run(experts, 40, logits, late), run(experts, 40, logits))


@pytest.mark.parametrize(("ctas", "granule"), [(1, 4), (2, 4), (11, 4), (5, 1), (5, 2)])
def test_any_shares_give_the_same_bits(ctas, granule, monkeypatch):
    experts = packed()
    wanted = run(experts)
    monkeypatch.setitem(FORM, "granule", granule)
    monkeypatch.setattr("moe.mixed.few.launch.sms_of", lambda device: ctas)
    assert torch.equal(run(experts), wanted)


def test_an_arrival_that_may_overtake_announced_bytes_is_reported(monkeypatch):
    """An H200 gave other bits when cp.async arrived for bulk copies."""
    plain, arch = Weights.fetch, cute.arch

    def announce(barrier, size):
        arch.mbarrier_expect_tx(barrier, size)
        arch.cp_async_mbarrier_arrive_noinc(barrier)

    def fetch(self, *given):
        with monkeypatch.context() as late:
            late.setattr(arch, "mbarrier_arrive_and_expect_tx", announce)
            plain(self, *given)

    monkeypatch.setattr(Weights, "fetch", fetch)
    monkeypatch.setitem(FORM, "stages", 2)  # a config that no other test compiles
    with pytest.raises(AssertionError, match=r"may complete before .* announces \d+ bytes"):
        run(packed())


def test_an_id_of_minus_one_is_no_expert():
    """Such an id adds nothing, whatever its weight; tokens without any are zeros."""
    ids, weights = route(LOGITS[:TOKENS], 2)
    wanted = definition(packed(), (ids, weights.masked_fill(torch.arange(2) == 1, 0.0)))
    ids, weights = ids.clone(), weights.clone()
    ids[:, 1], weights[:, 1] = -1, torch.nan
    assert apart(run(packed(), logits=Chosen(ids, weights)), wanted) < ROUNDING
    ids[:] = -1
    y = run(packed(), logits=Chosen(ids, weights))
    assert torch.equal(y, torch.zeros_like(y))


def test_ranks_add_up_to_the_layer():
    routed, total = route(LOGITS[:TOKENS], 2), torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for first, end in ((0, 2), (2, 5)):
        total += run(packed(first=first, end=end), expert_range=(first, end)).double()
    assert apart(total, definition(packed(), routed)) < ROUNDING


def test_a_plan_can_be_repeated():
    """The router's launch sets the counts to zero."""
    experts, x, logits = arrange(packed()), X[:TOKENS].clone(), LOGITS[:TOKENS].clone()
    given = {"activation": GPT_OSS, "arch": "sm_90a", "few_rows": True}
    with checked():
        plan = fused_moe_plan(x, experts, logits, ROUTER, **given)
        for _ in range(2):
            x.mul_(-1.5)
            logits.copy_(logits.flip(1))
            plan()
            assert torch.equal(plan.result, fused_moe(x, experts, logits, ROUTER, **given))


def test_two_launches_if_the_router_is_a_linear_layer():
    weight, seen = normal(EXPERTS, HIDDEN).bfloat16(), []
    with watching(lambda prepared, _: seen.append(prepared)), checked():
        y = fused_moe(
            X[:TOKENS], arrange(packed()), RouterLinear(weight), ROUTER, activation=GPT_OSS,
            arch="sm_90a", few_rows=True,
        )  # fmt: skip
    assert len(seen) == 2
    routed = route(torch.nn.functional.linear(X[:TOKENS], weight), 2)
    assert apart(y, definition(packed(), routed)) < 2 * ROUNDING


@pytest.mark.usefixtures("no_compile")
@pytest.mark.parametrize(("error", "words", "changes"), [
    (NotImplementedError, "129 tokens of 2 slots are 258 rows, at most 256", {
        "x": X[:1].expand(129, -1), "router_logits": LOGITS[:1].expand(129, -1)}),
    (NotImplementedError, "arranged for 'e4m3', supported is 'bf16'", {
        "experts": arrange(packed(), "e4m3")}),
    (NotImplementedError, r"few_rows True with packed experts: pass moe.arrange", {
        "experts": packed(), "activations": "mxfp4"}),
    (ValueError, "few_rows True with tile_rows 8", {"tile_rows": 8}),
])  # fmt: skip
def test_refused(error, words, changes):
    given = {"x": X, "router_logits": LOGITS, "experts": arrange(packed()), "router": ROUTER}
    given |= {"activation": GPT_OSS, "arch": "sm_90a", "few_rows": True}
    with pytest.raises(error, match=words):
        fused_moe(**given | changes)


def test_many_experts_are_refused():
    limits.require(64, 4, 512, "bf16")
    with pytest.raises(NotImplementedError, match="513 experts, at most 512"):
        limits.require(64, 4, 513, "bf16")


def test_plans():
    """Rings of every format fit beside the sums of all warps. Those idle as little as possible."""
    assert [warps_for(*k) for k in ((2880, 2880), (7168, 2048), (4096, 1536))] == [15, 16, 13]
    for fmt in ("mxfp4", "nvfp4"):
        make_plan(FewConfig(fmt))
    with pytest.raises(ValueError, match="bytes of shared memory"):
        make_plan(FewConfig(stages=4))
    with pytest.raises(NotImplementedError, match="warps 17: one of"):
        make_plan(FewConfig(warps=17))


@pytest.mark.parametrize(
    ("tokens", "slots", "experts", "total", "x", "chosen"),
    [(1, 4, 128, 128, "bf16", True), (64, 4, 128, 128, "bf16", True),
     (32, 4, 32, 32, "bf16", True), (33, 4, 32, 32, "bf16", False),
     (16, 4, 8, 32, "bf16", True), (65, 4, 128, 128, "bf16", False),
     (1, 4, 128, 128, "e4m3", False), (1, 4, 513, 513, "bf16", False)],
)  # fmt: skip
def test_what_is_chosen_by_sizes(tokens, slots, experts, total, x, chosen):
    assert limits.pays(tokens, slots, experts, x, total) == chosen
