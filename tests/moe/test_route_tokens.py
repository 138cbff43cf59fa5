"""The router with its linear layer in the emulator: values, sizes, layouts, order, refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from kernelkit.call.launch import emulation
from lab.problems.grouped_gemm import CHECKED, checked
from moe import (
    Router,
    RouterLinear,
    arrange,
    combine,
    fused_moe,
    fused_moe_plan,
    pack,
    reference_routing,
    route_tokens,
)
from moe.routing.config import (
    CLUSTER,
    EXPERT_ROWS,
    LINEAR_WARPS,
    MOST_TOKENS,
    STEP_ELEMENTS,
    LinearConfig,
    RouteConfig,
)
from moe.routing.launch import ARCHS, Choices, Slots, empty_permutation, run_route
from moe.routing.linear_launch import ROUTE_TOKENS, TokenChoices, run_route_tokens
from moe.warm import kernels_for
from ptxemu import Options
from tests.moe.routing_cases import Linear, Routing, check_exact, check_normal, logits_of

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

each_arch = pytest.mark.parametrize("arch", ARCHS)

GPT_OSS = Linear(Routing(1, 32, 4, "bf16"), 2880, bias=True)
GROUPED = Routing(5, 256, 8, "bf16", "sigmoid", bias=True, groups=(8, 4), shared=1, scale=2.5)
CASES = [
    GPT_OSS,
    Linear(Routing(5, 8, 2, "fp16", renormalize=False), 64, ready=False),
    Linear(GROUPED, 512, bias=True, hostile=True),
]
MORE = [
    Linear(Routing(5, 32, 4, "bf16", logit_bias=True), 2880, bias=True, ready=False, hostile=True),
    Linear(Routing(2, 128, 8, "bf16", renormalize=False), 2048),
    Linear(Routing(1, 1, 1, "bf16"), 8),
    Linear(Routing(3, 2, 2, "fp16", "sigmoid", logit_bias=True), 72, bias=True),
    Linear(Routing(4, 17, 3, "bf16", "sqrtsoftplus", bias=True), 1000, bias=True, hostile=True),
    Linear(Routing(9, 60, 6, "bf16", groups=(20, 3), bias=True), 264),
    Linear(Routing(3, 384, 8, "fp16", "sigmoid", bias=True, scale=2.5), 1024, bias=True),
    Linear(Routing(2, 510, 9, "bf16", groups=(17, 4), logit_bias=True, bias=True), 136, bias=True),
    Linear(Routing(2, 512, 16, "bf16", bias=True, logit_bias=True), 320, bias=True, ready=False),
]
LARGE = [
    Linear(Routing(5, 256, 8, "bf16", "sigmoid", bias=True, groups=(8, 4), scale=2.5), 7168),
    Linear(Routing(1, 512, 8, "bf16"), 7168, bias=True),
]
NORMAL = [
    Linear(Routing(5, 32, 4, "bf16"), 2880, bias=True),
    Linear(Routing(5, 256, 8, "bf16"), 7168),
]


@each_arch
@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact(case, arch):
    check_exact(case, arch)


@each_arch
@pytest.mark.parametrize("case", MORE, ids=str)
def test_exact_more(case, arch):
    check_exact(case, arch)


@each_arch
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_exact_large(case, arch):
    check_exact(case, arch)


@each_arch
@pytest.mark.parametrize("case", NORMAL, ids=str)
def test_normal(case, arch):
    check_normal(case, arch)


ORDERED = [
    Linear(Routing(1, 32, 4, "bf16"), 64, bias=True),
    Linear(Routing(1, 130, 4, "bf16"), 64),
    Linear(Routing(1, 384, 12, "bf16", "sigmoid", shared=3, scale=2.5), 136),
    Linear(Routing(1, 1, 1, "bf16"), 8),
]


@each_arch
@pytest.mark.parametrize("part", [(0, 1), (0, 0.4), (0.3, 0.8), (0.6, 1), None], ids=str)
@pytest.mark.parametrize("case", ORDERED, ids=str)
def test_the_launch_that_routes_one_token_sorts_its_slots(case, part, arch):
    """All experts have rows, or only a range; tables are those of `permutation`."""
    x, layer = case.exact(1)
    route, total = case.router(), case.route.experts + case.route.shared
    first, end = (0, total) if part is None else (int(part[0] * total), -int(-part[1] * total))
    slots = Slots(torch.zeros(1, route.slots).int(), total, first, end)
    logits = logits_of(x, layer).to(x.dtype)
    choices = Choices(logits=logits, **vars(route), arch=arch)
    for run, asked in (run_route_tokens, TokenChoices(x, layer, route, arch=arch)), (
        run_route, choices):  # fmt: skip
        tables = empty_permutation(slots)
        with checked():
            ids, _ = run(asked, (*tables, None if part is None else first))
        local = torch.where((ids >= first) & (ids < end), ids - first, end - first).flatten()
        counts = torch.bincount(local, minlength=end - first + 1)[: end - first]
        assert tables[0].tolist() == [0, *counts.cumsum(0).tolist()]
        rows = local.argsort(stable=True)[: int(counts.sum())]
        assert tables[1].tolist()[: len(rows)] == rows.tolist()
        wanted = torch.full((route.slots,), -1)
        wanted[rows] = torch.arange(len(rows))
        assert tables[2].tolist() == wanted.tolist()


@pytest.mark.parametrize("tokens", [8, 11, 17])
def test_bits_do_not_depend_on_other_tokens(tokens):
    """Bits depend neither on other tokens nor on the token's place."""
    case = Linear(Routing(tokens, 32, 4, "bf16"), 2880, bias=True)
    x, layer = case.normal(tokens)
    with checked():
        ids, weights = route_tokens(x, layer, case.router())
        for token in (0, tokens - 1):
            one_id, one_weight = route_tokens(x[token : token + 1], layer, case.router())
            assert torch.equal(one_id[0], ids[token])
            assert torch.equal(one_weight[0], weights[token])


