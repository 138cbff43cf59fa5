"""The reference: quantiser, layout, SwiGLU, products and layer, and routing slot by slot."""

from __future__ import annotations

import math
import struct
from itertools import pairwise

import numpy as np
import pytest
import torch

from moe import reference
from moe.formats import FORMATS, format_of, scale_blocks
from moe.reference import (
    dequantise,
    encode_scale,
    grouped_gemm,
    quantise,
    quantise_blocks,
    swiglu,
    swizzle_scales,
    unswizzle_scales,
)
from moe.reference_routing import combine, permutation, route
from ptxemu.numerics import formats as numerics
from tests.moe import scalar

# ---- The reference: its quantiser compared with exact arithmetic, its layout, SwiGLU, products and
# layer

INF, NAN = math.inf, math.nan
FLT_MAX = scalar.FLT_MAX
TINY = 2.0**-149
BF16_MAX = float(torch.finfo(torch.bfloat16).max)
# Magnitudes at the ends of fp32, at both ends of ue8m0, and around the largest elements.
MAGNITUDES = (
    *(TINY, 3 * TINY, 2.0**-128, 2.0**-127, 2.0**-126, 6 * 2.0**-127, 448 * 2.0**-127, 1e-30),
    *(2.0**-12, 2.0**-10, 0.3, 0.5, 1.0, 2.9, 5.0, 6.0, 7.0, 447.0, 448.0, 464.0, 2688.0, 65504.0),
    *(1e30, 2.0**126, 6 * 2.0**124, BF16_MAX, FLT_MAX, INF),
    float.fromhex("0x1.c7fffep-2"),  # its e4m3 differs between / 6 and * fp32(1/6)
)
SCALES = (0.0, TINY, 1e-30, 2.0**-10, 1 / 3, 1.0, 2688.0, 2.0**20, 3e38, FLT_MAX, NAN)


def neighbours(value):
    """The fp32 numbers just below and above."""
    here, ends = torch.tensor([value, value]), torch.tensor([-INF, INF])
    return torch.nextafter(here, ends).tolist()


def with_bits(generator, size):
    """fp32 numbers of random bits: every exponent, infinities and NaNs."""
    words = torch.randint(-(2**31), 2**31, (size,), generator=generator)
    return words.to(torch.int32).view(torch.float32)


