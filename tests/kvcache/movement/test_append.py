"""Appends in the emulator, under its checker: the reference's bytes and no other
in the whole pool; and what the reference itself is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.layouts.records import BF16_512, FP8_584, FP8_656
from kvcache.movement import reference
from kvcache.movement.launch import ARCHS
from tests.kvcache.movement.rows_cases import (
    LATENT_CASES,
    Case,
    Plain,
    check_append_rows,
    check_append_swa,
)

GROUPS, GROUP, NOPE = 7, 64, 448
ROWS = [
    Plain(9, (8, 128), (8, 128)),
    Plain(7, (2, 96), (2, 64), torch.float32, apart=4),
    Plain(6, (5,), (9, 7), apart=3, gap=82),
    Plain(6, (68,), dtype=torch.uint8, apart=0, gap=64),
]
SWA = [*LATENT_CASES, Case(FP8_584, 12, dtype="fp32", seed=1), Case(BF16_512, 6, dtype="fp32")]
MORE = [
    Case(record, tokens, slots, rows, gap, holes, dtype, seed)
    for seed, (record, dtype) in enumerate(
        (record, dtype) for record in (FP8_584, BF16_512, FP8_656) for dtype in ("bf16", "fp32")
    )
    for tokens, slots, rows, gap, holes in (
        (1, 1, 1, 16, 0), (33, 3, 11, 16, 2), (64, 2, 128, 96, 9), (300, 40, 9, 16, 3),
    )
]  # fmt: skip

each_arch = pytest.mark.parametrize("arch", ARCHS)


@each_arch
@pytest.mark.parametrize("case", SWA, ids=str)
def test_entries(case, arch):
    check_append_swa(case, arch=arch)


def test_entries_on_the_other_architecture():
    check_append_swa(Case(FP8_584, 5, seed=2), arch="sm_90a")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_entries(case, arch):
    check_append_swa(case, arch=arch)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        Case,
        record=st.sampled_from([FP8_584, BF16_512, FP8_656]),
        tokens=st.integers(0, 40),
        slots=st.integers(1, 9),
        rows=st.integers(1, 65),
        gap=st.integers(0, 5).map(lambda n: 16 * n),
        holes=st.integers(0, 3),
        dtype=st.sampled_from(["bf16", "fp32"]),
        seed=st.integers(0, 1 << 20),
    )
)
def test_any_entries(case):
    check_append_swa(case)


@each_arch
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_rows(case, arch):
    check_append_rows(case, arch=arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tokens", [1, 2, 35])
@pytest.mark.parametrize(
    ("k", "v", "dtype"),
    [
        ((1, 576), (), torch.bfloat16),
        ((128, 128), (128, 128), torch.uint8),  # more vectors than a row's threads have at once
        ((1, 1), (1, 3), torch.uint8),
        ((2, 64), (8, 64), torch.float32),
    ],
    ids=str,
)
def test_more_rows(tokens, k, v, dtype, arch):
    check_append_rows(Plain(tokens, k, v, dtype), arch=arch)
    check_append_rows(replace(Plain(tokens, k, v, dtype), apart=1, gap=84), arch=arch)


@pytest.mark.parametrize("record", [FP8_584, BF16_512], ids=lambda record: record.name)
@pytest.mark.usefixtures("no_launches")
def test_no_tokens(record):
    check_append_swa(Case(record, 0))
    check_append_rows(Plain(0, (8, 16), (4,)))


# -- the reference --------------------------------------------------------------------------------


def published_codes(amax: torch.Tensor) -> torch.Tensor:
    """The exponent byte as FlashMLA's fp32 arithmetic has it: s = 2^ceil(log2(max(.., 1e-4)))."""
    return (amax.float() / 448.0).clamp_min(1e-4).log2().ceil().int() + 127


def test_scales_of_all_magnitudes():
    """Every finite bf16 as the largest of its group."""
    tops = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    entries = torch.zeros(-(-len(tops) // GROUPS) * GROUPS, GROUP, dtype=torch.bfloat16)
    entries[: len(tops), 5] = -tops
    rope = torch.zeros(len(entries) // GROUPS, 64, dtype=torch.bfloat16)
    data, scales = reference.quantised(torch.cat((entries.view(-1, NOPE), rope), 1))
    codes = scales[:, :GROUPS].flatten()[: len(tops)].int()
    assert torch.equal(codes, published_codes(tops))
    assert not scales[:, GROUPS].any()
    elements = data[:, :NOPE].view(torch.float8_e4m3fn).float().view(-1, GROUP)[: len(tops), 5]
    back = elements.double() * torch.exp2(codes.double() - 127)
    error = (back + tops.double()).abs()
    step = torch.exp2(codes.double() - 127 - 9)  # half of the smallest number that e4m3 has
    assert (error <= (tops.double() / 16).clamp(min=0) + step).all()
    assert elements.abs().max() <= 448


def test_a_lost_group_stays_alone():
    entries = torch.ones(3, 512, dtype=torch.bfloat16)
    entries[0, 70], entries[1, 447], entries[2, 448] = math.nan, -math.inf, math.nan
    data, scales = reference.quantised(entries)
    assert scales.tolist() == [
        [*(0xFF if group == lost else 119 for group in range(GROUPS)), 0] for lost in (1, 6, None)
    ]
    groups = data[:, :NOPE].unflatten(1, (GROUPS, GROUP))
    assert (groups[0, 1] == 0x7F).all()
    assert (groups[1, 6] == 0x7F).all()
    assert ((groups == 0x7F).all(-1) == (scales[:, :GROUPS] == 0xFF)).all()
    back = reference.dequantised(data, scales)
    assert torch.equal(back[:, :NOPE].isnan().sum(1), torch.tensor([64, 64, 0]))
    assert torch.equal(back[2, :NOPE], entries[2, :NOPE])


def test_rotation_is_of_neighbours_at_the_end():
    kv = torch.arange(1.0, 513.0).repeat(2, 1)
    angles = torch.arange(32.0).repeat(2, 1) * 0.1
    turned = reference.rotated(kv, angles.cos(), angles.sin()).float()
    exact = torch.polar(torch.ones(32), angles[0]) * torch.view_as_complex(
        kv[0, NOPE:].unflatten(0, (32, 2))
    )
    expected = torch.cat((kv[0, :NOPE], torch.view_as_real(exact).flatten()))
    torch.testing.assert_close(turned[0], expected, rtol=2**-8, atol=1e-2)
    unturned = reference.rotated(kv.bfloat16(), torch.ones(2, 32), torch.zeros(2, 32))
    assert torch.equal(unturned, kv.bfloat16())
