"""Packed experts as a module: their bytes survive moves, copies, state dicts and files."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import moe.fused
from lab.problems.grouped_gemm import checked
from moe import ExpertWeights, PackedExperts, Router, checkpoint, fused_moe, pack
from moe.arguments import Arguments, SwiGLU
from moe.formats import FORMATS

EXPERTS, HIDDEN, INTERMEDIATE = 3, 128, 64
SIZES = EXPERTS, HIDDEN, INTERMEDIATE

torch.manual_seed(0)
W13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN).bfloat16() * HIDDEN**-0.5
W2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE).bfloat16() * INTERMEDIATE**-0.5
BIASES = torch.randn(EXPERTS, 2 * INTERMEDIATE), torch.randn(EXPERTS, HIDDEN)
X, LOGITS = torch.randn(5, HIDDEN).bfloat16(), torch.randn(5, EXPERTS)

each_kind = pytest.mark.parametrize(
    ("fmt", "biases"), [(fmt, biases) for fmt in FORMATS for biases in (None, BIASES)]
)


class Model(torch.nn.Module):
    """A model with experts inside, and one other parameter."""

    def __init__(self, experts: ExpertWeights) -> None:
        super().__init__()
        self.mlp = torch.nn.ModuleDict({"experts": experts})
        self.norm = torch.nn.Parameter(torch.ones(4))


def assert_same(mine: PackedExperts, other: PackedExperts) -> None:
    """Compare every byte, dtypes and names."""
    mine, other = checkpoint.state_dict(mine), checkpoint.state_dict(other)
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


def empty(fmt: str, biases: object, **options) -> ExpertWeights:
    return ExpertWeights.empty(SIZES, fmt, biases=biases is not None, **options)


@each_kind
def test_a_state_dict_goes_round(fmt, biases, tmp_path):
    packed = pack(W13, W2, fmt, biases=biases)
    model = Model(ExpertWeights(packed))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = Model(empty(fmt, biases))
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert_same(other.mlp["experts"].packed, packed)
    meta = Model(empty(fmt, biases, device="meta"))
    meta.load_state_dict(model.state_dict(), assign=True)
    assert_same(meta.mlp["experts"].packed, packed)


@each_kind
def test_files_of_modules_are_files_of_packed_experts(fmt, biases, tmp_path):
    packed, path = pack(W13, W2, fmt, biases=biases, granularity=16), tmp_path / "m.safetensors"
    save_file(Model(ExpertWeights(packed)).state_dict(), path)
    assert_same(checkpoint.load(path)["mlp.experts"], packed)
    checkpoint.save(path, {"mlp.experts": packed})
    other = Model(empty(fmt, biases, granularity=16))
    missing = other.load_state_dict(load_file(path), strict=False).missing_keys
    assert missing == ["norm"]
    assert_same(other.mlp["experts"].packed, packed)


@each_kind
def test_only_the_device_changes(fmt, biases):
    packed = pack(W13, W2, fmt, biases=biases)
    model = Model(ExpertWeights(packed))
    assert model.mlp["experts"].packed is packed
    model.to(torch.bfloat16).half()
    assert model.norm.dtype == torch.float16
    assert_same(model.mlp["experts"].packed, packed)
    assert_same(copy.deepcopy(model).mlp["experts"].packed, packed)
    model.to("meta")
    moved = model.mlp["experts"].packed
    assert (moved.w13.data.device.type, moved.fmt) == ("meta", fmt)
    assert all(bias is None or bias.device.type == "meta" for bias in moved.biases)


def test_memory_is_shared():
    packed = pack(W13, W2, biases=BIASES)
    module = ExpertWeights(packed)
    assert module.state_dict()["bias13"].data_ptr() == packed.bias13.data_ptr()
    assert not [*module.parameters()]
    module.bias2.zero_()
    assert not module.packed.bias2.any()
    module.bias2 = torch.ones_like(module.bias2)
    assert module.packed.bias2.all()
    assert f"E={EXPERTS}, H={HIDDEN}, I={INTERMEDIATE}, nvfp4" in repr(module)


@pytest.mark.parametrize(("other", "words"), [
    ({"fmt": "mxfp4"}, "mlp.experts.layout is .*mxfp4.*, these experts are .*nvfp4"),
    ({"granularity": 8}, "'granularity': 8"),
    ({"biases": BIASES}, "'version': 2"),
])  # fmt: skip
def test_other_layouts_are_refused(other, words):
    state = Model(ExpertWeights(pack(W13, W2, **other))).state_dict()
    with pytest.raises(RuntimeError, match=words):
        Model(ExpertWeights(pack(W13, W2))).load_state_dict(state)


def test_global_scales_of_gate_and_of_up_go_round():
    packed = pack(W13, W2, "nvfp4")
    both = torch.rand(EXPERTS, 2) + 0.5
    w13 = replace(packed.w13, encode_scale=both, decode_scale=both.reciprocal())
    packed = replace(packed, w13=w13)
    other = ExpertWeights.empty(SIZES, pairs=True)
    other.load_state_dict(ExpertWeights(packed).state_dict())
    assert_same(other.packed, packed)
    assert other.packed.w13.granularity == packed.granularity
    with pytest.raises(RuntimeError, match=r"'pairs': True.*these experts are"):
        ExpertWeights.empty(SIZES).load_state_dict(ExpertWeights(packed).state_dict())


def test_what_is_no_pack():
    with pytest.raises(TypeError, match="packed is Tensor, expected PackedExperts"):
        ExpertWeights(W13)
    with pytest.raises(ValueError, match=r"K = 100 in nvfp4"):
        ExpertWeights.empty((2, 100, 64))


@pytest.mark.usefixtures("poisoned_outputs", "three_ctas")
def test_a_call_is_that_of_the_function():
    """Eager, and in a graph of torch.compile."""
    packed, form = pack(W13, W2, "mxfp8"), SwiGLU(limit=2.0)
    module, router = ExpertWeights(packed), Router(2)

    def step(x, logits):
        return module(x * 2, logits, router, activation=form) + 1

    with checked():
        wanted = fused_moe(X * 2, packed, LOGITS, router, activation=form) + 1
        assert torch.equal(step(X, LOGITS), wanted)
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(X, LOGITS), wanted)


@pytest.mark.usefixtures("three_ctas")
def test_both_products_are_given_their_bias(monkeypatch):
    seen = []

    def watched(*given, bias=None, **options):
        seen.append(bias)
        return Arguments(*given, **options)

    monkeypatch.setattr(moe.fused, "Arguments", watched)
    packed = pack(W13, W2, "mxfp8", biases=BIASES)
    with checked():
        fused_moe(X, packed, LOGITS, Router(2))
        fused_moe(X, pack(W13, W2, "mxfp8"), LOGITS, Router(2))
    assert [None if bias is None else bias.data_ptr() for bias in seen] == [
        packed.bias13.data_ptr(), packed.bias2.data_ptr(), None, None,
    ]  # fmt: skip
