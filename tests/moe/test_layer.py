"""A whole layer in the emulator, from router logits to the combined output, beside its definition.

The error against bfloat16 weights is that of quantising: the kernels add nothing to what the
reference with the same rounding has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from moe import reference, reference_routing
from moe.api import fused_moe
from moe.arguments import Router, Scales, SwiGLU
from moe.packing import pack, unpack
from workbench.problems.grouped_gemm import checked

EXTRA = 1.02  # times the quantisation error of the reference
QUANTISING = {"nvfp4": 0.26, "mxfp4": 0.3, "mxfp8": 0.08}  # of random numbers

pytestmark = pytest.mark.usefixtures("poison", "three_ctas")


@dataclass(frozen=True)
class Layer:
    """hidden, intermediate, experts, tokens: of a model, the last two scaled down. idle: an expert
    that no token chooses."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    tokens: int
    router: Router
    activation: SwiGLU
    idle: int | None = None

    def __str__(self) -> str:
        return self.name


SMALL = Layer("small", 256, 128, 5, 9, Router(2), SwiGLU())
GPT_OSS = Layer("gpt-oss-120b", 2880, 2880, 3, 3, Router(2), SwiGLU(1.702, 1.0, 7.0), idle=1)
DEEPSEEK = Layer(
    "DeepSeek-V4-Pro", 7168, 3072, 3, 2, Router(2, "sqrtsoftplus", scale=2.5), SwiGLU(limit=10.0),
    idle=1,
)  # fmt: skip


def tensors(layer: Layer) -> tuple[torch.Tensor, ...]:
    """x, w13, w2, logits."""
    torch.manual_seed(1)
    x = torch.randn(layer.tokens, layer.hidden)
    w13 = torch.randn(layer.experts, 2 * layer.intermediate, layer.hidden) * layer.hidden**-0.5
    w2 = torch.randn(layer.experts, layer.hidden, layer.intermediate) * layer.intermediate**-0.5
    logits = torch.randn(layer.tokens, layer.experts)
    if layer.idle is not None:
        logits[:, layer.idle] = -20.0
    return x.bfloat16(), w13.bfloat16(), w2.bfloat16(), logits


def compare(layer: Layer, fmt: str, scales: Scales | None = None, **options: int) -> None:
    """Beside bfloat16 weights; `-rP` shows both errors."""
    x, w13, w2, logits = tensors(layer)
    packed = pack(w13, w2, fmt)
    given = {"activation": layer.activation, "scales": scales, **options}
    with checked():
        y = fused_moe(x, packed, logits, layer.router, **given)
    routed = reference_routing.route(logits, **vars(layer.router))
    assert layer.idle is None or layer.idle not in routed[0]
    form = vars(layer.activation)
    exact = reference.layer(x, w13, w2, routed, **form)
    h_scale = scales.h if scales else None
    rounded = reference.layer(x, *unpack(packed), routed, fmt=fmt, h_scale=h_scale, **form)
    errors = [((each.double() - exact).norm() / exact.norm()).item() for each in (y, rounded)]
    print(f"{layer}, {fmt}: relative error {errors[0]:.4f}, of quantising alone {errors[1]:.4f}")
    assert errors[0] <= EXTRA * errors[1], errors
    assert errors[1] < QUANTISING[fmt]


KNOWN = Scales(h=torch.tensor([300.0]))


@pytest.mark.parametrize(
    ("fmt", "scales"),
    [
        ("nvfp4", KNOWN),
        ("nvfp4", None),
        ("mxfp8", None),
    ],
    ids=str,
)
def test_a_small_layer(fmt, scales):
    compare(SMALL, fmt, scales)


def own_group(layer: Layer, fmt: str) -> object:
    """No worker has to do all of them."""
    return pytest.param(layer, fmt, marks=pytest.mark.xdist_group(f"{layer}-{fmt}"))


DECODE = [
    own_group(GPT_OSS, "nvfp4"),
    own_group(DEEPSEEK, "nvfp4"),
    own_group(GPT_OSS, "mxfp4"),
    own_group(GPT_OSS, "mxfp8"),
]


@pytest.mark.parametrize(("layer", "fmt"), DECODE, ids=str)
def test_decode_with_the_sizes_of_models(layer, fmt):
    """A few tokens: weights are the rows of the MMA. One expert has none."""
    compare(layer, fmt, KNOWN if fmt == "nvfp4" else None)


@pytest.mark.xdist_group("moe-prefill")
def test_prefill_with_the_sizes_of_a_model():
    """Tiles of pairs of CTAs, full ones and others, of two experts; the third one has no token."""
    compare(replace(GPT_OSS, tokens=130), "nvfp4", KNOWN, tile_rows=256)
