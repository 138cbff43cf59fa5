"""Gate and up of an expert with a global scale each, in every way that a tile is emptied."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lab.problems import grouped_gemm as cases
from lab.problems import mixed_gemm as mixed_cases
from lab.problems.grouped_gemm import Case, checked, same_bits
from lab.problems.mixed_gemm import Case as Mixed
from moe import arrange, fused_moe, pack, unpack
from moe.api import grouped_gemm
from moe.arguments import Router, SwiGLU
from moe.packing import PackedExperts
from moe.quantized import Quantized, laid_out
from moe.reference import dequantise, layer, swizzle_scales, unswizzle_scales
from moe.reference_routing import route

pytestmark = pytest.mark.usefixtures("poisoned_outputs", "three_ctas")

COUNTS, FORM = (5, 0, 37, 2), (1.702, 1.0, 7.0)
PLAIN = Case(COUNTS, 128, 64, "nvfp4", form=FORM, pairs=True)
CASES = [
    replace(PLAIN, tile_rows=64),  # weights are the rows of the MMA: a factor of each thread
    replace(PLAIN, tile_rows=64, per_token=True, bias=True),  # and of each row
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
    """Beside the definition in fp64."""
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
    """Three experts."""
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(3, 256, 128, generator=generator) / 8
    packed = pack(w13, torch.randn(3, 128, 128, generator=generator) / 8, granularity=8)
    w13 = cases.with_pairs(packed.w13, generator, 8)
    return replace(packed, w13=replace(w13))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_layer_of_arranged_experts(arch):
    """Beside the definition, with what it unpacks to."""
    packed, form = layer_with_pairs(), SwiGLU(*FORM)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 128, generator=generator).bfloat16()
    logits = torch.randn(5, 3, generator=generator)
    with checked():
        y = fused_moe(x, arrange(packed), logits, Router(2), activation=form, arch=arch)
    wanted = layer(x, *unpack(packed), route(logits, 2), **vars(form))
    assert (y.double() - wanted).norm() < 5e-3 * wanted.norm()


def test_experts_know_how_gate_and_up_alternate(no_compile):
    """Also those that were made of tensors alone, such as a file's."""
    packed = layer_with_pairs()
    assert packed.w13.granularity == 8
    with pytest.raises(ValueError, match="not by how many rows they alternate"):
        dequantise(replace(packed.w13))
    with pytest.raises(ValueError, match="w2 has two global scales"):
        replace(packed, w2=replace(packed.w2, **dict.fromkeys(
            ("encode_scale", "decode_scale"), torch.ones(3, 2))))  # fmt: skip
    case = replace(PLAIN, form=None, pairs=False)
    x, w = case.inputs()
    both = dict.fromkeys(("encode_scale", "decode_scale"), torch.ones(len(w.data), 2))
    with pytest.raises(ValueError, match="global scales of gate and of up, but there is no act"):
        grouped_gemm(x, replace(w, **both), case.offsets)
    with pytest.raises(ValueError, match=r"decode_scale has shape|encode_scale has shape"):
        replace(w, **dict.fromkeys(both, torch.ones(len(w.data), 3)))
