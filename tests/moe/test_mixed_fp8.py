"""Layers on Hopper that multiply activations in e4m3, in the emulator under the checker."""

from __future__ import annotations

import pytest
import torch

from lab.problems.grouped_gemm import checked
from moe import Router, SwiGLU, arrange, fused_moe, pack, reference, unpack, unpack_biases
from moe.mixed.fragments import MOST_BELOW
from moe.mixed.launch import MixedArguments, forward, write_rows
from moe.packing import PackedExperts
from moe.reference_routing import route
from ptxemu import Options

E4M3 = torch.float8_e4m3fn
FORM = SwiGLU(1.702, 1.0, 7.0)
EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 5, 352, 160, 2
SCHEDULES = [Options(check=True), Options("adversarial", 1, check=True)]

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@pytest.fixture(autouse=True)
def _two_ctas(monkeypatch):
    """Two CTAs: each has several tiles, and the ring wraps."""
    monkeypatch.setattr("moe.mixed.launch.sms_of", lambda device: 2)


def packed_experts() -> PackedExperts:
    generator = torch.Generator().manual_seed(2)
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) * HIDDEN**-0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) * INTERMEDIATE**-0.5
    biases = [torch.randn(EXPERTS, rows, generator=generator) for rows in (len(w13[0]), HIDDEN)]
    return pack(w13.bfloat16(), w2.bfloat16(), "mxfp4", biases=tuple(biases))


@pytest.mark.parametrize("h_scale", [1.0, 8.0])
def test_a_layer_beside_torch_that_rounds_alike(h_scale):
    packed = packed_experts()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(21, HIDDEN, generator=generator).bfloat16() * 4
    logits = torch.randn(21, EXPERTS, generator=generator)
    experts = arrange(packed, "e4m3", h_scale=h_scale)
    results = []
    for options in SCHEDULES:
        with checked(options):
            given = {"activation": FORM, "arch": "sm_90a"}
            results.append(fused_moe(x, experts, logits, Router(TOP_K), **given))
    assert torch.equal(*results)
    routed = route(logits, TOP_K)
    given = {"biases": unpack_biases(packed), **vars(FORM)}
    rounding = {"fmt": "e4m3", "h_scale": torch.tensor([h_scale])}
    wanted = reference.layer(x, *unpack(packed), routed, **given, **rounding).double()
    # A code of h near a tie may round either way; the error of bf16 and sums is smaller.
    assert (results[0].double() - wanted).norm() < 0.01 * wanted.norm()
    exact = reference.layer(x, *unpack(packed), routed, **given)
    assert 0.01 < (results[0].double() - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("below", [0, MOST_BELOW - 2, MOST_BELOW + 2])
def test_weights_are_exact_to_2_to_the_11(below):
    """x selects single columns of K, so that the output is the weights. Scale factors of a row also
    differ by 2."""
    generator = torch.Generator().manual_seed(0)
    w2 = torch.randn(1, 64, 96, generator=generator).bfloat16().float()
    w2[..., 32:64] *= 2.0**-below
    packed = pack(torch.zeros(1, 192, 64).bfloat16(), w2, "mxfp4")
    x = torch.eye(96).to(E4M3)
    offsets = torch.tensor([0, 96], dtype=torch.int32)
    given = {"x_scale": torch.ones(1), "arch": "sm_90a"}
    (y,) = forward(MixedArguments(x, arrange(packed, "e4m3").w2, offsets, **given))
    values = unpack(packed)[1][0].T
    off = (y.double() - values).abs()
    assert torch.equal(y.double()[:32], values[:32].bfloat16().double())
    largest = values.abs().amax()
    if below < MOST_BELOW:
        assert off.max() == 0
    else:
        assert 0 < off.max() <= largest * 2.0**-MOST_BELOW / 4


def test_rows_of_every_kind():
    """Each row's largest magnitude becomes 448, zeros stay, and NaN stays in its row."""
    x = torch.randn(7, 48).bfloat16()
    x[1], x[2, 5], x[3], x[4] = 0, torch.nan, x[3] * 1e-38, x[4] * 1e38
    codes, scale = write_rows(x, "e4m3", backend="auto", arch="sm_90a")
    finite = [0, 1, 3, 4, 5, 6]
    assert codes[finite].float().abs().amax(1).tolist() == [448, 0, *codes[3:5].float().abs()
        .amax(1).tolist(), 448, 448]  # fmt: skip
    assert codes[2].float().isnan().any()
    back = codes.double() * scale.double()[:, None]
    for row in finite:
        assert (back[row] - x[row].double()).abs().max() <= x[row].double().abs().max() / 16


def test_refusals():
    packed = packed_experts()
    with pytest.raises(NotImplementedError, match="activations 'fp8'"):
        arrange(packed, "fp8")
    with pytest.raises(ValueError, match="h_scale 0"):
        arrange(packed, "e4m3", h_scale=0.0)
    nvfp4 = pack(torch.zeros(1, 128, 64).bfloat16(), torch.zeros(1, 64, 64).bfloat16(), "nvfp4")
    with pytest.raises(NotImplementedError, match="weights in nvfp4"):
        arrange(nvfp4, "e4m3")
    w2, x = arrange(packed, "e4m3").w2, torch.zeros(4, INTERMEDIATE)
    offsets = torch.zeros(EXPERTS + 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"x is torch\.bfloat16, expected torch\.float8"):
        MixedArguments(x.bfloat16(), w2, offsets).check()
    with pytest.raises(ValueError, match="x_scale is None, expected a tensor"):
        MixedArguments(x.to(E4M3), w2, offsets).check()
    with pytest.raises(ValueError, match="x_scale has 3 scales"):
        MixedArguments(x.to(E4M3), w2, offsets, x_scale=torch.ones(3)).check()
