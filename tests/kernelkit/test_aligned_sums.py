"""Sums of references equal those of the emulator, which an H100 has confirmed, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernelkit.numerics import aligned_sums
from kernelkit.numerics.aligned_sums import SUMS, aligned_product
from ptxemu.numerics.accumulation import Types, accumulate, rule

E4M3 = torch.float8_e4m3fn
NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", E4M3: "e4m3"}
SIZES = {E4M3: (1.0, 100.0, 0.02)}


def chained(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """A B of matrices, by consecutive emulated wgmmas."""
    types = Types("f32", NAMES[a.dtype], NAMES[a.dtype])
    how, total = rule("wgmma.mma_async", "sm_90a", types), None
    size = SUMS[a.dtype].step
    for first in range(0, a.shape[1], size):
        step = slice(first, first + size)
        left, right = a[:, step].float().numpy(), b[step].T.float().numpy()
        total = accumulate(left, right, total, types, how)
    return total


def drawn(dtype: torch.dtype, size: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[2, 9, 72] and [2, 72, 13], with zeros and, if `size` is small, subnormal numbers."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator) for shape in ((2, 9, 72), (2, 72, 13)))
    a[:, 3, :30] = b[:, :, 5] = 0.0
    return (a * size).to(dtype), b.to(dtype)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(dtype, size) for dtype in NAMES for size in SIZES.get(dtype, (1.0, 1000.0, 1e-7))],
)
def test_bits_are_those_of_the_emulator(dtype, size, monkeypatch):
    a, b = drawn(dtype, size)
    expected = np.stack([chained(*pair) for pair in zip(a, b, strict=True)])
    assert (expected != (a.float() @ b.float()).numpy()).any()
    assert np.array_equal(aligned_product(a, b, dtype).numpy(), expected)
    monkeypatch.setattr(aligned_sums, "AT_ONCE", 2 * 2 * 13 * SUMS[dtype].step)  # two rows of both
    assert np.array_equal(aligned_product(a, b, dtype).numpy(), expected)


def test_special_numbers_go_where_they_are_used():
    a, b = drawn(torch.float16, 1.0)
    a[0, 1, 40], b[1, 70, 2] = math.inf, math.nan
    found, plain = aligned_product(a, b, torch.float16), a.float() @ b.float()
    assert plain.isinf().any()
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 16, 4), (3, 0, 4), (3, 16, 0)])
def test_nothing_to_sum(m, k, n):
    found = aligned_product(torch.ones(2, m, k), torch.ones(2, k, n), torch.bfloat16)
    assert torch.equal(found, torch.zeros(2, m, n))
