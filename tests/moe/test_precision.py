"""The precision of a layer, and the activation of a model's experts, are chosen and not assumed."""

from __future__ import annotations

import warnings
from dataclasses import replace
from tempfile import TemporaryDirectory

import pytest
import torch

from kernelkit.call.tensors import as_meta
from kernelkit.compile.compiler import collecting
from kernelkit.compile.warm import counts
from moe import (
    ArrangedExperts,
    Chosen,
    ExpertWeights,
    Router,
    SwiGLU,
    arrange,
    fused_moe,
    fused_moe_plan,
    pack,
    pack_experts,
    pack_gpt_oss,
    warmup,
)
from moe.checkpoint import load, save
from moe.fused import Layer, run_layer
from moe.mixed.layer import MixedLayer
from moe.mixed.layer import run_layer as run_mixed
from moe.models import CONFIGS, from_config
from moe.warm import kernels_for
from tests.moe.hub_files import LAYER, gpt_oss, matrix, write

EXPERTS, HIDDEN, INNER = 3, 128, 128
X, LOGITS = torch.zeros(0, HIDDEN).bfloat16(), torch.zeros(0, EXPERTS)  # no launch
W13, W2 = torch.randn(EXPERTS, 2 * INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)
FORM = SwiGLU(1.702, 1.0, 7.0)


def packed(fmt: str):
    return pack(W13, W2, fmt)


def call(experts, **options) -> torch.Tensor:
    return fused_moe(X, experts, LOGITS, Router(2), **options)


# -- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("function", [fused_moe, fused_moe_plan])
def test_four_bits_that_nobody_asked_for_warn_at_the_callers_line(function, fmt):
    """An old call goes on working."""
    words = rf"quantised to {fmt}.*activations='{fmt}'.*moe.arrange\(experts\) for bf16"
    with pytest.warns(FutureWarning, match=words) as seen:
        function(X, packed(fmt), LOGITS, Router(2))
    assert [each.filename for each in seen] == [__file__]


