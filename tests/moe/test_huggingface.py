"""Checkpoints of the hub, packed: their values, gpt-oss compared with its own definition, and
errors.
"""

from __future__ import annotations

import re

import pytest
import torch

from kernelkit.call.launch import emulation
from moe import (
    Router,
    activation_scales,
    arrange,
    fused_moe,
    models,
    pack_experts,
    pack_gpt_oss,
    reference,
    unpack,
    unpack_biases,
)
from moe.checkpoint import from_state_dict, state_dict
from moe.reference_routing import route
from ptxemu import Options
from tests.moe.hub_files import (
    E2M1,
    LAYER,
    SCHEMES,
    experts_of,
    gpt_oss,
    powers,
    values,
    values_of,
    write,
)

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 192, 128
PREFIX = f"{LAYER}.experts"
CHECKED = Options(check=True)
GPT_OSS = gpt_oss(EXPERTS, HIDDEN, INTERMEDIATE)
FORM = models.of_model("gpt-oss-20b").activation


@pytest.fixture(scope="module")
def gpt_oss_folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gpt-oss"), GPT_OSS)


def weight(name: str) -> torch.Tensor:
    """A weight of gpt-oss, fp64 [E, rows, K]."""
    blocks = GPT_OSS[f"{PREFIX}.{name}_blocks"]
    return values(blocks.flatten(2), powers(GPT_OSS[f"{PREFIX}.{name}_scales"]))


def bias(name: str) -> torch.Tensor:
    return GPT_OSS[f"{PREFIX}.{name}_bias"].double()