@pytest.mark.parametrize("seed", range(2))
def test_an_adversarial_schedule_does_not_show(seed):
    x, layer = CASES[2].normal(5)
    with checked():
        wanted = route_tokens(x, layer, CASES[2].router())
    with checked(Options(policy="adversarial", seed=seed, limit=None)):
        found = route_tokens(x, layer, CASES[2].router())
    assert all(map(torch.equal, found, wanted))


def behind_a_launch(ready: bool, *, writes: str) -> tuple[list, list]:
    """Return (findings of the checker, ids) if the previous launch writes x, or the weight."""
    case = replace(GPT_OSS, hidden=64, ready=ready)
    x, layer = case.exact(3)
    source = x if writes == "x" else layer.weight
    slots = torch.arange(len(source)).int()[:, None]
    with emulation(CHECKED) as active:
        written = combine(source.nan_to_num().contiguous(), torch.ones(len(source), 1), slots)
        if writes == "x":
            x = written
        else:
            layer = replace(layer, weight=written)
        ids, _ = route_tokens(x, layer, case.router())
    expected, _ = reference_routing.route(logits_of(x, layer).to(x.dtype), 4)
    assert torch.equal(ids, expected)
    return active.reports[-1].findings, ids.tolist()


def test_the_launch_in_front_may_write_what_is_not_ready():
    assert not behind_a_launch(True, writes="x")[0]
    assert not behind_a_launch(False, writes="weight")[0]
    assert "griddepcontrol" in str(behind_a_launch(True, writes="weight")[0][0])


def test_what_is_behind_may_begin_early():
    """The next launch's results are those of a launch that waits for this one."""
    x, layer = GPT_OSS.exact(5)
    with checked():
        _, weights = route_tokens(x, layer, GPT_OSS.router())
        y = torch.randn(5 * 4, 64).bfloat16()
        found = combine(y, weights, torch.arange(20).int())
    assert torch.equal(found, reference_routing.combine(
        y, weights, torch.arange(20).int()).bfloat16())  # fmt: skip


SIZES = st.tuples(st.integers(1, 512), st.integers(1, 900).map(lambda n: 8 * n))


@given(SIZES)
def test_warps_have_every_expert_and_all_of_h_once(sizes):
    experts, hidden = sizes
    found = LinearConfig(RouteConfig(experts, 1, "bf16", "softmax", False, 1, 1, True), hidden)
    found.check()
    ways = LINEAR_WARPS // (found.shares // found.cluster)
    assert ways == found.expert_ways
    first = [EXPERT_ROWS * (way + ways * block) for way in range(ways)
             for block in range(found.blocks)]  # fmt: skip
    assert sorted(first) == list(range(0, EXPERT_ROWS * ways * found.blocks, EXPERT_ROWS))
    assert len(first) * EXPERT_ROWS >= experts
    assert found.shares * found.steps * STEP_ELEMENTS >= hidden
    assert found.shares * (found.steps - 1) * STEP_ELEMENTS < hidden
    assert 1 <= found.in_flight <= found.steps


