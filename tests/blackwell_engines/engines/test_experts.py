"""Experts of engines: checkpoints that are taken, parameters, packing bit for bit, choices."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import moe.warm
from blackwell_engines.engines import experts as module
from blackwell_engines.engines.experts import StoredExperts, compute, local_ids
from blackwell_engines.engines.quantization import GROUPS, kind_of, scheme_of
from kernelkit.numerics import e2m1
from lab.house.source import ROOT
from moe import Chosen, SwiGLU, arrange, unpack, unpack_biases
from tests.blackwell_engines.experts import (
    EXPERTS,
    HIDDEN,
    INNER,
    KINDS,
    OAI,
    TOP_K,
    by_definition,
    checkpoint,
    exact,
    layer,
    tokens,
)

NVFP4 = {"quantization": {"quant_algo": "NVFP4"}, "producer": {"name": "modelopt"}}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gpt_oss_mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
        ({"quant_method": "modelopt_fp4", "quant_algo": "W4A16_NVFP4"}, "modelopt"),
        (NVFP4, "modelopt"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
    ],
)
def test_checkpoints(config, kind):
    assert kind_of(config) == kind


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION"},
        {"quant_method": "awq", "bits": 4},
        {},
    ],
)
def test_other_checkpoints_are_refused(config):
    with pytest.raises(
        ValueError, match=r"blackwell_kernels: the checkpoint has .* expected MXFP4"
    ):
        kind_of(config)


def test_matrices_of_compressed_tensors():
    def weights(bits: int = 4, kind: str = "float", group: int = 16) -> dict:
        return {"weights": SimpleNamespace(num_bits=bits, type=kind, group_size=group)}

    for group, scheme in GROUPS.items():
        assert scheme_of("x", weights(group=group)) is scheme
    for wrong in (None, weights(8), weights(kind="int"), weights(group=128)):
        with pytest.raises(ValueError, match=r"layer\.3 has weights"):
            scheme_of("layer.3", wrong)


def stored_of(kind: str, **other) -> StoredExperts:
    oai = {"form": OAI, "order": "alternating", "bias": "bias"} if kind == "gpt-oss" else {}
    given = {"top_k": TOP_K, "form": SwiGLU(), **oai, **other}
    return StoredExperts(KINDS[kind], EXPERTS, HIDDEN, INNER, **given)


def loaded(kind: str, stored: StoredExperts) -> dict[str, torch.Tensor]:
    """The parameters as an engine's loader fills them."""
    given = checkpoint(kind)
    tensors = {name: parameter.make() for name, parameter in stored.parameters()}
    if kind == "gpt-oss":
        for name, value in given.whole():
            tensors[name].copy_(value)
        return tensors
    for expert, (*both, down) in enumerate(given.matrices):
        for name, value in down.tensors.items():
            tensors[f"w2_{name}"][expert] = value.squeeze() if value.numel() == 1 else value
        for half, matrix in enumerate(both):
            for name, value in matrix.tensors.items():
                place = tensors[f"w13_{name}"][expert]
                place = place if place.ndim == 1 else place.chunk(2)[half]
                if value.numel() == 1:
                    place[half] = value.squeeze()
                else:
                    place.copy_(value)
    return tensors


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_changes(kind):
    stored, given = stored_of(kind), checkpoint(kind)
    packed = stored.pack(loaded(kind, stored))
    w13, w2 = unpack(packed)
    assert torch.equal(w13, given.w13)
    assert torch.equal(w2, given.w2)
    if given.biases:
        for mine, theirs in zip(unpack_biases(packed), given.biases, strict=True):
            assert torch.equal(mine, theirs.float())
    else:
        assert packed.biases == (None, None)


@pytest.mark.parametrize("kind", KINDS)
def test_faults_are_seen(kind):
    stored, given = stored_of(kind), checkpoint(kind)
    tensors, scales = loaded(kind, stored), f"w13_{KINDS[kind].scales}"
    wrong = replace(stored, order="up_gate").pack(tensors)
    assert not torch.equal(unpack(wrong)[0], given.w13)
    turned = tensors[scales].view(torch.uint8).flip(2).view(tensors[scales].dtype)
    wrong = stored.pack(tensors | {scales: turned})
    assert not torch.equal(unpack(wrong)[0], given.w13)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_do_not_depend_on_the_default_dtype(kind, monkeypatch):
    given, kept = checkpoint(kind), (e2m1._values, e2m1._middle)
    for each in kept:
        each.cache_clear()
    try:
        torch.set_default_dtype(torch.bfloat16)
        stored = stored_of(kind)
        stored.check()
        packed = stored.pack(loaded(kind, stored))
        arranged = arrange(packed)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(unpack(packed)[0], given.w13)
    for name in ("w13", "w2"):
        factors = [getattr(each, name).factor for each in (arranged, arrange(packed))]
        assert factors[0].dtype == torch.float32
        assert torch.equal(*factors)
    for each in kept:
        assert each(torch.device("cpu")).dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_not_loaded_is_named(kind):
    stored, owner = stored_of(kind), torch.nn.Module()
    stored.register(owner, {"weight_loader": print})
    kinds = {n: getattr(p, "quant_method", None) for n, p in owner.named_parameters()}
    assert kinds[f"w13_{KINDS[kind].scales}"] == "block"
    assert all(p.weight_loader is print for p in owner.parameters())
    with pytest.raises(ValueError, match=r"layers\.3: .*expert 0.*was it loaded"):
        stored.take(owner, "layers.3")


