"""Whole layers: model sizes, experts of a rank, separate scales of gate and up."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
import torch

from lab.commands import EXPLAIN
from lab.measure.accuracy import EXTRA
from lab.problems import grouped_gemm as cases
from lab.problems import mixed_gemm as mixed_cases
from lab.problems.grouped_gemm import Case, checked, same_bits
from lab.problems.mixed_gemm import Case as Mixed
from lab.problems.moe import errors_of, layer_of
from moe import arrange, fused_moe, pack, reference, reference_routing, unpack
from moe.api import fused_moe_plan, grouped_gemm
from moe.arguments import Router, Scales, SwiGLU
from moe.packing import PackedExperts
from moe.quantized import Quantized, laid_out
from moe.reference import dequantise, layer, swizzle_scales, unswizzle_scales
from moe.reference_routing import route
from moe.warm import kernels_for

# ---- A whole layer in the emulator, from router logits to the combined output, compared with its
# definition
#
# The error against bfloat16 weights is that of quantising: the kernels add nothing to the error of
# the reference with the same rounding.

QUANTISING = {"nvfp4": 0.26, "mxfp4": 0.3, "mxfp8": 0.08}  # for random numbers
IDLE = 1  # an expert that no token chooses

pytestmark = pytest.mark.usefixtures("poisoned_outputs", "three_ctas")


def compare(flags: str, *, idle: bool) -> None:
    """Compare the layer that the flags describe with bfloat16 weights; `-rP` shows both errors."""
    layer = layer_of(EXPLAIN["moe"].parser("").parse_args(shlex.split(flags)))
    x, w13, w2, logits = layer.tensors
    if idle:
        logits[:, IDLE] = -20.0
        assert IDLE not in reference_routing.route(logits, **vars(layer.router))[0]
    experts = pack(w13, w2, layer.format, granularity=layer.granularity)
    options = {"activation": layer.form, "scales": layer.scales, "tile_rows": layer.tile_rows}
    options["activations"] = layer.format
    with checked():
        y = fused_moe(x, experts, logits, layer.router, **options)
    errors = errors_of(layer, experts, y)
    own, of_format = errors["relative"], errors["reference"]
    print(f"{layer}: relative error {own:.4f}, of quantising alone {of_format:.4f}")
    assert own <= EXTRA * of_format, errors
    assert of_format < QUANTISING[layer.format]


@pytest.mark.parametrize("flags", ["nvfp4", "nvfp4 --h-scale tensor", "mxfp8"])
def test_a_small_layer(flags):
    compare(f"--experts 5 --format {flags}", idle=False)


# Each case is a group of xdist, so that they run in parallel.
@pytest.mark.parametrize(("model", "fmt"), [
    pytest.param(*case.split(), marks=pytest.mark.xdist_group(case))
    for case in ("gpt-oss-120b nvfp4", "deepseek-v4-pro nvfp4", "gpt-oss-120b mxfp4",
                 "gpt-oss-120b mxfp8")
])  # fmt: skip
def test_decode_with_the_sizes_of_models(model, fmt):
    """A few tokens: weights are the rows of the MMA. One expert has no token."""
    compare(f"--model {model} --experts 3 --format {fmt}", idle=True)


@pytest.mark.xdist_group("moe-prefill")
def test_prefill_with_the_sizes_of_a_model():
    """Pairs of CTAs have full tiles and others, of two experts; the third one has no token."""
    flags = "--model gpt-oss-120b --experts 3 --tokens 130 --format nvfp4 --tile-rows 256"
    compare(flags, idle=True)


# ---- Experts of a rank, and shared experts: the output of each rank, compared with the whole layer

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS = 7, 128, 64, 5
SHARED = Router(2, "sigmoid", scale=2.5, shared=1)
RANKS = ((0, 2), (2, 3), (3, 6))  # the last one also has the shared expert


torch.manual_seed(0)
X = torch.randn(TOKENS, HIDDEN).bfloat16()
LOGITS = torch.randn(TOKENS, EXPERTS)
W13 = (torch.randn(EXPERTS + 1, 2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5).bfloat16()
W2 = (torch.randn(EXPERTS + 1, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5).bfloat16()


def packed(fmt: str, first: int = 0, end: int = EXPERTS + 1) -> PackedExperts:
    return pack(W13[first:end], W2[first:end], fmt)


def run(experts: PackedExperts, logits: torch.Tensor = LOGITS, **options) -> torch.Tensor:
    given = {"router": SHARED, "activations": experts.fmt} | options
    with checked():
        return fused_moe(X, experts, logits, **given)


def apart(mine: torch.Tensor, other: torch.Tensor) -> float:
    """Relative difference in the norm."""
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
    """The only difference is the rounding of each rank's output, if scales do not depend on the
    rank."""
    whole = run(packed(fmt), scales=scales)
    parts = [run(packed(fmt, *rank), expert_range=rank, scales=scales) for rank in RANKS]
    total = sum(part.double() for part in parts)
    # A scale of the tensor h depends on the rows of the rank, which are then quantised differently.
    assert apart(total, whole) < (0.2 if scales.h == "tensor" else 8e-3)
    assert all(part.any() for part in parts)


def test_every_rank_beside_the_reference():
    """Experts of other ranks have no weight."""
    ids, weights = route(LOGITS, **vars(SHARED))
    for first, end in RANKS:
        is_here = (ids >= first) & (ids < end)
        routed = torch.where(is_here, ids, 0), weights.masked_fill(~is_here, 0.0)
        mine = run(packed("mxfp8", first, end), expert_range=(first, end))
        expected = reference.layer(X, *unpack(packed("mxfp8")), routed, fmt="mxfp8")
        assert apart(mine, expected) < 5e-3
        alone = ~is_here.any(-1)
        assert not mine[alone].any()


TWO_OF_ALL = Router(2)
OF_TWO = LOGITS.clone()
OF_TWO[:, 2:] -= 50.0  # only the experts 0 and 1 are chosen


@pytest.mark.parametrize(("fmt", "scales"), [
    ("mxfp8", Scales()), ("nvfp4", Scales("tensor", "tensor")),
    ("nvfp4", Scales(h_amax=torch.zeros(1))),
], ids=["mxfp8", "nvfp4-tensor", "nvfp4"])  # fmt: skip
def test_all_tokens_are_foreign(fmt, scales):
    """Results are zeros, whatever unused rows hold; the largest |h| is 0."""
    y = run(packed(fmt, 2, 4), OF_TWO, router=TWO_OF_ALL, scales=scales, expert_range=(2, 4))
    assert not y.any()
    if scales.h_amax is not None:
        assert scales.h_amax.item() == 0.0


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_no_token_is_foreign(fmt):
    """Bits are those of the whole layer, also if scales are computed."""
    whole = run(packed(fmt, 0, 5), OF_TWO, router=TWO_OF_ALL)
    assert torch.equal(
        run(packed(fmt, 0, 2), OF_TWO, router=TWO_OF_ALL, expert_range=(0, 2)), whole
    )
    assert torch.equal(
        run(packed(fmt, 0, 5), OF_TWO, router=TWO_OF_ALL, expert_range=(0, 5)), whole
    )


def test_one_expert_of_the_layer():
    """A token has at most one row, and there is room for no more."""
    whole = run(packed("mxfp8", 0, 5), OF_TWO, router=TWO_OF_ALL)
    parts = [
        run(packed("mxfp8", e, e + 1), OF_TWO, router=TWO_OF_ALL, expert_range=(e, e + 1)).double()
        for e in (0, 1)
    ]
    assert apart(parts[0] + parts[1], whole) < 8e-3


def test_a_plan_of_a_rank():
    experts, known = packed("nvfp4", 2, 4), Scales(torch.tensor([500.0]), torch.tensor([300.0]))
    with checked():
        given = {"scales": known, "expert_range": (2, 4), "activations": "nvfp4"}
        plan = fused_moe_plan(X, experts, LOGITS, SHARED, **given)
        assert torch.equal(plan(), fused_moe(X, experts, LOGITS, SHARED, **given))


def test_a_warm_up_knows_the_kernels_of_a_rank():
    given = X, packed("mxfp8", 2, 4), LOGITS, SHARED, [TOKENS]
    keys = kernels_for(*given, expert_range=(2, 4), arch="sm_100a")
    partial = {type(key.config).__name__ for key in keys if getattr(key.config, "partial", False)}
    assert partial == {"PermutationConfig", "QuantiseConfig", "CombineConfig"}


# ---- Gate and up of an expert with separate global scales, in every epilogue

COUNTS, FORM = (5, 0, 37, 2), (1.702, 1.0, 7.0)
PLAIN = Case(COUNTS, 128, 64, "nvfp4", form=FORM, pairs=True)
CASES = [
    replace(PLAIN, tile_rows=64),  # weights are the rows of the MMA: one factor per thread
    replace(PLAIN, tile_rows=64, per_token=True, bias=True),  # and one per row
    replace(PLAIN, tile_rows=128),
    replace(PLAIN, tile_rows=128, bias=True, out="nvfp4", per_token=True),
    replace(PLAIN, tile_rows=128, granularity=8, carry=True, amax=True),
    replace(PLAIN, tile_rows=256, granularity=64, out="fp32"),
]
MIXED = [
    Mixed(COUNTS, 192, 96, "nvfp4", FORM, arch=arch, pairs=True, bias=bias, tile_rows=tile)
    for arch in ("sm_90a", "sm_100a")
    for bias, tile in ((False, 16), (True, 64))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_product(case):
    """Compared with the definition in fp64."""
    result, _ = cases.run(case)
    report = cases.judge(case, result)
    assert report.ok, str(report)
    if isinstance(result, torch.Tensor):
        assert not cases.judge(replace(case, pairs=False), result).ok


@pytest.mark.parametrize("case", MIXED, ids=str)
def test_a_product_of_bf16(case):
    result = mixed_cases.run(case)
    assert all(report.ok for report in mixed_cases.judge(case, result, case.inputs()))


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[4]], ids=str)
def test_twice_the_scale_and_half_the_scale_factors_are_the_same_bits(case):
    """Powers of two move from the scale factors of up to its global scale."""
    x, w = replace(case, pairs=False).inputs()
    columns = w.format.columns(w.k)
    is_up = torch.arange(w.rows) // case.granularity % 2 == 1
    halved = []
    for codes in w.scales.view(len(w.data), -1):
        rows = unswizzle_scales(codes, w.rows, columns).float()
        rows[is_up] /= 2
        halved.append(swizzle_scales(rows.to(torch.float8_e4m3fn)).view(torch.uint8))
    decode = torch.stack((w.decode_scale, 2 * w.decode_scale), 1)
    other = Quantized(
        w.data, torch.cat(halved).view(w.scales.dtype), decode.reciprocal(), decode, w.fmt
    )
    values = [dequantise(laid_out(each, granularity=case.granularity)) for each in (w, other)]
    assert torch.equal(*values)
    given = {name: value for name, value in case.options().items() if name != "amax"}
    with checked():
        results = [grouped_gemm(x, each, case.offsets, **given) for each in (w, other)]
    assert same_bits(*results, case.offsets)


def layer_with_pairs() -> PackedExperts:
    """A layer of three experts."""
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(3, 256, 128, generator=generator) / 8
    packed = pack(w13, torch.randn(3, 128, 128, generator=generator) / 8, granularity=8)
    w13 = cases.with_pairs(packed.w13, generator, 8)
    return replace(packed, w13=replace(w13))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_layer_of_arranged_experts(arch):
    """Compared with the definition on its unpacked weights."""
    packed, form = layer_with_pairs(), SwiGLU(*FORM)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 128, generator=generator).bfloat16()
    logits = torch.randn(5, 3, generator=generator)
    with checked():
        y = fused_moe(x, arrange(packed), logits, Router(2), activation=form, arch=arch)
    wanted = layer(x, *unpack(packed), route(logits, 2), **vars(form))
    assert (y.double() - wanted).norm() < 5e-3 * wanted.norm()


def test_experts_know_how_gate_and_up_alternate(no_compile):
    """This includes experts made from tensors alone, such as a file's."""
    packed = layer_with_pairs()
    assert packed.w13.granularity == 8
    with pytest.raises(ValueError, match="granularity of their rows is unknown"):
        dequantise(replace(packed.w13))
    with pytest.raises(ValueError, match="w2 has two global scales"):
        replace(packed, w2=replace(packed.w2, **dict.fromkeys(
            ("encode_scale", "decode_scale"), torch.ones(3, 2))))  # fmt: skip
    case = replace(PLAIN, form=None, pairs=False)
    x, w = case.inputs()
    both = dict.fromkeys(("encode_scale", "decode_scale"), torch.ones(len(w.data), 2))
    with pytest.raises(ValueError, match="global scales for gate and for up, but there is no act"):
        grouped_gemm(x, replace(w, **both), case.offsets)
    with pytest.raises(ValueError, match=r"decode_scale has shape|encode_scale has shape"):
        replace(w, **dict.fromkeys(both, torch.ones(len(w.data), 3)))