def adversarial_blocks(form):
    """Blocks, fp32 [cases, block]."""
    size, generator = form.block, torch.Generator().manual_seed(0)
    blocks = [[0.0] * size, [-0.0] * size, [0.0, -0.0] * (size // 2)]
    for index, magnitude in enumerate(MAGNITUDES):
        signed = magnitude * (-1) ** index
        blocks.append([0.0] * (index % size) + [signed] + [0.0] * (size - 1 - index % size))
        blocks.append([signed] * size)
        blocks.append([magnitude * float(f) for f in torch.rand(size, generator=generator)])
        blocks.append([TINY * (-1) ** i for i in range(size - 1)] + [magnitude])
        blocks += [[value] + [value / 3] * (size - 1) for value in neighbours(magnitude)]
    # With a scale factor of 1, elements are rounded as they are: ties and their neighbours.
    values = scalar.E2M1 if form.element == "e2m1" else scalar.E4M3
    ties = [float(low + high) / 2 for low, high in pairwise(values)]
    close = [v * sign for tie in ties for v in (tie, *neighbours(tie)) for sign in (1, -1)]
    for start in range(0, len(close), size - 1):
        part = close[start : start + size - 1]
        blocks.append([form.largest, *part, *[0.5] * (size - 1 - len(part))])
    blocks += [[NAN] + [1.0] * (size - 1), [1.0] * (size - 1) + [-NAN], [0.0] * (size - 1) + [NAN]]
    blocks += [[NAN, INF] + [0.0] * (size - 2), [INF, -INF] + [-3.0] * (size - 2)]
    exact = torch.tensor(blocks, dtype=torch.float64).float()
    scaled = torch.randn(40, size, generator=generator) * torch.logspace(-30, 30, 40)[:, None]
    return torch.cat((exact, with_bits(generator, 60 * size).reshape(-1, size), scaled))


def codes_of(data, form):
    packed = data.view(torch.uint8)
    if form.element == "e4m3":
        return packed
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def assert_like_scalar(x, form, encode):
    """Check that every block of x, fp32 [blocks, block], has the codes of exact arithmetic."""
    data, scales = quantise_blocks(x, form, encode)
    codes, scales = codes_of(data, form).tolist(), scales.view(torch.uint8).flatten().tolist()
    for row, values in enumerate(x.tolist()):
        g = None if encode is None else encode[row].item()
        expected = scalar.block(values, form.name, g)
        assert (codes[row], scales[row]) == expected, (values, g)


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_blocks_with_power_of_two_scales_are_exact(fmt):
    form = format_of(fmt)
    assert_like_scalar(adversarial_blocks(form), form, None)


@pytest.mark.parametrize("g", [*SCALES, "own"])
def test_blocks_of_nvfp4_are_exact(g):
    form = format_of("nvfp4")
    x = adversarial_blocks(form)
    if g == "own":
        encode = encode_scale(x.abs().amax(-1), "nvfp4")
    else:
        encode = torch.full((len(x),), g)
    assert_like_scalar(x, form, encode)


def test_elements_of_every_fp16_number():
    """Blocks have a scale factor of 1; compared with the emulator's conversion."""
    every = torch.arange(2**16).to(torch.uint16).view(torch.float16).float()
    for form, convert in (
        (FORMATS["mxfp4"], numerics.f32_to_e2m1),
        (FORMATS["mxfp8"], numerics.f32_to_e4m3),
    ):
        x = every[every.abs() <= form.largest]
        count = len(x) // (form.block - 1) * (form.block - 1)
        blocks = x[:count].reshape(-1, form.block - 1)
        blocks = torch.cat((blocks, torch.full((len(blocks), 1), form.largest)), dim=1)
        data, scales = quantise_blocks(blocks, form, None)
        assert (scales.view(torch.uint8) == 127).all()
        assert np.array_equal(codes_of(data, form).numpy(), convert(blocks.numpy()))


def test_scale_factors_of_random_bits():
    """Compared with the emulator's conversions; a block has one nonzero element."""
    x = torch.zeros(20000, 32)
    x[:, 7] = with_bits(torch.Generator().manual_seed(1), len(x))
    amax = x[:, 7].abs().numpy()
    _, power = quantise_blocks(x, FORMATS["mxfp4"], None)
    with np.errstate(all="ignore"):
        wanted = amax * np.float32(1 / 6)
    expected = numerics.f32_to_ue8m0(wanted, "rp", satfinite=True)
    assert np.array_equal(power.view(torch.uint8)[:, 0].numpy(), expected)
    _, e4m3 = quantise_blocks(x, FORMATS["nvfp4"], torch.full((len(x),), 3.0))
    with np.errstate(all="ignore"):
        expected = numerics.f32_to_e4m3(wanted * np.float32(3))
    assert np.array_equal(e4m3.view(torch.uint8)[:, 0].numpy(), expected)


@pytest.mark.parametrize("amax", [0.0, *MAGNITUDES])
def test_global_scale_is_rounded_once(amax):
    g = encode_scale(torch.tensor([amax]), "nvfp4").item()
    assert g == scalar.global_scale(struct.unpack("f", struct.pack("f", amax))[0])
    assert math.isfinite(g)


def test_where_global_scales_come_from():
    x = torch.tensor([[1.0] * 16, [0.0] * 16, [-4.0] * 16])
    assert quantise(x, "nvfp4").encode_scale.tolist() == [2688, 1, 672]
    assert quantise(x, "nvfp4", global_scale="tensor").encode_scale.tolist() == [672]
    assert quantise(x, "nvfp4", rows=torch.tensor([2, 1])).encode_scale.tolist() == [672, 1]
    per_token = quantise(x, "nvfp4", global_scale="token", rows=torch.tensor([2, 2, 1, 0]))
    assert per_token.encode_scale.tolist() == [672, 672, 1, 2688]
    given = quantise(x, "nvfp4", global_scale=torch.tensor([3.0]))
    assert given.decode_scale.tolist() == torch.tensor([1 / 3]).tolist()
    assert quantise(torch.zeros(0, 16), "nvfp4").encode_scale.tolist() == []
    nobody = quantise(torch.zeros(0, 16), "nvfp4", global_scale="tensor")
    assert nobody.encode_scale.tolist() == [1]
    assert quantise(torch.zeros(1, 32), "mxfp8").decode_scale is None


def test_a_nan_or_an_infinity_is_seen_in_the_values():
    x = torch.full((3, 64), 6.0)
    x[0, 3], x[1, 3] = NAN, INF
    for fmt, form in FORMATS.items():
        scale = torch.ones(1) if form.has_global else None
        values = dequantise(quantise(x, fmt, global_scale=scale)).float()
        assert values[0, : form.block].isnan().all()
        assert values[1, 3] == form.largest * (448 if form.scale == "e4m3" else 2.0**127)
        assert values[0, form.block :].eq(6).all()
        assert values[2].eq(6).all()


def test_values_are_elements_times_scales():
    """Computed from the tables of exact arithmetic, element by element."""
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    for fmt, (table, _, sign, _) in scalar.FORMATS.items():
        form = format_of(fmt)
        quantised = quantise(x, fmt, global_scale="token" if form.has_global else None)
        codes = codes_of(quantised.data, form)
        scales = unswizzle_scales(quantised.scales, 5, 96 // form.block).view(torch.uint8)
        values = dequantise(quantised)
        for (row, k), value in np.ndenumerate(values.numpy()):
            negative, code = divmod(int(codes[row, k]), sign)
            scale = (scalar.UE8M0 if form.scale == "ue8m0" else scalar.E4M3)[
                scales[row, k // form.block]
            ]
            exact = float(table[code] * scale) * (-1) ** negative
            if form.has_global:
                exact *= quantised.decode_scale[row].item()
            assert value == exact


@pytest.mark.parametrize(
    ("fmt", "limit"), [("nvfp4", 2**-2 * 1.07), ("mxfp4", 2**-2), ("mxfp8", 2**-4)]
)
def test_elements_are_off_by_half_a_step_at_most(fmt, limit):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    blocks = x.unflatten(-1, (-1, FORMATS[fmt].block))
    error = (dequantise(quantise(x, fmt)) - x).reshape(blocks.shape).abs()
    assert (error <= limit * blocks.abs().amax(-1, keepdim=True)).all()
    assert error.max() > 0


def test_quantise_refuses():
    x = torch.ones(2, 32)
    with pytest.raises(ValueError, match="global_scale with mxfp4"):
        quantise(x, "mxfp4", global_scale="token")
    with pytest.raises(ValueError, match="'expert': 'token', 'tensor' or a tensor"):
        quantise(x, "nvfp4", global_scale="expert")
    with pytest.raises(ValueError, match="K = 24"):
        quantise(x[:, :24], "nvfp4")


def swizzled_by_views(codes):
    """Pad rows to 128 and columns to 4, then put 32 rows of 4 groups next to each other."""
    rows, columns = codes.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 4) * 4, dtype=torch.uint8)
    padded[:rows, :columns] = codes
    atoms = padded.reshape(-1, 4, 32, padded.shape[1] // 4, 4)
    return atoms.permute(0, 3, 2, 1, 4).flatten()


def random_codes(rows, columns):
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(1, 256, (rows, columns), generator=generator).to(torch.uint8)


def test_place_of_one_scale_factor():
    codes = torch.zeros(300, 12, dtype=torch.uint8)
    codes[170, 6] = 255
    assert swizzle_scales(codes).argmax() == 1 * 3 * 512 + 1 * 512 + 10 * 16 + 1 * 4 + 2


def starts(counts):
    return torch.tensor([0, *counts]).cumsum(0).int()


LAYOUTS = [([1], 1), ([31], 4), ([128], 5), ([129], 3), ([300], 12)]
LAYOUTS += [
    (counts, 6) for counts in ([0], [3], [0, 1, 0], [127, 128, 129], [0, 0, 257, 0, 1, 0], [0, 130])
]


@pytest.mark.parametrize(("counts", "columns"), LAYOUTS, ids=str)
def test_layout_of_scale_factors(counts, columns):
    """The layout is per expert; for a single one it equals that without offsets."""
    rows, atoms = sum(counts), -(-columns // 4)
    codes, offsets = random_codes(rows, columns), starts(counts)
    used = torch.cat([swizzled_by_views(part) for part in codes.split(counts)])
    assert len(swizzle_scales(codes, offsets)) == scale_blocks(rows, len(counts)) * atoms * 512
    for given in [offsets] if len(counts) > 1 else [offsets, None]:
        swizzled = swizzle_scales(codes, given)
        assert torch.equal(swizzled[: len(used)], used)
        assert not swizzled[len(used) :].any()
        assert torch.equal(unswizzle_scales(swizzled, rows, columns, given), codes)


def test_gathered_rows_by_expert_keep_their_values():
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    rows, offsets = torch.randint(0, 9, (300,)).int(), starts([0, 130, 1, 169])
    for fmt in FORMATS:
        gathered = quantise(x, fmt, rows=rows, offsets=offsets)
        values = dequantise(gathered, offsets=offsets)
        assert torch.equal(values, dequantise(quantise(x, fmt))[rows.long()])


@pytest.mark.parametrize(
    "form", [{}, {"limit": 10.0}, {"alpha": 1.702, "beta": 1.0, "limit": 7.0}], ids=str
)
def test_swiglu_number_by_number(form):
    alpha, beta = form.get("alpha", 1.0), form.get("beta", 0.0)
    limit = form.get("limit", INF)
    points = [-1e4, -11.0, -7.5, -1.0, 0.0, 0.3, 6.9, 7.1, 9.9, 10.1, 500.0]
    for gate in points:
        for up in points:
            g, u = min(gate, limit), max(min(up, limit), -limit)
            sigmoid = 1 / (1 + math.exp(-alpha * g)) if alpha * g > -700 else 0.0
            pair = torch.tensor([gate, up], dtype=torch.float64)
            assert swiglu(*pair, **form).item() == pytest.approx((u + beta) * g * sigmoid)


def test_swiglu_keeps_nan_and_the_dtype():
    for pair in ((NAN, 1.0), (1.0, NAN)):
        assert swiglu(*torch.tensor(pair), limit=7.0).isnan()
    assert swiglu(*torch.ones(2)).dtype == torch.float32


COUNTS = [3, 0, 1, 130, 0]


def test_grouped_gemm_row_by_row():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(COUNTS), 64, generator=generator)
    w = torch.randn(len(COUNTS), 24, 64, generator=generator)
    bias = torch.randn(len(COUNTS), 24, generator=generator)
    offsets = starts(COUNTS)
    y, biased = grouped_gemm(x, w, offsets), grouped_gemm(x, w, offsets, bias)
    assert y.dtype == biased.dtype == torch.float64
    expert_of = [e for e, count in enumerate(COUNTS) for _ in range(count)]
    for row, expert in enumerate(expert_of):
        assert torch.allclose(y[row], w[expert].double() @ x[row].double(), rtol=1e-12)
        assert torch.equal(biased[row], y[row] + bias[expert].double())


def test_grouped_gemm_of_quantised_operands():
    x = torch.randn(sum(COUNTS), 64)
    offsets = starts(COUNTS)
    quantised = quantise(x, "nvfp4", global_scale="token", offsets=offsets)
    w = torch.eye(64).expand(len(COUNTS), 64, 64)
    assert torch.equal(grouped_gemm(quantised, w, offsets), dequantise(quantised, offsets=offsets))


def layer_inputs(tokens=9, experts=5, top_k=2, hidden=64, intermediate=32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    w13 = torch.randn(experts, 2 * intermediate, hidden, generator=generator) / 8
    w2 = torch.randn(experts, hidden, intermediate, generator=generator) / 6
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k].int()
    return x, w13, w2, (ids, torch.rand(tokens, top_k, generator=generator))


def test_layer_token_by_token():
    x, w13, w2, (ids, weights) = layer_inputs()
    y = reference.layer(x, w13, w2, (ids, weights), limit=1.0, alpha=1.702, beta=1.0)
    for token, row in enumerate(x.double()):
        expected = torch.zeros(len(row), dtype=torch.float64)
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            gate, up = (w13[expert].double() @ row).chunk(2)
            gate, up = gate.clamp(max=1), up.clamp(-1, 1)
            h = (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
            expected += weight * (w2[expert].double() @ h)
        assert torch.allclose(y[token], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("fmt", "error"), [("nvfp4", 0.2), ("mxfp4", 0.25), ("mxfp8", 0.08)])
def test_layer_rounds_what_kernels_round(fmt, error):
    x, w13, w2, routed = layer_inputs()
    exact = reference.layer(x, w13, w2, routed)
    rounded = reference.layer(x, w13, w2, routed, fmt=fmt)
    assert rounded.dtype == torch.bfloat16
    assert 0.01 < (rounded - exact).norm() / exact.norm() < error


def test_layer_takes_global_scales():
    """Compare global scales of x and h step by step with the functions that the layer calls."""
    x, w13, w2, (ids, weights) = layer_inputs()
    scales = torch.tensor([700.0]), torch.tensor([900.0])
    layer = reference.layer(
        x, w13, w2, (ids, weights), fmt="nvfp4", x_scale=scales[0], h_scale=scales[1]
    )
    rows = permutation(ids, len(w13))
    token = rows.slot_of_row // ids.shape[1]
    first = quantise(x, "nvfp4", global_scale=scales[0], rows=token, offsets=rows.offsets)
    h = swiglu(*grouped_gemm(first, w13, rows.offsets).float().chunk(2, dim=-1))
    second = quantise(h, "nvfp4", global_scale=scales[1], offsets=rows.offsets)
    y = grouped_gemm(second, w2, rows.offsets).float().bfloat16()
    assert torch.equal(layer, combine(y, weights, rows.row_of_slot).bfloat16())


@pytest.mark.hw
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_gpu_agrees_to_the_bit(fmt):
    form = format_of(fmt)
    x = adversarial_blocks(form)
    for g in SCALES if form.has_global else (None,):
        encode = None if g is None else torch.full((len(x),), g)
        here = quantise_blocks(x, form, encode)
        there = quantise_blocks(x.cuda(), form, None if encode is None else encode.cuda())
        for a, b in zip(here, there, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8).cpu())
    offsets = starts([1, 0, len(x) - 1])
    here = dequantise(quantise(x, fmt, offsets=offsets), offsets=offsets)
    there = quantise(x.cuda(), fmt, offsets=offsets.cuda())
    there = dequantise(there, offsets=offsets.cuda()).cpu()
    assert torch.equal(here.nan_to_num(), there.nan_to_num())


# ---- The reference of routing, expert by expert, slot by slot

LARGEST = torch.finfo(torch.float32).max


def by_expert(logits, top_k, options):
    """Return (ids, weights) of one token: scores from fp32 torch, everything else in plain
    Python."""
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
    """Logits are random, with ties, and partly not finite."""
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
    """gpt-oss and Mixtral: the sum over all experts cancels, except for its rounding."""
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
    """A bias of -inf is still better than an excluded group."""
    bias = torch.tensor([-INF, -INF, 5.0, -INF, -INF, -INF])
    ids, _ = route(torch.zeros(1, 6), 3, bias=bias, n_group=2, topk_group=1)
    assert ids.tolist() == [[2, 0, 1]]


def test_softmax_over_the_chosen_experts():
    """gpt-oss computes softmax with renormalize."""
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
    """1 is lost next to 2^25 in fp32, unless it is added after that cancels: the order shows."""
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
