"""SGLang's experts: which checkpoints and options are refused, and what a loaded layer computes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from blackwell_engines.engines.quantization import NAME
from blackwell_engines.sglang import quantization
from kernelkit.call.launch import emulation
from kernelkit.compile import compiler as kernel_compile
from moe import SwiGLU
from tests.blackwell_engines.experts import KINDS, OAI, by_definition, checkpoint, exact, tokens
from tests.blackwell_engines.sglang import moe_engine as engine

GPT_OSS = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}


@pytest.fixture
def sglang():
    with engine.imported() as module:
        yield module


def test_the_name_is_registered_once_and_first(sglang):
    quantization.register()
    assert [*engine.METHODS] == [NAME, "fp8"]
    assert engine.CHOICES == ["fp8", NAME]
    ours = engine.METHODS[NAME]
    assert ours.override_quantization_method({"quant_method": "fp8"}, "fp8") is None
    with pytest.raises(ValueError, match="the checkpoint has quant_method 'fp8'"):
        ours.override_quantization_method({"quant_method": "fp8"}, NAME)


@pytest.mark.parametrize("kind", KINDS)
def test_other_layers_stay_with_sglang(kind, sglang):
    config = engine.config_of(kind)
    assert config.get_quant_method(torch.nn.Linear(1, 1), "q_proj") == "SGLang's for q_proj"
    assert config.get_min_capability() == 90
    assert config.get_supported_act_dtypes() == [torch.bfloat16]


@pytest.mark.parametrize(
    ("config", "given", "words"),
    [
        ({"ignore": ["mlp"]}, {}, "the checkpoint excludes mlp"),
        ({}, {"activation": "gelu"}, "activation 'gelu'"),
        ({}, {"is_gated": False}, "activation 'silu' without a gate"),
        ({}, {"no_combine": True}, "no experts with no_combine"),
        ({}, {"hidden_size": 256}, "pads tokens from 128 to 256; pass --moe-runner-backend triton"),
    ],
)
def test_refusals(config, given, words, sglang):
    with pytest.raises((ValueError, NotImplementedError), match=words):
        engine.FusedMoE(engine.config_of("modelopt", **config), "mlp", **given)


def test_other_dispatchers_are_refused(sglang, monkeypatch):
    monkeypatch.setattr(engine.A2A, "is_none", lambda: False)
    with pytest.raises(NotImplementedError, match="no experts with --moe-a2a-backend"):
        engine.FusedMoE(engine.config_of("modelopt"), "mlp")


def test_forms(sglang):
    def form(**given):
        return sglang.form_of(engine.runner_config(**given))

    assert form() == (SwiGLU(), "gate_up")
    assert form(swiglu_limit=10.0) == (SwiGLU(limit=10.0), "gate_up")
    assert form(**GPT_OSS) == (OAI, "alternating")
    halves = {"gate_up_interleaved": False, "gemm1_beta": 0.5}
    assert form(**GPT_OSS, **halves) == (SwiGLU(1.702, 0.5, 7.0), "gate_up")


@pytest.mark.parametrize(
    ("given", "most"),
    [({}, 16), ({"chunked_prefill_size": -1}, 64), ({"max_running_requests": 99}, 99)],
)
def test_most_tokens(given, most, sglang):
    assert sglang.most_tokens(SimpleNamespace(**{**vars(engine.SERVER), **given})) == most


def made(kind: str, *experts: int):
    other = {"with_bias": True, **GPT_OSS} if kind == "gpt-oss" else {}
    layer = engine.FusedMoE(engine.config_of(kind), "mlp", *experts, **other)
    layer.load(checkpoint(kind))
    return layer


def form_of(kind: str) -> SwiGLU:
    return OAI if kind == "gpt-oss" else SwiGLU()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("experts", [(), (1, 3)])
def test_by_definition(kind, experts, sglang, monkeypatch):
    calls = by_definition(monkeypatch)
    layer = made(kind, *experts)
    assert not [*layer.parameters()]
    x, ids, weights = tokens(5)
    found = layer(x, ids, weights)
    assert calls == [0, 5]
    if experts:
        ids = torch.where((ids == 1) | (ids == 2), ids, -1)
    wanted = exact(checkpoint(kind), x, ids, weights, form_of(kind))
    top = wanted.abs().max()
    torch.testing.assert_close(found.double() / top, wanted / top, rtol=0.02, atol=0.01)


def test_a_layer_without_weights_does_not_run(sglang):
    layer = engine.FusedMoE(engine.config_of("modelopt"), "mlp")
    with pytest.raises(RuntimeError, match="mlp has no experts"):
        layer(*tokens(2))
    with pytest.raises(ValueError, match=r"mlp: .*was it loaded"):
        layer.quant_method.process_weights_after_loading(layer)


def test_choices_in_another_form_are_refused(sglang, monkeypatch):
    by_definition(monkeypatch)
    layer = made("mxfp4")
    x, ids, weights = tokens(2)
    given = SimpleNamespace(hidden_states=x, topk_output=engine.Chosen(weights, ids, "bypassed"))
    with pytest.raises(NotImplementedError, match="choices in bypassed"):
        layer.quant_method.apply(layer, given)


def test_a_ranks_share_of_gpt_oss_is_whole_blocks(sglang):
    config = engine.config_of("gpt-oss")
    layer = engine.FusedMoE(config, "mlp", with_bias=True, rows=40, **GPT_OSS)
    assert layer.w2_weight.shape[2] * 2 == 64
    assert layer.quant_method.stored.padded


@pytest.mark.parametrize("kind", ["gpt-oss", "modelopt"])
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_kernels(kind, arch, sglang, monkeypatch):
    with emulation(arch=arch):
        layer = made(kind, 1, 3)
        monkeypatch.setattr(kernel_compile, "_make", None)  # nothing compiles while requests wait
        x, ids, weights = tokens(9)
        found = layer(x, ids, weights)
    ids = torch.where((ids == 1) | (ids == 2), ids, -1)
    wanted = exact(checkpoint(kind), x, ids, weights, form_of(kind))
    assert (found.double() - wanted).norm() <= 0.01 * wanted.norm()
