"""Experts of models: how they are packed, what they compute, and which are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.activations import ACT2FN

from blackwell_engines.transformers import NAME, pack_experts, register
from blackwell_engines.transformers.experts import PACKED, experts_forward
from blackwell_engines.transformers.packing import form_of
from kernelkit.numerics.tolerance import compare_output
from moe import SwiGLU, pack, unpack
from tests.blackwell_engines.transformers.models import (
    MIXTURES,
    decisive,
    generated,
    on_any_device,
    prompt,
    tiny,
)

FORMS = {"gpt-oss": SwiGLU(1.702, 1.0, 7.0), "qwen3-moe": SwiGLU(), "mixtral": SwiGLU()}

register()


def experts_of(model):
    return [layer.mlp.experts for layer in model.model.layers]


def halves(experts):
    """w13 [E, 2I, H], all of gate first, and w2 [E, H, I], as views."""
    w13, w2 = experts.gate_up_proj, experts.down_proj
    if experts.is_transposed:
        w13, w2 = w13.mT, w2.mT
    if not experts.is_concatenated:
        w13 = torch.cat((w13[:, ::2], w13[:, 1::2]), 1)
    return w13, w2


@torch.no_grad()
def on_grid(name, dtype):
    """A model whose experts hold values of mxfp4, as gpt-oss does."""
    model = tiny(name, dtype)
    for experts in experts_of(model):
        w13, w2 = unpack(pack(*halves(experts), "mxfp4"), dtype)
        if not experts.is_concatenated:
            w13 = torch.stack(w13.chunk(2, 1), 2).flatten(1, 2)
        experts.gate_up_proj.copy_(w13.mT if experts.is_transposed else w13)
        experts.down_proj.copy_(w2.mT if experts.is_transposed else w2)
    return model


@pytest.mark.parametrize("name", MIXTURES)
def test_the_activation_is_found(name):
    assert form_of(experts_of(tiny(name, torch.bfloat16))[0]) == FORMS[name]


@pytest.mark.parametrize("name", MIXTURES)
def test_weights_on_the_grid_stay_as_they_are(name):
    experts = experts_of(on_grid(name, torch.bfloat16))[0]
    w13, w2 = halves(experts)
    there = unpack(pack(w13, w2, "mxfp4"), torch.bfloat16)
    assert torch.equal(there[0], w13)
    assert torch.equal(there[1], w2)


@pytest.mark.parametrize("keep", [False, True])
def test_what_a_packed_model_holds(keep):
    model = tiny("gpt-oss", torch.bfloat16)
    before = [*model.state_dict()]
    assert pack_experts(model, keep=keep) is model
    assert model.config._experts_implementation == NAME
    gone = {name for name in before if ".experts." in name} - {*model.state_dict()}
    assert bool(gone) != keep
    packed = experts_of(model)[0].get_submodule(PACKED)
    assert repr(packed) == f"Experts(E=4, H=64, I=64, mxfp4, {FORMS['gpt-oss']})"
    data = packed.w13_data.clone()
    model.half()  # changes no format
    assert packed.bias13.dtype == packed.w13_factor.dtype == torch.float32
    assert torch.equal(packed.w13_data, data)


def changed_experts(**facts):
    """A changed copy, so that the class stays as it was."""
    experts = copy.deepcopy(experts_of(tiny("qwen3-moe", torch.bfloat16))[0])
    for name, value in facts.items():
        setattr(experts, name, value)
    return experts


@pytest.mark.parametrize("fact", ["has_post_expert_norm", "_is_expert_parallel"])
def test_a_version_that_does_not_know_a_fact(fact):
    experts = changed_experts()
    del vars(experts)[fact]
    assert form_of(experts) == form_of(changed_experts())


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"act_fn": ACT2FN["gelu"]}, "another activation than SwiGLU.* has no alpha and no limit"),
        ({"has_gate": False}, "no gate next to up"),
        ({"has_post_expert_norm": True}, "a norm after every expert"),
        ({"_is_expert_parallel": True}, "experts on other ranks"),
    ],
)
def test_other_experts_are_refused(facts, words):
    with pytest.raises(NotImplementedError, match=words):
        form_of(changed_experts(**facts))


@pytest.mark.parametrize("fact", ["alpha", "limit"])
def test_gpt_oss_without_a_part_of_its_activation_is_refused(fact):
    """And not packed as plain SwiGLU."""
    model = tiny("gpt-oss", torch.bfloat16)
    del vars(experts_of(model)[0])[fact]
    with pytest.raises(NotImplementedError, match=f"GptOssExperts lacks a part of its .*'{fact}'"):
        pack_experts(model)


def test_models_that_cannot_be_packed():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        pack_experts(tiny("llama", torch.bfloat16))
    with pytest.raises(ValueError, match=r"fmt 'mxfp8': one of \('mxfp4', 'nvfp4'\)"):
        pack_experts(tiny("gpt-oss", torch.bfloat16), "mxfp8")
    packed = pack_experts(tiny("gpt-oss", torch.bfloat16))
    with pytest.raises(ValueError, match="GptOssForCausalLM has no experts"):
        pack_experts(packed)


def test_experts_that_are_not_packed():
    experts, choices = changed_experts(), torch.zeros(3, 2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"Qwen3MoeExperts is not packed: .*pack_experts\(model\)"):
        experts_forward(experts, torch.ones(3, 64), choices, torch.ones(3, 2))


# ---- on the kernels


@pytest.mark.parametrize("name", MIXTURES)
def test_logits(name, poisoned_outputs):
    """Logits of two models that differ only in the implementation of their experts agree."""

    def logits_of(model, experts):
        model.set_experts_implementation(experts)
        with torch.no_grad():
            return model(prompt(2, 11), use_cache=False).logits

    exact = logits_of(on_grid(name, torch.float32), "eager")
    rounded = logits_of(on_grid(name, torch.bfloat16), "eager")
    ours = logits_of(pack_experts(on_grid(name, torch.bfloat16)), NAME)
    report = compare_output(ours, exact, rounded, torch.bfloat16)
    assert report.ok, str(report)


@pytest.mark.parametrize("compiled", [False, True])
def test_generate(compiled, poisoned_outputs):
    """Kernels compute attention and experts of gpt-oss; the tokens are those of eager."""
    given = decisive(on_grid("gpt-oss", torch.float32), (2, 11))
    model = on_grid("gpt-oss", torch.bfloat16)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    plain = generated(model, given)
    model.set_attn_implementation(NAME)
    how = {"compile_config": on_any_device()} if compiled else {}
    assert torch.equal(generated(pack_experts(model), given, **how), plain)
