"""The table of models: each gives a valid router, and sizes that can be packed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from kernelkit.call.launch import emulation
from lab.flags.moe import ACTIVATIONS, MODELS
from moe import Router, SwiGLU, models
from moe.formats import FORMATS
from moe.reference_routing import route
from moe.routing import route as route_on_gpu
from moe.routing.config import MAX_EXPERTS, MAX_TOP_K, RouteConfig


@pytest.mark.parametrize("name", models.CONFIGS)
def test_every_model_fits_the_kernels(name):
    layer = models.of_model(name)
    router, biases = layer.router, ("bias", "logit_bias")
    given = {bias: bias in layer.router_tensors for bias in biases}
    names = ("top_k", "scoring", "n_group", "topk_group", "renormalize", "shared")
    static = {field: getattr(router, field) for field in names}
    RouteConfig(layer.experts, dtype="fp32", **static, **given).check()
    assert layer.experts + router.shared <= MAX_EXPERTS
    assert router.slots <= MAX_TOP_K
    for form in FORMATS.values():
        assert layer.hidden // form.per_byte % 16 == layer.intermediate // form.per_byte % 16 == 0


@pytest.mark.parametrize("name", models.CONFIGS)
def test_routers_give_weights_that_sum_to_their_scale(name):
    layer = models.of_model(name)
    tensors = {field: torch.zeros(layer.experts) for field in layer.router_tensors}
    router = replace(layer.router, **tensors)
    logits = torch.randn(3, layer.experts, generator=torch.Generator().manual_seed(0))
    ids, weights = route(logits, **vars(router))
    chosen, shared = weights.split((router.top_k, router.shared), dim=-1)
    torch.testing.assert_close(chosen.sum(-1), torch.full((3,), router.scale))
    assert torch.equal(shared, torch.ones_like(shared))
    assert ids[:, router.top_k :].tolist() == [[layer.experts] * router.shared] * 3


def test_what_is_known_of_some():
    gpt_oss, kimi = models.of_model("gpt-oss-20b"), models.of_model("kimi-k2")
    assert (gpt_oss.experts, gpt_oss.router_tensors, gpt_oss.biases) == (32, ("logit_bias",), True)
    assert gpt_oss.activation == SwiGLU(**ACTIVATIONS["gpt-oss"])
    assert kimi.router == Router(8, "sigmoid", scale=2.827, shared=1)
    assert models.of_model("deepseek-v4-pro").activation == SwiGLU(**ACTIVATIONS["deepseek-v4"])
    assert models.of_model("deepseek-v3").router == Router(
        8, "sigmoid", n_group=8, topk_group=4, scale=2.5, shared=1
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_flags_have_the_same_numbers(name):
    layer, flags = models.of_model(name), MODELS[name]
    assert (layer.hidden, layer.intermediate) == (flags["hidden"], flags["intermediate"])
    assert layer.activation == SwiGLU(**ACTIVATIONS[flags["activation"]])
    assert layer.router.scoring == flags["scoring"]


def test_a_model_in_the_kernel():
    """DeepSeek-V3's router with all of its options."""
    layer = models.of_model("deepseek-v3")
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(256, generator=generator) / 8
    logits, router = torch.randn(4, 256, generator=generator), replace(layer.router, bias=bias)
    with emulation():
        ids, weights = route_on_gpu(logits, **vars(router))
    expected_ids, expected = route(logits, **vars(router))
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("config", "words"), [
    ({"model_type": "llama"}, "model_type 'llama': one of gpt_oss, "),
    ({}, "model_type None"),
    ({"model_type": "mixtral", "hidden_size": 8}, "a config of mixtral lacks 'intermediate_"),
])  # fmt: skip
def test_configs_that_are_refused(config, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        models.from_config(config)
    with pytest.raises(ValueError, match="'gpt-2': models are gpt-oss-120b"):
        models.of_model("gpt-2")