def layer_of_gpt_oss(x: torch.Tensor) -> torch.Tensor:
    """The model's layer, fp64 [T, H], choice by choice.

    The best logits of a linear layer with a bias become weights by a softmax over them alone. Even
    outputs of an expert's first product are gates, odd ones are up. Gates have an upper limit of 7,
    up has it on both sides. Both products have a bias.
    """
    x, router = x.double(), f"{LAYER}.router"
    logits = x @ GPT_OSS[f"{router}.weight"].double().T + GPT_OSS[f"{router}.bias"].double()
    gate_up, down = weight("gate_up_proj"), weight("down_proj")
    rows = []
    for token, of_token in zip(x, logits, strict=True):
        best = of_token.topk(TOP_K)
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for share, e in zip(best.values.softmax(-1), best.indices, strict=True):
            both = gate_up[e] @ token + bias("gate_up_proj")[e]
            gate, linear = both[0::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
            inner = gate / (1 + torch.exp(-1.702 * gate)) * (linear + 1)
            total += share * (down[e] @ inner + bias("down_proj")[e])
        rows.append(total)
    return torch.stack(rows)


def tokens() -> tuple[torch.Tensor, torch.Tensor, Router]:
    """Return x, logits without their bias, and the router with it."""
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits = (x.double() @ GPT_OSS[f"{LAYER}.router.weight"].double().T).float()
    router = Router(TOP_K, logit_bias=GPT_OSS[f"{LAYER}.router.bias"].float())
    return x, logits, router


def test_gpt_oss_beside_its_own_definition(gpt_oss_folder):
    x, logits, router = tokens()
    packed = pack_gpt_oss(gpt_oss_folder, PREFIX)
    assert (packed.fmt, packed.experts, packed.hidden) == ("mxfp4", EXPERTS, HIDDEN)
    w13, w2 = unpack(packed)
    assert torch.equal(w13, torch.cat((weight("gate_up_proj")[:, ::2],
                                       weight("gate_up_proj")[:, 1::2]), 1))  # fmt: skip
    assert torch.equal(w2, weight("down_proj"))
    routed = route(logits, **vars(router))
    y = reference.layer(x, w13, w2, routed, biases=unpack_biases(packed), **vars(FORM))
    wanted = layer_of_gpt_oss(x)
    assert (y - wanted).norm() < 1e-6 * wanted.norm()  # weights are fp32
    without = reference.layer(x, w13, w2, routed, **vars(FORM))
    assert (y - without).norm() > 0.01 * y.norm()


def test_the_limit_of_gpt_oss_is_met():
    """Otherwise no test would notice a missing limit."""
    both = weight("gate_up_proj") @ tokens()[0].double().T + bias("gate_up_proj")[..., None]
    assert (both[:, ::2] > 7).any()
    assert (both[:, 1::2] < -7).any()


@pytest.mark.usefixtures("poisoned_outputs", "three_ctas")
@pytest.mark.parametrize("fmt", ["bf16", "mxfp8", "mxfp4"])
def test_gpt_oss_in_the_kernels_beside_its_definition(gpt_oss_folder, fmt):
    """Weights are those of the file: the error is that of activations alone. In bf16 the
    activations are Hopper's."""
    x, logits, router = tokens()
    packed, wanted = pack_gpt_oss(gpt_oss_folder, PREFIX), layer_of_gpt_oss(x)
    experts, options, limit = packed, {"activations": fmt}, 0.01
    if fmt == "bf16":
        experts, options = arrange(packed), {"arch": "sm_90a"}
    else:
        given = {"biases": unpack_biases(packed), "fmt": fmt, **vars(FORM)}
        rounded = reference.layer(x, *unpack(packed), route(logits, **vars(router)), **given)
        limit = 1.1 * ((rounded.double() - wanted).norm() / wanted.norm()).item()
    with emulation(CHECKED):
        y = fused_moe(x, experts, logits, router, activation=FORM, **options)
    assert (y.double() - wanted).norm() < limit * wanted.norm()


@pytest.mark.usefixtures("poisoned_outputs", "three_ctas")
def test_gpt_oss_in_the_kernels(gpt_oss_folder):
    x, logits, router = tokens()
    packed = pack_gpt_oss(gpt_oss_folder, PREFIX)
    with emulation():
        y = fused_moe(x, packed, logits, router, activation=FORM, activations="mxfp4").double()
    given = {"biases": unpack_biases(packed), "fmt": "mxfp4", **vars(FORM)}
    expected = reference.layer(x, *unpack(packed), route(logits, **vars(router)), **given)
    assert (y - expected.double()).norm() < 0.02 * expected.double().norm()


@pytest.mark.usefixtures("poisoned_outputs", "two_ctas")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_gpt_oss_with_bf16(arch, gpt_oss_folder):
    """Weights are exact and activations bf16; compared with the model's own definition."""
    x, logits, router = tokens()
    arranged = arrange(pack_gpt_oss(gpt_oss_folder, PREFIX))
    with emulation(arch=arch):
        y = fused_moe(x, arranged, logits, router, activation=FORM).double()
    wanted = layer_of_gpt_oss(x)
    assert (y - wanted).norm() < 4e-3 * wanted.norm()


def test_the_experts_of_a_rank(gpt_oss_folder):
    """Their bytes are those of the whole layer; only they are read."""
    whole = pack_gpt_oss(gpt_oss_folder, PREFIX, granularity=8)
    part = pack_gpt_oss(gpt_oss_folder, PREFIX, expert_range=(1, 3), granularity=8)
    for mine, others in ((part.w13, whole.w13), (part.w2, whole.w2)):
        assert torch.equal(mine.data.view(torch.uint8), others.data.view(torch.uint8)[1:3])
        scales = others.scales.view(torch.uint8).view(EXPERTS, -1)[1:3]
        assert torch.equal(mine.scales.view(torch.uint8), scales.flatten())
    assert torch.equal(part.bias13, whole.bias13[1:3])
    assert torch.equal(part.bias2, whole.bias2[1:3])
    with pytest.raises(ValueError, match=r"expert_range \(2, 5\): at least one of the experts 0"):
        pack_gpt_oss(gpt_oss_folder, PREFIX, expert_range=(2, 5))


NAMES = [f"{PREFIX}.{e}" for e in range(3)] + [f"{LAYER}.shared_experts"]
MIXTRAL = [f"model.layers.0.block_sparse_moe.experts.{e}" for e in range(2)]
USUAL = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(("names", "projections"), [(NAMES, USUAL), (MIXTRAL, ("w1", "w3", "w2"))])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_with_tensors_of_their_own(scheme, names, projections, tmp_path):
    tensors = experts_of(scheme, names, projections, HIDDEN, INTERMEDIATE)
    write(tmp_path, tensors, files=1 if projections == USUAL else 3)
    packed = pack_experts(tmp_path, names)
    assert packed.fmt == ("nvfp4" if scheme in SCHEMES[:2] else "mxfp4")
    w13, w2 = unpack(packed)
    gate, up, down = projections
    for place, name in enumerate(names):
        wanted = [values_of(scheme, tensors, f"{name}.{each}") for each in (gate, up)]
        assert torch.equal(w13[place], torch.cat(wanted))
        assert torch.equal(w2[place], values_of(scheme, tensors, f"{name}.{down}"))
    few = pack_experts(tmp_path, [names[1], names[0], names[1]])
    assert torch.equal(unpack(few)[0], w13[[1, 0, 1]])


@pytest.mark.parametrize("unlike", [(0,), (2,), (1, 3)])
@pytest.mark.parametrize("scheme", SCHEMES[:2])
def test_gate_and_up_may_have_global_scales_of_their_own(scheme, unlike, tmp_path):
    """This is so in the first expert, in a later one, or in several: then each expert has two
    scales."""
    tensors = experts_of(scheme, NAMES, USUAL, HIDDEN, INTERMEDIATE, unlike)
    write(tmp_path, tensors)
    packed = pack_experts(tmp_path, NAMES)
    assert packed.w13.decode_scale.shape == (len(NAMES), 2)
    assert packed.w2.decode_scale.shape == (len(NAMES),)
    w13, _ = unpack(packed)
    for place, name in enumerate(NAMES):
        wanted = [values_of(scheme, tensors, f"{name}.{each}") for each in USUAL[:2]]
        assert torch.equal(w13[place], torch.cat(wanted))
    again = from_state_dict(state_dict(packed))
    assert torch.equal(unpack(again)[0], w13)
    arranged = arrange(packed)
    assert arranged.w13.factor.shape == (len(NAMES), 2)


def test_elements_in_the_dtype_of_float4(tmp_path):
    """torch does not concatenate this dtype."""
    tensors = experts_of("modelopt", NAMES, USUAL, HIDDEN, INTERMEDIATE)
    write(tmp_path, tensors)
    plain = pack_experts(tmp_path, NAMES)
    views = {name: tensor.view(torch.float4_e2m1fn_x2) if name.endswith(".weight") else tensor
             for name, tensor in tensors.items()}  # fmt: skip
    write(tmp_path, views)
    mine = state_dict(pack_experts(tmp_path, NAMES))
    for name, tensor in state_dict(plain).items():
        assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("scheme", SCHEMES[:2])
def test_calibrated_scales_are_the_smallest_of_all(scheme, tmp_path):
    """The largest activations are those of the first expert, whose factors are 1/8 and 1/16."""
    write(tmp_path, experts_of(scheme, NAMES, USUAL, HIDDEN, INTERMEDIATE))
    scales = activation_scales(tmp_path, NAMES)
    assert (scales.x.tolist(), scales.h.tolist()) == ([64.0], [128.0])
    write(tmp_path, experts_of("deepseek-v4", NAMES, USUAL, HIDDEN, INTERMEDIATE))
    with pytest.raises(ValueError, match="is in mxfp4, whose activations have no scale"):
        activation_scales(tmp_path, NAMES)


def test_progress_is_drawn(gpt_oss_folder, capsys):
    pack_gpt_oss(gpt_oss_folder, PREFIX, progress=True)
    assert "packing experts" in capsys.readouterr().out


def changed(name: str, tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The tensors of gpt-oss with one replaced, or removed."""
    others = {key: t for key, t in GPT_OSS.items() if key != f"{PREFIX}.{name}"}
    return others if tensor is None else others | {f"{PREFIX}.{name}": tensor}


@pytest.mark.parametrize(("name", "tensor", "words"), [
    ("down_proj_scales", None, f"no tensor '{PREFIX}.down_proj_scales' in "),
    ("gate_up_proj_blocks", None, f"no tensor '{PREFIX}.gate_up_proj_blocks' in "),
    ("gate_up_proj_bias", None, f"expert 0 of {PREFIX}: no tensor '{PREFIX}.gate_up_proj_bias'"),
    ("down_proj_bias", torch.full((EXPERTS, HIDDEN), torch.inf),
     f"expert 0 of {PREFIX}: biases[1], expert 0: largest magnitude inf, not finite"),
    ("down_proj_bias", torch.zeros(EXPERTS, 3), "biases[1] is torch.float32 (1, 3)"),
    ("gate_up_proj_scales", GPT_OSS[f"{PREFIX}.gate_up_proj_scales"][:, :, :2].clone(),
     "w13.scales has shape (1, 256, 2), expected (1, 256, 6)"),
    ("gate_up_proj_blocks", GPT_OSS[f"{PREFIX}.gate_up_proj_blocks"].flatten(2),
     "gate_up_proj_blocks has shape (1, 256, 96), expected 4 dimensions"),
])  # fmt: skip
def test_what_is_missing_or_wrong_in_gpt_oss(name, tensor, words, tmp_path):
    write(tmp_path, changed(name, tensor))
    with pytest.raises(ValueError, match=re.escape(words)):
        pack_gpt_oss(tmp_path, PREFIX)


def test_what_is_missing_or_wrong_elsewhere(tmp_path, tmp_path_factory):
    tensors = experts_of("modelopt", NAMES, USUAL, HIDDEN, INTERMEDIATE)
    scale = f"{NAMES[2]}.up_proj.weight_scale_2"
    for change, words in (
        ({scale: torch.tensor(-3.0)}, f"{NAMES[2]}: global scale of w13, expert 0: value -3.0"),
        ({scale: None}, f"{NAMES[2]}: no tensor '{scale}'"),
        (
            {f"{NAMES[0]}.gate_proj.weight_scale_2": None},
            f"{NAMES[0]}.gate_proj or w1 in .*: expected the tensors weight, ",
        ),
        ({f"{NAMES[1]}.down_proj.weight": torch.zeros(32, 32).byte()}, f"{NAMES[1]}: w2.scales"),
    ):
        given = {key: t for key, t in (tensors | change).items() if t is not None}
        write(tmp_path, given, files=1)
        with pytest.raises(ValueError, match=words):
            pack_experts(tmp_path, NAMES)
    with pytest.raises(TypeError, match="experts is 'model"):
        pack_experts(tmp_path, NAMES[0])
    with pytest.raises(FileNotFoundError, match="has no safetensors files"):
        pack_gpt_oss(tmp_path_factory.mktemp("empty"), PREFIX)
    with pytest.raises(FileNotFoundError, match="no such file"):
        pack_gpt_oss(tmp_path / "other.safetensors", PREFIX)


def test_the_table_of_elements_is_that_of_the_format():
    assert E2M1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
