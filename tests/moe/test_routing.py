"""The router, the permutation and the combination in the emulator, to the bit."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from kernelkit.call.launch import emulation
from kernelkit.compile.compiler import compile_once
from moe import reference_routing
from moe import reference_routing as reference
from moe.routing import combine, config, permutation, route
from moe.routing.config import CombineConfig, combine_columns
from moe.routing.launch import ARCHS
from ptxemu import Options
from tests.moe.routing_cases import (
    DTYPES,
    Routing,
    Sum,
    build,
    check_combine,
    check_permutation,
    check_route,
    emulated,
    one_by_one,
)

# ---- The router and the permutation in the emulator: values, ties, sizes, layouts, refusals

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

each_arch = pytest.mark.parametrize("arch", ARCHS)

CASES = [
    Routing(1, 1, 1, hostile=False),
    Routing(2, 2, 2, "bf16", "sigmoid", renormalize=False),
    Routing(129, 8, 2, "bf16"),
    Routing(30, 257, 5, "fp16", bias=True, scale=2.5),
    Routing(33, 384, 8, "bf16", "sigmoid", bias=True, scale=2.5),
    Routing(40, 256, 8, "fp32", "sigmoid", bias=True, groups=(8, 4), scale=2.5),
    Routing(30, 512, 16, "bf16", groups=(4, 3), renormalize=False),
    Routing(20, 256, 8, "fp32", "sigmoid", bias=True, groups=(8, 4), aligned=True),
    Routing(21, 128, 4, "bf16", aligned=True),
    Routing(33, 384, 6, "fp32", "sqrtsoftplus", bias=True, scale=2.5),
    Routing(21, 32, 4, "bf16", logit_bias=True, aligned=True),  # gpt-oss-20b
    Routing(20, 256, 8, "fp32", "sigmoid", bias=True, groups=(8, 4), shared=1, scale=2.5),
]
MATRIX = [
    *(Routing(33, 384, top_k, "bf16", bias=True, aligned=True) for top_k in (1, 4, 5, 16)),
    Routing(30, 96, 6, "fp32", groups=(3, 2), bias=True, aligned=True),
    Routing(20, 510, 9, scoring="sigmoid", groups=(17, 4)),
    *(Routing(127, experts, 1, seed=experts) for experts in (2, 8, 31, 32, 33, 64, 512)),
    *(Routing(31, 20, top_k, "bf16", "sigmoid", bias=True) for top_k in range(1, 17)),
    Routing(30, 512, 16, "bf16", groups=(32, 3), renormalize=False),
    Routing(1030, 64, 8, "bf16"),
    Routing(1000, 128, 4, "fp32", "sigmoid", bias=True),
    Routing(50, 60, 6, groups=(20, 3), bias=True),
    Routing(50, 96, 4, scoring="sigmoid", groups=(3, 2), bias=True),
    Routing(50, 16, 3, scoring="sigmoid", groups=(16, 5)),
    Routing(50, 512, 16, groups=(2, 1), renormalize=False, scale=0.5),
    *(
        Routing(30, 256, k, dtype, "sqrtsoftplus", bias=k > 1)
        for k, dtype in ((1, "bf16"), (6, "fp16"))
    ),
    Routing(40, 64, 8, "fp32", "sqrtsoftplus", groups=(8, 4), renormalize=False),
    *(
        Routing(
            33, experts, top_k, "bf16", scoring, logit_bias=True, bias=bool(shared), shared=shared
        )
        for experts, top_k, shared in ((8, 2, 0), (30, 1, 15), (257, 9, 2), (510, 14, 2))
        for scoring in ("softmax", "sigmoid")
    ),
]


@each_arch
@pytest.mark.parametrize("case", CASES, ids=str)
def test_route(case, arch):
    check_route(case, arch)


@each_arch
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_route_more(arch, case):
    check_route(case, arch)


def test_lanes_have_every_expert_once():
    """Experts are in the order of lanes, with groups apart, and vectors only if all lanes are
    full."""
    for n_group, experts in ((1, 1), (1, 257), (1, 384), (8, 256), (3, 96), (17, 510), (32, 512)):
        found = config.RouteConfig(experts, 1, "fp32", "softmax", False, n_group, 1, True)
        groups = n_group if n_group > 1 else 1
        assert (found.groups, found.lanes & (found.lanes - 1)) == (groups, 0)
        assert found.groups * found.lanes <= 32
        assert (found.lanes - 1) * found.per_lane < found.group_size or found.is_even is False
        assert found.lanes * found.per_lane >= found.group_size


@pytest.mark.parametrize(("before", "vectors"), [(8, True), (4, True), (3, False)])
def test_only_aligned_rows_are_read_in_vectors(before, vectors, monkeypatch):
    seen = []
    monkeypatch.setattr("moe.routing.launch.compile_once", lambda c, *_: seen.append(c))
    monkeypatch.setattr("moe.routing.launch.launch", lambda *_: None)
    wide = torch.zeros(4, 256 + 16)
    route(wide[:, before : before + 256], 8)
    route(wide[:, before : before + 255], 8)  # all lanes but the last have 8 experts
    assert [found.vectors for found in seen] == [vectors, False]


def extremes() -> dict[str, tuple[torch.Tensor, int, dict]]:
    """Logits that are equal, missing or extreme, with top_k and options."""
    draw = torch.Generator().manual_seed(1)
    orders = [torch.stack([torch.randperm(n, generator=draw) for _ in range(8)]) for n in (32, 256)]
    hundreds = torch.zeros(3, 256)
    hundreds[1, 100:103], hundreds[2, 32:] = 1.0, -1.0
    lanes = torch.zeros(3, 64)
    lanes[1, [3, 35, 4, 63]], lanes[2, :32] = 1.0, -math.inf
    excluded, bias = torch.zeros(1, 64), torch.zeros(64)
    excluded[0, 40], bias[40] = -math.inf, 0.5  # a score of 0 + 0.5 equals that of the others
    groups = torch.full((2, 32), -5.0)
    groups[0, [9, 17, 18]] = torch.tensor([3.0, 2.0, 2.0])  # two equal experts of a group count
    groups[1, [0, 31]] = 1.0
    none = torch.tensor([[-math.inf] * 9, [math.nan] * 9])
    # If 1 + exp(x) rounds to 1, the score is still exp(x / 2); if x is huge, sqrt(x).
    far = torch.tensor([[80.0, -20.0, 1e30, 9.0, -60.0, 0.0, -1.0, math.inf]])
    sigmoid = {"scoring": "sigmoid"}
    return {
        # Three of each value, far apart: few enough to be ranked in parallel.
        **{f"few of {len(o[0])}": (-(o // 3).float() / 8, 8, {}) for o in orders},
        "more than lanes": (torch.zeros(2, 48), 8, {}),
        "hundreds": (hundreds, 8, {}),
        "hundreds in groups": (hundreds, 8, sigmoid | {"n_group": 8, "topk_group": 4}),
        "within lanes and between": (lanes, 5, {}),
        "a bias makes up for a score": (excluded, 16, sigmoid | {"bias": bias}),
        "a bias is better than a score": (excluded, 16, sigmoid | {"bias": bias * 1.2}),
        "groups": (groups, 3, sigmoid | {"n_group": 4, "topk_group": 1}),
        **{f"none, {scoring}": (none, 3, {"scoring": scoring}) for scoring in config.SCORINGS},
        "far from zero": (far, 8, {"scoring": "sqrtsoftplus", "renormalize": False}),
    }


@each_arch
@pytest.mark.parametrize("name", extremes())
def test_extremes(name, arch):
    """The lower-numbered of equal experts comes first, and their weights are equal to the bit."""
    logits, top_k, options = extremes()[name]
    ids, weights = emulated(lambda: route(logits, top_k, arch=arch, **options))
    expected_ids, expected = reference.route(logits, top_k, **options)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=60 * 2**-23, atol=0)
    assert torch.equal(weights == weights[:, :1], expected == expected[:, :1])


def test_softmax_of_the_chosen_alone():
    """gpt-oss and Mixtral compute softmax, divided by the sum over the chosen experts."""
    logits, biases = build(Routing(40, 128, 4, logit_bias=True, hostile=False))
    ids, weights = emulated(lambda: route(logits, 4, **biases))
    logits = logits + biases["logit_bias"]
    chosen = logits.gather(-1, ids.long())
    assert torch.equal(chosen, logits.topk(4, dim=-1).values)
    alone = chosen.double().softmax(-1)
    torch.testing.assert_close(weights.double(), alone, rtol=60 * 2**-23, atol=0)


def test_a_logit_bias_decides_where_logits_do_not():
    """The bias is added before scores: it may exclude an expert, or compensate for a logit."""
    bias = torch.zeros(64)
    bias[5], bias[6], bias[7] = 1.0, -math.inf, -math.inf
    logits = torch.zeros(2, 64, dtype=torch.bfloat16)
    logits[1, 5], logits[1, [6, 7]] = -math.inf, 9.0
    ids, weights = emulated(lambda: route(logits, 4, logit_bias=bias, renormalize=False))
    expected_ids, expected = reference.route(logits, 4, logit_bias=bias, renormalize=False)
    assert torch.equal(ids, expected_ids)
    assert ids.tolist() == [[5, 0, 1, 2], [0, 1, 2, 3]]
    torch.testing.assert_close(weights, expected, rtol=60 * 2**-23, atol=0)


def random_ids(tokens: int, top_k: int, experts: int, kind: str = "any", seed: int = 0):
    """Random ids of a kind: 'any', 'one' (all on one expert), 'last', 'few' (of many experts)."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(experts, (tokens, top_k), generator=draw, dtype=torch.int32)
    kinds = {
        "any": lambda: ids,
        "one": lambda: torch.full_like(ids, experts // 2),
        "last": lambda: torch.full_like(ids, experts - 1),
        "few": lambda: ids % min(experts, 3) * max(1, experts // 3),
    }
    return kinds[kind]().clamp_max(experts - 1)


PERMUTATIONS = [
    (1, 8, 256, "any"),
    (2, 1, 1, "any"),
    (127, 2, 8, "one"),
    (128, 16, 257, "few"),  # warps loop
    (129, 8, 64, "any"),
]
MORE_PERMUTATIONS = [
    (tokens, top_k, experts, kind)
    for tokens, top_k in ((1, 1), (33, 8), (100, 16))
    for experts, kind in ((2, "any"), (8, "one"), (384, "any"), (512, "last"), (512, "few"))
]
IN_CHUNKS = [(107, 10, 40, "any"), (107, 10, 1, "any"), (128, 8, 512, "any"), (129, 16, 33, "one")]


@each_arch
@pytest.mark.parametrize("shape", PERMUTATIONS, ids=lambda shape: "-".join(map(str, shape)))
def test_permutation(shape, arch):
    check_permutation(random_ids(*shape), shape[2], arch)


def test_column_of_wider_ids():
    check_permutation(random_ids(10, 3, 16)[:, 1:2], 16, "sm_90a")


@each_arch
@pytest.mark.parametrize("shape", MORE_PERMUTATIONS, ids=lambda shape: "-".join(map(str, shape)))
def test_permutation_more(shape, arch):
    check_permutation(random_ids(*shape), shape[2], arch)


@each_arch
@pytest.mark.parametrize("shape", IN_CHUNKS, ids=lambda shape: "-".join(map(str, shape)))
def test_two_launches(shape, arch, monkeypatch):
    """Chunks of several CTAs: the last one partly full, or two full ones."""
    monkeypatch.setattr(config, "ROWS_OF_ONE_CTA", 1000)
    tokens, top_k, experts, _ = shape
    plan = config.plan_permutation(tokens * top_k, experts)
    assert (plan.config.chunked, plan.chunks) == (True, -(-tokens * top_k // 512))
    check_permutation(random_ids(*shape), experts, arch)


RANGES = {
    "the first": (127, 8, 64, "any", (0, 9)),
    "the last": (127, 8, 64, "any", (63, 64)),
    "some": (33, 16, 257, "any", (100, 164)),
    "all": (33, 8, 40, "any", (0, 40)),
    "all are foreign": (40, 8, 16, "one", (0, 8)),
    "none is foreign": (40, 8, 16, "one", (8, 9)),
}


@each_arch
@pytest.mark.parametrize("name", RANGES)
def test_rows_of_some_experts_alone(name, arch, monkeypatch):
    """The permutation has one launch, or two."""
    *shape, expert_range = RANGES[name]
    ids, experts = random_ids(*shape), shape[2]
    check_permutation(ids, experts, arch, expert_range=expert_range)
    monkeypatch.setattr(config, "ROWS_OF_ONE_CTA", 200)
    monkeypatch.setattr(config, "MAX_CHUNKS", 3)
    assert config.plan_permutation(ids.numel(), 1, partial=True).config.chunked
    check_permutation(ids, experts, arch, expert_range=expert_range)


@each_arch
def test_long_runs(arch, monkeypatch):
    """Warps loop several times, in one CTA and in two, which process them in two rounds."""
    ids = random_ids(1000, 8, 100)
    monkeypatch.setattr(config, "MAX_CHUNKS", 3)
    plan = config.plan_permutation(8000, 100)
    assert (plan.config.turns, plan.rounds, plan.chunks) == (4, 2, 2)
    check_permutation(ids, 100, arch)
    monkeypatch.setattr(config, "ROWS_OF_ONE_CTA", 4096)
    assert config.plan_permutation(4000, 100).chunks == 1
    check_permutation(ids[:500], 100, arch)


@each_arch
@pytest.mark.parametrize("kind", ["any", "one", "last"])
@pytest.mark.parametrize("limit", [1 << 16, 1 << 9])
def test_counts_of_many_chunks(kind, limit, arch, monkeypatch):
    """Parts have several chunks each, one of them cut in two; a word has two counts, or one."""
    monkeypatch.setattr(config, "PACKED_LIMIT", limit)
    monkeypatch.setattr("moe.routing.launch.plan_permutation", config.plan_permutation.__wrapped__)
    plan = config.plan_permutation.__wrapped__(20 * 512 + 8, 509)
    assert (plan.chunks, plan.config.parts < plan.chunks) == (21, True)
    assert plan.config.packed == (limit == 1 << 16)
    check_permutation(random_ids(20 * 64 + 1, 8, 509, kind), 509, arch)


def test_schedule_does_not_show():
    late = Options(policy="adversarial", seed=1, limit=None)
    for tokens in (40, 600):
        check_permutation(random_ids(tokens, 8, 16), 16, options=late)
    check_permutation(random_ids(40, 8, 16), 16, options=late, expert_range=(3, 9))


NO_EXPERTS = (-1, -2, 16, 17, (1 << 31) - 1, -(1 << 31))


@pytest.mark.parametrize("expert_range", [None, (0, 9), (3, 16)])
def test_what_is_no_expert_has_no_row(expert_range, monkeypatch):
    """Padding has -1, in one launch and in two. On a GPU, where ids are not checked, any other
    number that is no expert counts as -1, too."""
    ids = random_ids(40, 8, 16)
    padded = ids.clone()
    padded[torch.rand(40, 8, generator=torch.Generator().manual_seed(1)) < 0.3] = -1
    padded[7] = -1
    monkeypatch.setattr("moe.routing.launch.check_range", lambda *given, **more: None)
    others = padded.clone()
    others[padded < 0] = torch.tensor(NO_EXPERTS).repeat(100)[: int((padded < 0).sum())].int()
    for most in (2048, 200):
        monkeypatch.setattr(config, "ROWS_OF_ONE_CTA", most)
        for each in (padded, others, padded.new_full(ids.shape, -1)):
            check_permutation(each, 16, expert_range=expert_range)


def test_ids_with_strides():
    wide = random_ids(20, 8, 16)
    check_permutation(wide[:, 2:5], 16)
    check_permutation(wide[:1].expand(20, 8), 16)


@pytest.mark.parametrize(("rows", "launches"), [(8, 1), (2048, 1), (2056, 2)])
def test_launches(rows, launches):
    with emulation() as active:
        permutation(random_ids(rows // 8, 8, 64), 64)
    assert len(active.reports) == launches


def test_nothing_to_do_launches_nothing(no_compile):
    ids, weights = route(torch.empty(0, 8), 2)
    assert (ids.shape, weights.shape) == ((0, 2), (0, 2))
    found = permutation(ids, 8)
    assert torch.equal(found.offsets, torch.zeros(9, dtype=torch.int32))
    assert len(found.row_of_slot) == len(found.slot_of_row) == 0


@given(st.integers(0, 30).flatmap(lambda bits: st.integers(1, 1 << bits)))
def test_plan_covers_the_slots(rows):
    """Every slot belongs to a warp, no chunk is empty, and chunks fit the GPU."""
    plan = config.plan_permutation(rows, 8)
    slots = plan.config.slots * plan.rounds
    assert (plan.chunks - 1) * slots < rows <= plan.chunks * slots
    assert plan.chunks <= config.MAX_CHUNKS
    assert plan.config.chunked or plan.chunks == plan.rounds == 1
    # The sum of a part of the chunks can hold all of its slots.
    part = -(-plan.chunks // plan.config.parts) * slots
    assert not plan.config.packed or part < 1 << 16


def test_tracers_see_shapes():
    with FakeTensorMode():
        shared, _ = route(torch.empty(5, 64, dtype=torch.bfloat16), 4, shared=2)
        ids, weights = route(torch.empty(5, 64, dtype=torch.bfloat16), 4)
        found, own = permutation(ids, 64), permutation(ids, 64, expert_range=(8, 16))
    assert (own.offsets.shape, own.row_of_slot.shape) == ((9,), (20,))
    assert (ids.shape, ids.dtype) == ((5, 4), torch.int32)
    assert (weights.shape, weights.dtype) == ((5, 4), torch.float32)
    assert shared.shape == (5, 6)
    sizes = [len(t) for t in (found.offsets, found.slot_of_row, found.row_of_slot)]
    assert sizes == [65, 20, 20]


LOGITS = torch.zeros(4, 8)
REFUSED = [
    (LOGITS[0], {}, ValueError, "rank 1; expected"),
    (LOGITS.double(), {}, NotImplementedError, "logits is torch.float64"),
    (LOGITS.T.contiguous().T, {}, ValueError, "last stride 4"),
    (torch.zeros(4, 513), {}, NotImplementedError, "513 experts"),
    (torch.zeros(4, 0), {}, NotImplementedError, "0 experts"),
    (LOGITS, {"top_k": 0}, NotImplementedError, "top_k 0"),
    (torch.zeros(4, 64), {"top_k": 17}, NotImplementedError, "top_k 17"),
    (LOGITS, {"top_k": 9}, ValueError, "top_k 9 of 1 groups with 8 experts"),
    (LOGITS, {"top_k": 2.0}, TypeError, "top_k is 2.0"),
    (LOGITS, {"n_group": 3}, ValueError, "n_group 3: from 1 to 32, a divisor of 8 experts"),
    (LOGITS, {"n_group": 0}, ValueError, "n_group 0: from 1"),
    (LOGITS, {"n_group": 4, "topk_group": 5}, ValueError, "topk_group 5"),
    (LOGITS, {"n_group": 8}, ValueError, "top_k 2 of 1 groups with 1 experts"),
    (LOGITS, {"scoring": "relu"}, ValueError, "scoring 'relu'"),
    (LOGITS, {"bias": torch.zeros(7)}, ValueError, "bias is torch.float32"),
    (LOGITS, {"bias": torch.zeros(8).half()}, ValueError, "bias is torch.float16"),
    (LOGITS, {"bias": [0.0] * 8}, TypeError, "bias is list"),
    (LOGITS, {"logit_bias": torch.zeros(9)}, ValueError, "logit_bias is torch.float32"),
    (LOGITS, {"logit_bias": torch.zeros(8).half()}, ValueError, "logit_bias is torch.float16"),
    (LOGITS, {"logit_bias": 0.5}, TypeError, "logit_bias is float"),
    (LOGITS, {"shared": -1}, ValueError, "shared -1: at least 0"),
    (LOGITS, {"shared": 15}, NotImplementedError, "shared 15 with top_k 2: at most 16"),
    (torch.zeros(4, 512), {"shared": 1}, NotImplementedError, "with 512 experts: at most 512"),
    (LOGITS, {"shared": 1.0}, TypeError, "shared is 1.0"),
    (LOGITS, {"shared": 1, "shared_weight": 0.0}, ValueError, "shared_weight 0.0: above 0"),
    (LOGITS, {"shared": 1, "shared_weight": math.nan}, ValueError, "shared_weight nan"),
    (LOGITS, {"backend": "cuda"}, ValueError, "needs CUDA tensors"),
    (LOGITS, {"arch": "sm_80"}, NotImplementedError, "arch 'sm_80'"),
    (torch.zeros(4, 8, requires_grad=True), {}, NotImplementedError, "requires grad"),
]


@pytest.mark.parametrize(("logits", "options", "error", "words"), REFUSED)
def test_route_refuses(no_compile, logits, options, error, words):
    with pytest.raises(error, match=words):
        route(logits, **{"top_k": 2, **options})


IDS = torch.zeros(4, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("ids", "experts", "error", "words"),
    [
        (IDS.long(), 8, NotImplementedError, "ids is torch.int64"),
        (IDS[0], 8, ValueError, "rank 1"),
        (IDS, 0, NotImplementedError, "0 experts"),
        (IDS, 513, NotImplementedError, "513 experts"),
        (IDS + 8, 8, ValueError, "ids has values from 8 to 8, but experts are 0 to 7"),
        (IDS - 2, 8, ValueError, "ids has values from -2 to -2, but .* and -1 for none"),
    ],
)
def test_permutation_refuses(no_compile, ids, experts, error, words):
    with pytest.raises(error, match=words):
        permutation(ids, experts)


@pytest.mark.parametrize(("expert_range", "error", "words"), [
    ((3, 3), ValueError, r"expert_range \(3, 3\): at least one of the experts 0 to 7"),
    ((4, 3), ValueError, r"expert_range \(4, 3\)"),
    ((-1, 3), ValueError, r"expert_range \(-1, 3\)"),
    ((3, 9), ValueError, r"expert_range \(3, 9\)"),
    ((3,), TypeError, r"expert_range is \(3,\), expected \(first, end\)"),
    ((0, 2.0), TypeError, r"expert_range\[1\] is 2.0"),
    (range(3), TypeError, "expert_range is range"),
])  # fmt: skip
def test_ranges_that_are_refused(no_compile, expert_range, error, words):
    with pytest.raises(error, match=words):
        permutation(IDS, 8, expert_range=expert_range)


def test_ids_out_of_range_are_refused_with_a_range(no_compile):
    with pytest.raises(ValueError, match="ids has values from 8 to 8, but experts are 0 to 7"):
        permutation(IDS + 8, 8, expert_range=(0, 3))


# ---- The combination in the emulator, bit for bit: sizes, dtypes, layouts, order, refusals

COMBINED = [
    Sum(1, 8, 7168),
    Sum(2, 1, 8, "fp32", "bf16"),
    Sum(65, 4, 1032, "fp16", "fp32"),
    Sum(50, 3, 68, "fp32", "fp32"),
    Sum(10, 16, 256, "bf16", "bf16", weighted=False),
]
COMBINED_MATRIX = [
    *(Sum(9, top_k, 1544, seed=top_k) for top_k in (1, 2, 3, 6, 7, 12, 16)),
    *(Sum(tokens, 2, 128, "fp16", "fp16") for tokens in (1, 2, 127, 128, 129, 1000)),
    *(Sum(9, 6, 2880, *dtypes) for dtypes in product(DTYPES, repeat=2)),
]


@each_arch
@pytest.mark.parametrize("case", COMBINED, ids=str)
def test_combine(case, arch):
    check_combine(case, arch)


@each_arch
@pytest.mark.parametrize("case", COMBINED_MATRIX, ids=str)
def test_combine_more(arch, case):
    check_combine(case, arch)


@each_arch
def test_a_cta_walks_over_a_token(arch, monkeypatch):
    """Each of many tokens has one CTA, for any hidden size."""
    monkeypatch.setattr("moe.routing.config.TOKENS_THAT_FILL", 3)
    assert combine_columns(3, 300) == 1
    check_combine(Sum(3, 8, 2400), arch)


def test_order_of_choices():
    """1 + 2 ** -30 - 1 is 0 in this order, and 2 ** -30 in others."""
    y = torch.tensor([[1.0], [2.0**-30], [-1.0]]).expand(3, 4).contiguous()
    weights = torch.ones(3, 3)
    orders = torch.tensor([[0, 1, 2], [0, 2, 1], [1, 0, 2]], dtype=torch.int32)
    got = emulated(lambda: combine(y, weights, orders))
    assert torch.equal(got, torch.tensor([0.0, 2.0**-30, 0.0])[:, None].expand(3, 4))


def test_a_row_may_be_asked_for_twice():
    y = torch.arange(16.0).view(2, 8)
    rows = torch.tensor([1, 1, 0, 1], dtype=torch.int32)
    got = emulated(lambda: combine(y, torch.tensor([[1.0, 2.0], [0.5, 0.25]]), rows))
    assert torch.equal(got, torch.stack((3 * y[1], y[0] / 2 + y[1] / 4)))


@pytest.mark.parametrize("weighted", [True, False])
def test_slots_without_rows_add_nothing(weighted):
    """Their weight does not matter; a token without any row gives zeros."""
    y, weights, rows = Sum(9, 5, 136, "bf16", "bf16", weighted).inputs()
    rows = rows.view(9, 5).clone()
    rows[torch.rand(9, 5, generator=torch.Generator().manual_seed(3)) < 0.6] = -1
    rows[4] = -1
    shares = (weights if weighted else torch.ones(9, 5)).masked_fill(rows < 0, 0.0)
    weights = weights.masked_fill(rows < 0, math.nan) if weighted else None
    got = emulated(lambda: combine(y, weights, rows))
    assert torch.equal(got, one_by_one(y, shares, rows.clamp(min=1)).bfloat16())
    assert not got[4].any()
    expected = reference_routing.combine(y, weights, rows).bfloat16()
    torch.testing.assert_close(got, expected)


def test_nan_and_inf_arrive():
    """NaN and infinity arrive even with a weight of 0, and reach no other column or token."""
    y = torch.ones(4, 8)
    y[1, 3], y[2, 5] = math.nan, math.inf
    weights = torch.tensor([[1.0, 0.0], [2.0, 1.0]])
    got = emulated(lambda: combine(y, weights, torch.arange(4, dtype=torch.int32)))
    assert got.isnan().nonzero().tolist() == [[0, 3]]
    assert got.isinf().nonzero().tolist() == [[1, 5]]


def test_broadcast_weights():
    y, _, rows = Sum(5, 2, 64).inputs()
    weights = torch.tensor([[0.25, 0.5]])
    spread = emulated(lambda: combine(y, weights.expand(5, 2), rows))
    assert torch.equal(spread, emulated(lambda: combine(y, weights.repeat(5, 1), rows)))


def test_no_tokens(no_compile):
    rows = torch.empty(0, dtype=torch.int32)
    assert combine(torch.ones(3, 8), torch.empty(0, 2), rows).shape == (0, 8)
    assert combine(torch.empty(0, 8), torch.empty(0, 2), rows).shape == (0, 8)


@each_arch
@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
def test_sixteen_bytes_at_a_time(arch, out_dtype):
    """Accesses have 16 bytes, except those of the two tables of numbers; nothing is spilled."""
    config = CombineConfig(8, "bf16", out_dtype, weighted=True)
    ptx = compile_once(config, arch, "moe.routing.combine_kernel").ptx
    lines = [line.split() for line in ptx.splitlines() if ".global" in line]
    stores = {words[0] for words in lines if words[0].startswith("st.")}
    wide = [words for words in lines if words[0].startswith("ld.global.v")]
    assert stores <= {"st.global.v4.b32", "st.global.v2.b64"}
    assert {words[0] for words in wide} <= {"ld.global.v4.b32", "ld.global.v2.b64"}
    assert len(wide) == 8
    assert ".local" not in ptx


def test_tracers_see_the_shape_of_sums():
    with FakeTensorMode():
        y, rows = torch.empty(6, 64), torch.empty(3, 2, dtype=torch.int32)
        got = combine(y, None, rows, out_dtype=torch.bfloat16)
    assert (got.shape, got.dtype) == ((3, 64), torch.bfloat16)


Y, WEIGHTS, ROWS = torch.zeros(8, 64), torch.zeros(4, 2), torch.arange(8, dtype=torch.int32)
REFUSED_TO_COMBINE = [
    ((Y.double(), WEIGHTS, ROWS), {}, NotImplementedError, "y is torch.float64"),
    ((Y, WEIGHTS, ROWS), {"out_dtype": torch.int8}, NotImplementedError, "out_dtype is torch.int8"),
    ((Y[0], WEIGHTS, ROWS), {}, ValueError, "rank 1"),
    ((Y, WEIGHTS.half(), ROWS), {}, ValueError, "weights is torch.float16"),
    ((Y, WEIGHTS, ROWS.long()), {}, ValueError, "row_of_slot is torch.int64"),
    ((Y, WEIGHTS, ROWS[:7]), {}, ValueError, "7 slots"),
    ((Y, None, ROWS), {}, ValueError, "rank 1"),
    ((Y, torch.zeros(4, 0), ROWS[:0]), {}, NotImplementedError, "top_k 0"),
    ((torch.zeros(8, 62), WEIGHTS, ROWS), {}, ValueError, "hidden size 62"),
    ((torch.zeros(8, 65)[:, 1:], WEIGHTS, ROWS), {}, ValueError, "y starts at address"),
    ((torch.zeros(8, 66)[:, :64], WEIGHTS, ROWS), {}, ValueError, "stride of 264 bytes"),
    ((Y[:7], WEIGHTS, ROWS), {}, ValueError, "values from 0 to 7, but y has rows 0 to 6"),
    ((Y, WEIGHTS, ROWS - 1), {"partial": False}, ValueError, "values from -1 to 6"),
    ((Y, WEIGHTS, ROWS - 2), {}, ValueError, "values from -2 to 5"),
    ((Y, WEIGHTS, ROWS), {"partial": 1}, TypeError, "partial is 1"),
    ((Y, WEIGHTS, ROWS), {"backend": "cuda"}, ValueError, "needs CUDA tensors"),
    ((Y, 1.0, ROWS), {}, TypeError, "weights is float"),
    ((Y.clone().requires_grad_(), WEIGHTS, ROWS), {}, NotImplementedError, "requires grad"),
]


@pytest.mark.parametrize(("given", "options", "error", "words"), REFUSED_TO_COMBINE)
def test_refusals(no_compile, given, options, error, words):
    with pytest.raises(error, match=words):
        combine(*given, **options)