@pytest.mark.parametrize(("tokens", "experts"), [(64, 8), (65, 8), (16, 256), (17, 256)])
def test_many_tokens_have_torchs_linear_layer_in_front(tokens, experts, monkeypatch):
    seen = []
    monkeypatch.setattr("moe.routing.linear_launch.compile_once", lambda *a: seen.append(a[2]))
    monkeypatch.setattr("moe.routing.launch.compile_once", lambda *a: seen.append(a[2]))
    for module in ("linear_launch", "launch"):
        monkeypatch.setattr(f"moe.routing.{module}.launch", lambda *_: None)
    x, weight = (torch.zeros(rows, 2048).bfloat16() for rows in (tokens, experts))
    ids, _ = route_tokens(x, RouterLinear(weight), Router(2))
    assert ids.shape == (tokens, 2)
    assert seen == ["moe.routing." + ("topk_kernel" if tokens % 16 else "linear_kernel")]


def test_many_tokens_give_what_few_give():
    """Sums are exact."""
    case = replace(CASES[1], route=replace(CASES[1].route, tokens=67))
    check_exact(case)


@pytest.mark.parametrize(("before", "vectors"), [(0, True), (8, True), (4, False)])
def test_only_aligned_biases_are_read_in_vectors(before, vectors, monkeypatch):
    seen = []
    monkeypatch.setattr("moe.routing.linear_launch.compile_once", lambda c, *_: seen.append(c))
    monkeypatch.setattr("moe.routing.linear_launch.launch", lambda *_: None)
    bias = torch.zeros(256 + 8).bfloat16()[before : before + 256]
    layer = RouterLinear(torch.zeros(256, 64).bfloat16(), bias, ready=True)
    route_tokens(torch.zeros(2, 64).bfloat16(), layer, Router(2))
    assert [(found.route.vectors, found.ready) for found in seen] == [(vectors, True)]


def test_no_tokens_launch_nothing(no_compile):
    ids, weights = route_tokens(X[:0], LAYER, Router(2, shared=1))
    assert (ids.shape, weights.shape) == ((0, 3), (0, 3))


def test_tracers_see_shapes():
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids, weights = route_tokens(torch.empty(5, 64).bfloat16(), LAYER, Router(2, shared=1))
    assert (ids.shape, ids.dtype) == ((5, 3), torch.int32)
    assert (weights.shape, weights.dtype) == ((5, 3), torch.float32)


def test_opcheck():
    x, layer = CASES[1].exact(3)
    fields = {"x": x.contiguous(), "linear": layer, "router": CASES[1].router()}
    flat = ROUTE_TOKENS.schema.flat(fields)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(ROUTE_TOKENS.default, (), flat, test_utils=tests)


# --- in a layer

EXACT = Linear(Routing(3, 3, 2, "bf16", logit_bias=True), 128, bias=True)


def experts() -> tuple:
    """Packed experts of a layer: three."""
    draw = torch.Generator().manual_seed(2)
    shapes = (3, 128, 128), (3, 128, 64)
    w13, w2 = (torch.randn(shape, generator=draw).bfloat16() * 0.1 for shape in shapes)
    return pack(w13, w2, "mxfp4")


@pytest.mark.parametrize("arranged", [False, True])
def test_a_layer_from_tokens_gives_the_bits_of_one_from_logits(arranged):
    x, layer = EXACT.exact(3)
    x = x.contiguous()
    packed, x_type, arch = experts(), "mxfp4", "sm_100a"
    if arranged:
        packed, x_type, arch = arrange(packed), "bf16", "sm_90a"
    given = {"activations": x_type, "arch": arch}
    logits = logits_of(x, layer).to(x.dtype)
    with checked() as active:
        wanted = fused_moe(x, packed, logits, EXACT.router(), **given)
        steps = len(active.reports)
        found = fused_moe(x, packed, layer, EXACT.router(), **given)
        assert len(active.reports) == 2 * steps
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("most", [3, 2])
def test_a_planned_layer(most, monkeypatch):
    """The plan has one launch from tokens to experts, or torch's linear layer first."""
    monkeypatch.setitem(MOST_TOKENS, CLUSTER, most)
    x, layer = EXACT.exact(3)
    given = x, experts(), layer, EXACT.router()
    with checked():
        plan = fused_moe_plan(*given, activations="mxfp4")
        first = plan.result.clone()
        assert torch.equal(first, fused_moe(*given, activations="mxfp4"))
        x.neg_()
        assert torch.equal(plan(), fused_moe(*given, activations="mxfp4"))
    assert not torch.equal(first, plan.result)


@pytest.mark.parametrize("tokens", [1, 64, 65])
def test_a_warm_up_knows_the_kernels_of_a_call(tokens):
    x, layer = EXACT.exact(3)
    given = x, experts(), layer, EXACT.router()
    needed, known = (
        kernels_for(*given, counts, activations="mxfp4", arch="sm_100a")
        for counts in ([tokens], range(1, 100))
    )
    assert set(needed) <= set(known)
    linear = [key for key in needed if key.source == "moe.routing.linear_kernel"]
    assert len(linear) == (tokens <= 64)