def test_sizes_without_a_kernel_are_refused_before_loading():
    with pytest.raises(ValueError, match="K = 40 in mxfp4: a positive multiple of 32"):
        StoredExperts(KINDS["mxfp4"], EXPERTS, HIDDEN, 40, TOP_K, SwiGLU()).register(
            torch.nn.Module(), {}
        )


def test_rows_beyond_a_ranks_share_add_nothing():
    stored = stored_of("gpt-oss", padded=True)
    tensors = {name: parameter.make() for name, parameter in stored.parameters()}
    w13, w2 = unpack(stored.pack(tensors))
    assert not w13.any()
    assert not w2.any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_other_ranks_become_none(dtype):
    ids = torch.tensor([[0, 3], [-1, 1], [2, -1]], dtype=dtype)
    here = torch.tensor([-1, 0, -1, 1], dtype=torch.int32)
    assert local_ids(ids, here).tolist() == [[-1, 1], [-1, 0], [-1, -1]]
    assert local_ids(ids, None) is ids


@pytest.mark.parametrize("kind", ["gpt-oss", "modelopt"])
def test_ranks_sum_to_the_layer(kind, monkeypatch):
    calls, given, stored = by_definition(monkeypatch), checkpoint(kind), stored_of(kind)
    x, ids, weights = tokens(5)
    total = torch.zeros(x.shape, dtype=torch.float64)
    for first in (0, 2):  # experts first and first + 1
        here = torch.full((EXPERTS,), -1, dtype=torch.int32)
        here[first : first + 2] = torch.arange(2, dtype=torch.int32)
        part = {name: each[first : first + 2] for name, each in loaded(kind, stored).items()}
        experts = module.arrange(replace(stored, experts=2).pack(part))
        total += compute(x, experts, ids, weights, stored.form, expert_map=here).double()
    assert calls == [0, 5, 0, 5]
    torch.testing.assert_close(
        total, exact(given, x, ids, weights, stored.form), rtol=0.02, atol=0.02
    )


def test_weights_of_tokens(monkeypatch):
    by_definition(monkeypatch)
    given, stored = checkpoint("mxfp4"), stored_of("mxfp4")
    experts = module.arrange(stored.pack(loaded("mxfp4", stored)))
    x, ids, weights = tokens(3)
    one = ids[:, 1:], torch.full((3, 1), 0.5)
    found = compute(x, experts, *one, SwiGLU(), weigh_tokens=True)
    wanted = exact(given, x * 0.5, one[0], torch.ones(3, 1), SwiGLU())
    torch.testing.assert_close(found.double(), wanted, rtol=0.01, atol=0.01)
    with pytest.raises(ValueError, match="weigh_tokens with 2 experts"):
        compute(x, experts, ids, weights, SwiGLU(), weigh_tokens=True)


@pytest.mark.parametrize("kind", ["gpt-oss", "modelopt"])
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_warmup_lists_the_kernels_of_the_packed_experts(kind, arch, monkeypatch):
    monkeypatch.setattr(module, "warm", lambda keys, progress: keys)
    stored = stored_of(kind)
    experts = arrange(stored.pack(loaded(kind, stored)))
    x, ids, weights = tokens(1)
    given = x, experts, Chosen(ids, weights), None, range(1, 65)
    wanted = moe.warm.kernels_for(*given, activation=stored.form, arch=arch)
    pairs = experts.w13.has_pairs
    assert pairs == (kind == "modelopt")
    assert stored.warmup(range(1, 65), arch=arch, pairs=pairs) == wanted
    if pairs:
        assert stored.warmup(range(1, 65), arch=arch) != wanted


def test_the_example_of_the_readme(monkeypatch):
    by_definition(monkeypatch)
    page = (ROOT / "blackwell_engines" / "engines" / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {}
    torch.manual_seed(0)
    # The example imports `arrange` from moe, where the definition does not replace it.
    exec(example.replace("SwiGLU, arrange", "SwiGLU"), names | {"arrange": module.arrange}, names)
    ids = torch.tensor([[0, 2], [1, -1], [2, -1]])
    packed = names["stored"].pack(names["tensors"])
    given = unpack(packed), unpack_biases(packed)
    wanted = layer(names["x"], *given, (ids, names["weights"]), names["form"])
    assert (names["y"].double() - wanted).norm() <= 0.01 * wanted.norm()
