"""gather in the emulator, under its checker: the reference's bytes; what was appended is back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.layouts.latent import LATENTS
from kvcache.layouts.records import BF16_512, FP8_584, FP8_656, INDEXER_BF16, plain
from kvcache.layouts.rows import Rows
from kvcache.movement import api, reference
from kvcache.movement.launch import ARCHS
from tests.kvcache.movement.rows_cases import (
    LATENT_CASES,
    Case,
    Plain,
    assert_equal,
    check_append_rows,
    check_gather,
    checked,
)

OTHERS = [Case(INDEXER_BF16, 9, gap=80), Case(plain("k", 3, 7), 6, gap=82)]
MORE = [
    Case(record, tokens, slots, rows, gap, holes, seed=seed)
    for record in (FP8_584, BF16_512, FP8_656, plain("k", 8, 128), plain("odd", 1, 5))
    for seed, (tokens, slots, rows, gap, holes) in enumerate(
        ((1, 1, 1, 16, 0), (33, 3, 11, 16, 2), (64, 2, 128, 96, 9), (300, 40, 9, 16, 3))
    )
]
each_arch = pytest.mark.parametrize("arch", ARCHS)


@each_arch
@pytest.mark.parametrize("case", [*LATENT_CASES, *OTHERS], ids=str)
def test_any_bytes(case, arch):
    """Pools hold whatever bytes: every code of e4m3 and of a scale, their NaN too."""
    check_gather(case, arch=arch)


def test_any_bytes_on_the_other_architecture():
    check_gather(Case(FP8_584, 5, seed=2), arch="sm_90a")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more(case, arch):
    check_gather(case, arch=arch)


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Case,
        record=st.sampled_from([FP8_584, BF16_512, FP8_656, plain("k", 1, 9)]),
        tokens=st.integers(0, 40),
        slots=st.integers(1, 9),
        rows=st.integers(1, 65),
        gap=st.integers(0, 5).map(lambda n: 16 * n),
        holes=st.integers(0, 3),
        seed=st.integers(0, 1 << 20),
    )
)
def test_any_case(case):
    check_gather(case)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_element_with_every_scale(arch):
    """256 codes of e4m3 beside 256 of the scale."""
    rows = 256
    pool = torch.zeros(1, rows * 584, dtype=torch.uint8)
    where = Rows(pool, 0, rows * 576, rows, FP8_584)
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    where.data()[0, :, :448] = codes.repeat(2)[:448]
    where.data()[0, 1::2, :448] = codes.flip(0).repeat(2)[:448]
    where.scales()[0] = codes[:, None]
    out, expected = (torch.empty(rows, 512, dtype=torch.bfloat16) for _ in range(2))
    indices = torch.arange(rows)
    with checked():
        api.gather(where, indices, out, arch=arch)
    reference.gather(where, indices, expected)
    assert_equal(out, expected)


@pytest.mark.parametrize("record", [FP8_584, BF16_512, FP8_656], ids=lambda record: record.name)
def test_what_was_appended_comes_back(record):
    """BF16 exactly; FP8 within half a step of e4m3, and unchanged a second time."""
    case = Case(record, 12, holes=0)
    rows, slots = case.build_rows(), case.mapping()
    latent = LATENTS[record.name]
    kv = torch.randn(case.tokens, latent.elements).bfloat16()
    positions, cos, sin = case.rope()
    api.append_swa(rows, kv, positions, slots, cos, sin)
    entries = reference.rotated(kv, cos[positions], sin[positions])
    out = torch.empty_like(kv)
    api.gather(rows, slots, out)
    if record == BF16_512:
        assert torch.equal(out, entries)
        return
    assert torch.equal(out[:, latent.nope :], entries[:, latent.nope :])
    torch.testing.assert_close(out, entries, rtol=2**-4, atol=2**-9 * 5 / 448)
    again = case.build_rows()
    ones = torch.ones(1, 32)
    api.append_swa(again, out, positions * 0, slots, ones, ones * 0)
    api.gather(again, slots, entries)
    assert torch.equal(entries, out)


@pytest.mark.usefixtures("no_launches")
def test_nothing_to_gather():
    check_gather(Case(FP8_584, 0))
    check_gather(Case(BF16_512, 0))


def test_the_check_sees_a_wrong_byte(monkeypatch):
    """Of a test: an entry that the reference puts elsewhere is found."""
    put = reference._put
    monkeypatch.setattr(reference, "_put", lambda view, slots, values: put(view, slots ^ 1, values))
    with pytest.raises(AssertionError, match="bytes differ"):
        check_append_rows(Plain(5, (2, 8)))