# --- refusals

X, WEIGHT = torch.zeros(5, 64).bfloat16(), torch.zeros(8, 64).bfloat16()
LAYER = RouterLinear(WEIGHT)
BROAD = torch.zeros(8, 1).bfloat16().expand(8, 64)
REFUSED = [
    ({"x": X.float()}, NotImplementedError, "x is torch.float32: bfloat16 or float16"),
    ({"x": X[0]}, ValueError, "x has shape"),
    ({"x": [1.0]}, TypeError, "x is list"),
    ({"x": X.half()}, ValueError, "linear.weight is torch.bfloat16"),
    ({"x": X[:, :56]}, ValueError, r"linear.weight is torch.bfloat16 \(8, 64\).*\(any, 56\)"),
    ({"x": torch.zeros(5, 65).bfloat16()[:, 1:]}, ValueError, "x starts at address|x has a stride"),
    ({"x": torch.zeros(5, 68).bfloat16()[:, :64]}, ValueError, "x has a stride of 136 bytes"),
    ({"x": X[:, :60].contiguous(), "linear": RouterLinear(WEIGHT[:, :60].contiguous())},
     NotImplementedError, "hidden size 60: a multiple of 8, at least 8"),
    ({"x": X[:, :0], "linear": RouterLinear(WEIGHT[:, :0])}, NotImplementedError, "hidden size 0"),
    ({"linear": WEIGHT}, TypeError, "linear is Tensor, expected RouterLinear"),
    ({"linear": RouterLinear(None)}, TypeError, "linear.weight"),
    ({"linear": RouterLinear(BROAD)}, ValueError, "linear.weight has"),
    ({"linear": RouterLinear(torch.zeros(513, 64).bfloat16())}, NotImplementedError, "513 experts"),
    ({"linear": RouterLinear(WEIGHT, torch.zeros(8))}, ValueError, "linear.bias is torch.float32"),
    ({"linear": RouterLinear(WEIGHT, torch.zeros(7).bfloat16())}, ValueError, "linear.bias is"),
    ({"linear": RouterLinear(WEIGHT, ready=1.0)}, TypeError, "linear.ready is 1.0"),
    ({"router": Router(9)}, ValueError, "top_k 9 of 1 groups with 8 experts"),
    ({"router": Router(2, bias=torch.zeros(7))}, ValueError, "bias is torch.float32"),
    ({"router": Router(2, logit_bias=torch.zeros(8).bfloat16())}, ValueError, "logit_bias is"),
    ({"router": Router(2, scale=math.inf)}, ValueError, "scale inf"),
    ({"router": 2}, TypeError, "router is int"),
    ({"arch": "sm_80"}, NotImplementedError, "arch 'sm_80'"),
    ({"backend": "cuda"}, ValueError, "needs CUDA tensors"),
    ({"x": X.clone().requires_grad_()}, NotImplementedError, "x requires grad"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED, ids=[row[2] for row in REFUSED])
def test_route_tokens_refuses(no_compile, changes, error, words):
    with pytest.raises(error, match=words):
        route_tokens(**{"x": X, "linear": LAYER, "router": Router(2)} | changes)


@pytest.mark.parametrize(("layer", "error", "words"), [
    (RouterLinear(torch.zeros(4, 128).bfloat16()), ValueError,
     r"x \(3, 128\) and linear.weight \(4, 128\), expected \[T, 128\] and \[3, 128\]"),
    (RouterLinear(torch.zeros(3, 64).bfloat16()), ValueError, r"linear.weight \(3, 64\)"),
    (RouterLinear(torch.zeros(3).bfloat16()), ValueError, "linear.weight has shape"),
    (None, TypeError, "router_logits is NoneType"),
    (RouterLinear(None), TypeError, "router_logits is NoneType"),
])  # fmt: skip
def test_a_layer_refuses(no_compile, layer, error, words):
    with pytest.raises(error, match=words):
        fused_moe(torch.zeros(3, 128).bfloat16(), experts(), layer, Router(2), activations="mxfp4")


def test_a_plan_refuses_a_bias_that_it_would_copy(no_compile):
    bias = torch.zeros(1).bfloat16().expand(3)
    layer = RouterLinear(torch.zeros(3, 128).bfloat16(), bias)
    x = torch.zeros(3, 128).bfloat16()
    with pytest.raises(ValueError, match=r"linear\.bias has strides"):
        fused_moe_plan(x, experts(), layer, Router(2), activations="mxfp4")
