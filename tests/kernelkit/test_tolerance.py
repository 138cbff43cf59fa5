"""The tolerance rule, number by number; no special value passes."""

from __future__ import annotations

import math

import pytest
import torch

from kernelkit.numerics.tolerance import compare_lse, compare_output, ulp


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1.0, torch.bfloat16, 2.0**-7),  # 8 significant bits: 1, 1 + 2^-7, ...
        (1.99, torch.bfloat16, 2.0**-7),
        (2.0, torch.bfloat16, 2.0**-6),
        (1.0, torch.float16, 2.0**-10),
        (0.3, torch.float16, 2.0**-12),  # in [1/4, 1/2)
        (0.0, torch.float16, 2.0**-24),  # below the smallest normal: the subnormal spacing
    ],
)
def test_ulp(value, dtype, expected):
    assert ulp(torch.tensor(value, dtype=torch.float64), dtype).item() == expected


def output(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_limit_is_twice_the_reference_error_and_one_ulp_of_the_row():
    exact, rounded = output([1.0, 0.5], [4.0, 0.0]), output([1.0, 0.51], [4.0, 0.0])
    # E = 0.01; rows top at 1 and 4, whose bf16 spacings are 2^-7 and 2^-5.
    report = compare_output(exact + output([0.0, 0.0], [0.0, 0.05]), exact, rounded, torch.bfloat16)
    assert report.ok
    assert report.coordinate == (1, 1)
    assert report.limit == pytest.approx(0.02 + 2.0**-5)
    report = compare_output(exact + output([0.0, 0.03], [0.0, 0.0]), exact, rounded, torch.bfloat16)
    assert not report.ok
    assert report.limit == pytest.approx(0.02 + 2.0**-7)
    assert "OUT OF TOLERANCE" in str(report)
    assert "(0, 1)" in str(report)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_specials_must_agree_first(special):
    exact = output([1.0, 2.0])
    wrong = compare_output(output([1.0, special]), exact, exact, torch.float16)
    assert not wrong.ok
    assert wrong.coordinate == (0, 1)
    agreed = output([1.0, special])
    assert compare_output(agreed, agreed, agreed, torch.float16).ok


def test_opposite_infinities_disagree():
    report = compare_lse(output([math.inf]), output([-math.inf]), output([-math.inf]))
    assert not report.ok


def test_lse_limit():
    exact = output([3.0])
    assert compare_lse(exact + 2.0**-10, exact, exact).ok
    assert not compare_lse(exact + 2.0**-9, exact, exact).ok


def test_nothing_to_compare_is_in_tolerance():
    empty = torch.zeros(0, 4)
    assert compare_output(empty, empty.double(), empty, torch.float16).ok
