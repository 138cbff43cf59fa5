"""vLLM's experts: which checkpoints and options are refused, and what a loaded layer computes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from blackwell_engines.engines import experts
from blackwell_engines.engines.quantization import NAME
from kernelkit.call.launch import emulation
from kernelkit.compile import compiler as kernel_compile
from moe import SwiGLU
from tests.blackwell_engines.experts import KINDS, OAI, by_definition, checkpoint, exact, tokens
from tests.blackwell_engines.vllm import moe_engine as engine

FORMS = {"gpt-oss": OAI}
NAMES = {"gpt-oss": "swigluoai"}
HERE = [-1, 0, 1, -1]  # a rank with experts 1 and 2


@pytest.fixture
def vllm():
    with engine.imported() as module:
        yield module


def test_the_name_is_registered(vllm):
    assert [*engine.METHODS] == [NAME]
    (made,) = engine.METHODS.values()
    assert made.get_config_filenames() == ["hf_quant_config.json"]
    assert made.override_quantization_method({"quant_method": "fp8"}, "fp8") is None


@pytest.mark.parametrize("kind", KINDS)
def test_other_layers_stay_with_vllm(kind, vllm):
    config = engine.config_of(kind)
    assert config.get_quant_method(torch.nn.Linear(1, 1), "q_proj") == "vLLM's for q_proj"
    assert config.get_min_capability() == 90
    assert config.get_supported_act_dtypes() == [torch.bfloat16]


def test_mxfp4_of_other_models_is_refused(vllm):
    (made,) = engine.METHODS.values()
    config = {"quant_method": "mxfp4"}
    with pytest.raises(ValueError, match="MXFP4 of kimi, expected of gpt_oss"):
        made.override_quantization_method(config, NAME, SimpleNamespace(model_type="kimi"))
    with pytest.raises(ValueError, match="the checkpoint has quant_method 'fp8'"):
        made.override_quantization_method({"quant_method": "fp8"}, NAME)


@pytest.mark.parametrize(
    ("kind", "config", "given", "words"),
    [
        ("modelopt", {"ignore": ["mlp"]}, {}, "the checkpoint excludes mlp"),
        ("nvfp4", {"ignore": ["mlp"]}, {}, r"mlp\.0\.gate_proj has weights None"),
        ("nvfp4", {"up": 32}, {}, "mlp has weights in two formats"),
        ("mxfp4", {}, {"activation": "gelu"}, "activation 'gelu'"),
        ("mxfp4", {}, {"is_lora_enabled": True}, "no experts with LoRA"),
        ("mxfp4", {}, {"moe_backend": "marlin"}, "--moe-backend marlin with"),
        ("mxfp4", {}, {"use_all2all_kernels": True}, "no experts with --all2all-backend deepep_v2"),
    ],
)
def test_refusals(kind, config, given, words, vllm):
    with pytest.raises((ValueError, NotImplementedError), match=words):
        engine.RoutedExperts(engine.config_of(kind, **config), "mlp", **given)


def test_online_quantisation_is_refused(vllm):
    config = engine.config_of("modelopt")
    config.online_quantization_config = object()
    with pytest.raises(ValueError, match="quantization_config with"):
        engine.RoutedExperts(config, "mlp")


def test_forms(vllm):
    def form(name, **given):
        return vllm.form_of(engine.moe_config(name, **given))

    assert form("silu") == (SwiGLU(), "gate_up")
    assert form("silu", swiglu_limit=10.0) == (SwiGLU(limit=10.0), "gate_up")
    assert form("swigluoai") == (OAI, "alternating")
    given = {"swiglu_alpha": 1.5, "swiglu_beta": 1.0, "swiglu_limit": 7.0}
    assert form("swigluoai_uninterleave", **given) == (SwiGLU(1.5, 1.0, 7.0), "gate_up")


def made(kind: str, here: list[int] | None = None, **given):
    layer = engine.RoutedExperts(
        engine.config_of(kind), "mlp", here, activation=NAMES.get(kind, "silu"), **given
    )
    layer.load(checkpoint(kind))
    return layer


def judge(kind, found, x, ids, weights):
    wanted = exact(checkpoint(kind), x, ids, weights, FORMS.get(kind, SwiGLU()))
    top = wanted.abs().max()
    torch.testing.assert_close(found.double() / top, wanted / top, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("here", [None, HERE])
def test_by_definition(kind, here, vllm, monkeypatch):
    calls = by_definition(monkeypatch)
    layer = made(kind, here)
    assert not [*layer.parameters()]
    x, ids, weights = tokens(5)
    found = layer(x, ids, weights)
    assert calls == [0, 5]
    if here:
        ids = torch.where((ids == 1) | (ids == 2), ids, -1)
    judge(kind, found, x, ids, weights)


def test_a_layer_without_weights_does_not_run(vllm):
    layer = engine.RoutedExperts(engine.config_of("modelopt"), "mlp")
    with pytest.raises(RuntimeError, match="mlp has no experts"):
        layer(*tokens(2))
    with pytest.raises(ValueError, match=r"mlp: .*was it loaded"):
        layer.quant_method.process_weights_after_loading(layer)


def test_a_ranks_share_of_gpt_oss_is_whole_blocks(vllm):
    config = engine.config_of("gpt-oss")
    layer = engine.RoutedExperts(config, "mlp", activation="swigluoai")
    assert layer.quant_method.maybe_roundup_sizes(2880, 720, None, None) == (2880, 736)
    assert not layer.quant_method.stored.padded


def test_steps_of_all_ranks_are_warmed(vllm, monkeypatch):
    by_definition(monkeypatch)
    seen = []
    monkeypatch.setattr(experts, "compile_all", lambda stored, tokens, *_: seen.append(tokens))
    made("mxfp4", dp_size=3)
    assert seen == [48]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_kernels(kind, arch, vllm, monkeypatch):
    with emulation(arch=arch):
        layer = made(kind, HERE, max_num_tokens=9)
        monkeypatch.setattr(kernel_compile, "_make", None)  # nothing compiles while requests wait
        for count in (1, 9):
            x, ids, weights = tokens(count)
            found = layer(x, ids, weights)
            ids = torch.where((ids == 1) | (ids == 2), ids, -1)
            wanted = exact(checkpoint(kind), x, ids, weights, FORMS.get(kind, SwiGLU()))
            assert (found.double() - wanted).norm() <= 0.01 * wanted.norm()
