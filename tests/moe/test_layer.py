"""A whole layer in the emulator, from router logits to the combined output, beside its definition.

The error against bfloat16 weights is that of quantising: the kernels add nothing to what the
reference with the same rounding has.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernelkit.launch import emulation
from moe import grouped, reference, reference_routing
from moe.layer import Router, Scales, SwiGLU, fused_moe
from moe.packing import pack, unpack
from ptxemu.check.text import render
from tests.moe.grouped_cases import CHECKED

EXTRA = 1.02  # times the quantisation error of the reference


@dataclass(frozen=True)
class Layer:
    """hidden, intermediate, experts, tokens: of a model, the last two scaled down."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    tokens: int
    router: Router
    activation: SwiGLU

    def __str__(self) -> str:
        return self.name


SMALL = Layer("small", 256, 128, 5, 9, Router(2), SwiGLU())
GPT_OSS = Layer("gpt-oss-120b", 2880, 2880, 2, 3, Router(2), SwiGLU(1.702, 1.0, 7.0))
DEEPSEEK = Layer(
    "DeepSeek-V4-Pro", 7168, 3072, 2, 2, Router(2, "sigmoid", scale=2.5), SwiGLU(limit=10.0)
)


@pytest.fixture(autouse=True)
def few_ctas(monkeypatch):
    monkeypatch.setattr(grouped, "_sms", lambda device: 3)


def tensors(layer: Layer) -> tuple[torch.Tensor, ...]:
    """x, w13, w2, logits."""
    torch.manual_seed(1)
    x = torch.randn(layer.tokens, layer.hidden)
    w13 = torch.randn(layer.experts, 2 * layer.intermediate, layer.hidden) * layer.hidden**-0.5
    w2 = torch.randn(layer.experts, layer.hidden, layer.intermediate) * layer.intermediate**-0.5
    logits = torch.randn(layer.tokens, layer.experts)
    return x.bfloat16(), w13.bfloat16(), w2.bfloat16(), logits


def compare(layer: Layer, fmt: str, scales: Scales | None = None) -> None:
    x, w13, w2, logits = tensors(layer)
    packed = pack(w13, w2, fmt)
    with emulation(CHECKED) as active:
        y = fused_moe(x, packed, logits, layer.router, activation=layer.activation, scales=scales)
    for report in active.reports:
        assert not report.findings, render(report)
    routed = reference_routing.route(logits, **vars(layer.router))
    form = vars(layer.activation)
    exact = reference.layer(x, w13, w2, routed, **form)
    h_scale = scales.h if scales else None
    rounded = reference.layer(x, *unpack(packed), routed, fmt=fmt, h_scale=h_scale, **form)
    errors = [((each.double() - exact).norm() / exact.norm()).item() for each in (y, rounded)]
    assert errors[0] <= EXTRA * errors[1], errors
    assert errors[1] < 0.3  # of random numbers: 0.07 in mxfp8, 0.24 in nvfp4, 0.28 in mxfp4


KNOWN = Scales(h=torch.tensor([300.0]))


@pytest.mark.parametrize(
    ("fmt", "scales"), [("nvfp4", KNOWN), ("nvfp4", None), ("mxfp8", None)], ids=str
)
def test_a_small_layer(fmt, scales):
    compare(SMALL, fmt, scales)


@pytest.mark.matrix
@pytest.mark.parametrize("layer", [GPT_OSS, DEEPSEEK], ids=str)
def test_layers_of_models(layer):
    compare(layer, "nvfp4", KNOWN)


def test_what_does_not_fit_is_refused():
    x, w13, w2, logits = tensors(SMALL)
    packed = pack(w13, w2, "mxfp8")
    with pytest.raises(ValueError, match=r"\[T, 256\]"):
        fused_moe(x[:, :128], packed, logits, Router(2))
    with pytest.raises(ValueError, match="5"):
        fused_moe(x, packed, logits[:, :4], Router(2))
    with pytest.raises(NotImplementedError, match="float32"):
        fused_moe(x.float(), packed, logits, Router(2))
