"""Rows of attention do not depend on other queries, nor on keys of other entries and heads."""

from __future__ import annotations

import math

import pytest
import torch

from fmha import attention
from kernelkit.call.tensors import DTYPES
from lab.problems.attention import Case
from lab.soak.rows import family
from lab.soak.rows.attend import AttentionProblem, Kind
from lab.soak.rows.family import Trial
from lab.tools.place import Place
from tests.support.rows import changed, each_kind

SUBJECTS = [each for each in family.SUBJECTS if each.name == "fmha.attention"]
TILES = Case(16, 300, dtype="fp16", rescale_log2=4.0, amplitude=2.0)  # some maxima lag


@each_kind(SUBJECTS)
def test_other_rows_keep_their_bits(subject, number):
    assert not changed(subject, number, problems=20)


@pytest.mark.parametrize("contents", ["1,000 times as large", "NaN"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
def test_a_row_that_asks_for_a_maximum_moves_no_other(arch, contents):
    kind = Kind(TILES, (None, None), arch)
    problem = AttentionProblem(kind, 0, 3, contents, TILES, "query", 0, 0)
    assert Trial(problem, Place("emulate", arch, "a test")).repeats()


COLUMN, TOKENS, BEHIND = 5, 256, 250


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [("sm_100a", "bf16"), ("sm_90a", "bf16"), ("sm_90a", "e4m3"), ("sm_89", "bf16")],
)
def test_rows_that_do_not_see_a_key(arch, dtype, name):
    """docs/hidden_keys.md: of such a key only V may matter, times 0, in one column, and only if the
    row's query tile reads the key's tile."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, TOKENS, 2, 64
    q, *kv = (torch.randn(shape, generator=generator).to(DTYPES[dtype]) for _ in range(3))
    given = {"q": q} | dict(zip("kv", kv, strict=True))
    lens = torch.tensor([BEHIND], dtype=torch.int32)
    options = {"causal": True, "q_offset": 0, "kv_lens": lens, "arch": arch}
    expected = attention(**given, **options)
    for key, value in ((40, math.nan), (200, math.inf), (BEHIND + 1, math.nan)):
        other = given[name].clone()
        other[0, key, 0, COLUMN] = value
        found = attention(**given | {name: other}, **options)
        before = slice(0, TOKENS if key >= BEHIND else key)
        same = (found == expected)[0, before]
        others = [column for column in range(64) if column != COLUMN]
        assert same[..., others].all()
        assert same[:, 1].all(), "another head"
        if name == "k" or key >= BEHIND:
            assert same.all()
        elif key == 200:
            assert same[:64].all(), "rows whose tiles end before the key"
