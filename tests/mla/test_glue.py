"""Rows between projections in the emulator, under its checker: bits of the definition, which is
near fp64; products of the indexer's keys and queries; views of tracers.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kvcache.movement.reference import rotated_rope
from mla.glue import config, reference
from mla.glue.api import norm_rope_append
from mla.glue.config import STORED
from mla.indexer import quantised as index_records
from mla.indexer.formats import GLM5, V32, Rotation
from tests.mla.glue_cases import Case, check

# What a layer of DeepSeek-V3.2 does after its first projections, and one of V4 after its last ones.
QUICK = [
    (Case("fp8_656", "indexer_fp8", rank=1536, rotation=V32), "sm_90a"),
    (Case("fp8_584", heads=3, normed=True, in_place=True, weight="fp32", wide=False), "sm_100a"),
]
V4_KEYS = ("fp8_584", "fp8_528", "bf16_512")
RECORDS = [
    *(Case(name, pairs="halves", wide=False, seed=1) for name in STORED if name != "e4m3_576"),
    Case("e4m3_576", plain=True, seed=2),
    Case("e4m3_576", plain=True, scaled=True, weight="fp32", seed=3),
    Case("bf16_576", plain=True, tokens=40, seed=4),
    Case("bf16_512", plain=True, tokens=1, seed=5),
    *(Case(name, tokens=13, weight="fp32", seed=6) for name in V4_KEYS),
]
OTHERS = [
    Case(index="indexer_fp8", tokens=4, rotation=GLM5, weight="fp32"),
    Case(index="indexer_fp4", tokens=1, wide=False),
    Case(index="indexer_bf16", tokens=7, rotation=Rotation("halves", hadamard=False)),
    Case(heads=3, pairs="halves"),
    Case(heads=5, tokens=3, in_place=True, wide=False),
    Case(heads=2, normed=True, pairs="halves"),
    Case(rank=8), Case(rank=512, in_place=True, weight="fp32"), Case(rank=2056), Case(rank=4096),
    Case("fp8_656", "indexer_fp8", heads=4, rank=1536, tokens=9, rotation=V32, seed=7),
]  # fmt: skip


@pytest.mark.parametrize(("case", "arch"), QUICK, ids=str)
def test_parts_of_a_layer(case, arch):
    check(case, arch=arch)


@pytest.mark.parametrize("case", RECORDS, ids=str)
def test_every_record(case):
    check(case, arch="sm_90a")


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_every_other_part(case):
    check(case, arch="sm_90a")


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120a"])
def test_other_architectures(arch):
    keys = "bf16_576" if arch == "sm_80" else "fp8_656"
    check(Case(keys, "indexer_bf16", heads=2, rank=64), arch=arch, pdl=arch == "sm_120a")


def test_a_config_has_as_many_turns_as_rows():
    parts = config.GlueConfig(
        config.LowRankConfig(1536, "bf16"), config.KeysConfig("fp8_656", "bf16", "halves", True),
        config.IndexConfig("indexer_fp8", "bf16", V32, True), config.QueriesConfig(False, "halves"),
        wide_positions=True,
    )  # fmt: skip
    assert parts.items(5, 3) == 5 + 5 + 3 + 4


def test_the_definition_is_near_fp64():
    """Two steps of fp32 in a row of bf16 at most: the norm's error moves an element over a
    rounding boundary now and then, and never further."""
    x, weight = torch.randn(64, 1536).bfloat16(), torch.rand(1536) + 0.5
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    found = reference.rms_norm(x, weight, 1e-6).double()
    assert ((found - exact).abs() <= exact.abs() * 2.0**-20).all()
    assert (reference.low_rank(x, weight, 1e-6) != exact.bfloat16()).float().mean() < 1e-3
    x, bias = x[:, :128], torch.randn(128)
    exact = torch.nn.functional.layer_norm(
        x.double(), (128,), weight[:128].double(), bias.double(), 1e-6
    )
    found = reference.layer_norm(x, weight[:128], bias, 1e-6).double()
    assert ((found - exact).abs() <= 2.0**-20 * (1.0 + exact.abs())).all()


@pytest.mark.parametrize("rotation", [V32, GLM5, Rotation(hadamard=False)], ids=str)
def test_keys_and_queries_rotated_alike_keep_their_products(rotation):
    """q . k is that of rows that are only rotated, but for the rounding to bf16."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 9, 128, generator=generator)
    angles = torch.rand(2, 9, 32, generator=generator) * 6.0
    first = slice(0, 64) if rotation.rope_first else slice(64, 128)
    plain, prepared = [], []
    for x, angle in ((q, angles[0]), (k, angles[1])):
        rope = angle.cos(), angle.sin()
        row = x.double().clone()
        row[:, first] = rotated_rope(x[:, first].double(), *rope, rotation.pairs)
        plain.append(row)
        prepared.append(index_records.prepared(x, *rope, rotation).double())
    wanted, found = ((a * b).sum(-1) for a, b in (plain, prepared))
    assert torch.allclose(found, wanted, atol=0.25)
    assert (found - wanted).abs().mean() < 0.06


def test_halves_are_neighbours_of_other_columns():
    order = torch.arange(64).view(2, 32).T.flatten()
    x, angle = torch.randn(3, 64), torch.rand(3, 32)
    found = rotated_rope(x, angle.cos(), angle.sin(), "halves")
    assert torch.equal(found[:, order], rotated_rope(x[:, order], angle.cos(), angle.sin()))


def test_tracers_and_no_tokens(monkeypatch):
    monkeypatch.setattr("mla.glue.launch.launch", lambda *_: pytest.fail("launched"))
    norm_rope_append(**Case("fp8_656", heads=2, tokens=0).arguments())
    given = Case(heads=2, rank=64).arguments()
    with FakeTensorMode() as mode:
        fake = functools.partial(_fake, mode)
        assert norm_rope_append(**{name: fake(each) for name, each in given.items()}) is None


def _fake(mode, value):
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value)
    if isinstance(value, tuple):
        return tuple(_fake(mode, each) for each in value)
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(**{name: _fake(mode, each) for name, each in vars(value).items()})
    return value