@pytest.mark.parametrize(("make", "options"), [
    (lambda: packed("nvfp4"), {"activations": "nvfp4"}),
    (lambda: packed("mxfp4"), {"activations": "mxfp8"}),
    (lambda: packed("mxfp8"), {}),
    (lambda: packed("mxfp8"), {"activations": "mxfp8"}),
    (lambda: arrange(packed("nvfp4")), {}),
    (lambda: arrange(packed("nvfp4")), {"activations": "bf16"}),
    (lambda: arrange(packed("mxfp4"), "e4m3"), {"activations": "e4m3", "arch": "sm_90a"}),
])  # fmt: skip
def test_a_choice_does_not_warn(make, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(make(), **options).shape == (0, HIDDEN)


@pytest.mark.parametrize(("make", "activations", "words"), [
    (lambda: packed("nvfp4"), "mxfp8", r"one of \['nvfp4'\]; for 'bf16' or 'e4m3' pass moe.arran"),
    (lambda: packed("mxfp4"), "nvfp4", r"one of \['mxfp4', 'mxfp8'\]"),
    (lambda: arrange(packed("nvfp4")), "nvfp4", "arranged for 'bf16': pass that, or None"),
    (lambda: arrange(packed("mxfp4"), "e4m3"), "bf16", "arranged for 'e4m3'"),
])  # fmt: skip
def test_another_precision_than_the_weights_have_is_refused(make, activations, words):
    with pytest.raises(NotImplementedError, match=words):
        call(make(), activations=activations)


# -- the activation of a model --------------------------------------------------------------------


@pytest.fixture
def of_gpt_oss(tmp_path):
    folder = write(tmp_path, gpt_oss(EXPERTS, HIDDEN, INNER))
    return pack_gpt_oss(folder, f"{LAYER}.experts")


def through_a_file(experts):
    with TemporaryDirectory() as folder:
        save(f"{folder}/packed.safetensors", {"layer": experts, "other": packed("mxfp4")})
        found = load(f"{folder}/packed.safetensors")
    assert found["other"].model_type is None
    return found["layer"]


@pytest.mark.parametrize("kept", [
    lambda experts: experts,
    arrange,
    lambda experts: replace(experts),
    lambda experts: ExpertWeights(experts).to("cpu").packed,
    lambda experts: through_a_file(experts),
], ids=["packed", "arranged", "replaced", "module", "file"])  # fmt: skip
def test_experts_of_gpt_oss_need_their_activation(of_gpt_oss, kept):
    experts = kept(of_gpt_oss)
    options = {"activations": getattr(experts, "fmt", "bf16")}
    words = r"activation is missing: experts of gpt_oss .* such as SwiGLU\(1.702, 1.0, 7.0\)"
    for function in (fused_moe, fused_moe_plan):
        with pytest.raises(ValueError, match=words):
            function(X, experts, LOGITS, Router(2), **options)
    with pytest.raises(ValueError, match=words):
        warmup(X, experts, LOGITS, Router(2), tokens=[1], **options)
    assert call(experts, activation=FORM, **options).shape == (0, HIDDEN)


@pytest.mark.parametrize(("config", "needed"), [
    ('{"model_type": "deepseek_v4"}', True), ('{"model_type": "deepseek_v3"}', False),
    ("{}", False), (None, False),
])  # fmt: skip
def test_the_config_beside_a_checkpoint_names_the_model(tmp_path, config, needed):
    tensors = {}
    for projection in ("w1", "w2", "w3"):
        found = matrix("deepseek-v4", INNER, HIDDEN, 1, 1.0)  # as large as HIDDEN
        tensors |= {f"experts.0.{projection}.{name}": each for name, each in found.items()}
    folder = write(tmp_path, tensors)
    if config:
        (folder / "config.json").write_text(config)
    experts = pack_experts(folder, ["experts.0"])
    given = X, experts, LOGITS[:, :1], Router(1)
    if needed:
        with pytest.raises(ValueError, match=r"experts of deepseek_v4 .* SwiGLU\(limit=10.0\)"):
            fused_moe(*given, activations="mxfp8")
    else:
        assert fused_moe(*given, activations="mxfp8").shape == (0, HIDDEN)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "deepseek-v4-pro"])
def test_a_config_without_its_limit_is_refused(name):
    config = dict(CONFIGS[name])
    lacking = {key: value for key, value in config.items() if key != "swiglu_limit"}
    for wrong in (lacking, {**config, "swiglu_limit": None}):
        with pytest.raises(ValueError, match=r"(lacks|without) 'swiglu_limit'"):
            from_config(wrong)


# -- warm-up --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: packed("mxfp8"), lambda: arrange(packed("mxfp4"))])
@pytest.mark.parametrize("count", [1, 5, 700])
def test_a_warm_up_knows_the_kernels_of_choices(make, count):
    """The kernels are those that a layer takes, without a router."""

    def given(tokens: int) -> tuple:
        chosen = Chosen(torch.zeros(tokens, 2, dtype=torch.int32), torch.zeros(tokens, 2))
        return torch.zeros(tokens, HIDDEN).bfloat16(), experts, chosen

    experts = make()
    warmed = kernels_for(*given(9), None, counts("tokens", [count]))
    x, _, chosen = given(count)
    layer = MixedLayer if isinstance(experts, ArrangedExperts) else Layer
    whole = as_meta(layer(x, None, experts, Router(2), chosen=chosen, arch="sm_100a"))
    with collecting() as keys:
        (run_mixed if layer is MixedLayer else run_layer)(whole)
    assert set(keys) == set(warmed)
    names = {type(key.config).__name__ for key in keys}
    if layer is MixedLayer and count < 700:
        assert names == {"FewConfig"}
    else:
        assert names >= {"PermutationConfig", "CombineConfig"}
    assert not any(type(key.config).__name__ == "RouteConfig" for key in keys)
