"""Activations to Q8_1 in the emulator, under its checker: bit for bit the reference."""

from __future__ import annotations

import math

import pytest
import torch

from lab.problems.grouped_gemm import checked
from q8_0 import quantise, reference
from q8_0.blocks import BLOCK
from tests.q8_0.cases import DTYPES, Matrix

ARCHS = ("sm_100a", "sm_90a", "sm_89", "sm_120a")
pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def hostile(tokens: int, cols: int, dtype: str) -> torch.Tensor:
    """Activations with blocks of many kinds, in a wider tensor of NaN."""
    x = Matrix(1, cols).numbers(tokens, dtype)
    blocks = x.unfold(1, BLOCK, BLOCK)
    info = torch.finfo(x.dtype)
    kinds = torch.arange(tokens * blocks.shape[1]).view(blocks.shape[:2]) % 11
    ties = torch.arange(BLOCK).float() + 0.5
    for kind, values in (
        (1, torch.zeros(BLOCK)),
        (2, torch.tensor([0.0, -0.0]).repeat(16)),
        (3, torch.cat([torch.tensor([127.0]), ties[1:]])),
        (4, torch.full((BLOCK,), float(info.tiny))),
        (5, torch.full((BLOCK,), float(info.max))),
        (6, torch.linspace(-1, 1, BLOCK) * 1e-5),
        (7, torch.linspace(-1, 1, BLOCK) * 2e-6),
    ):
        blocks[kinds == kind] = values.to(x.dtype)
    blocks[..., 3][kinds == 8] = math.inf
    blocks[..., 31][kinds == 9] = math.nan
    return x


def equal(x, found):
    expected = reference.quantise(x)
    assert torch.equal(found.quants, expected.quants)
    assert torch.equal(found.scales.view(torch.int16), expected.scales.view(torch.int16))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits(dtype, arch):
    for tokens, cols in ((1, 32), (3, 32 * 11), (2, 32 * 70)):
        x = hostile(tokens, cols, dtype)
        with checked():
            found = quantise(x, arch=arch)
        equal(x, found)


def test_no_tokens():
    found = quantise(torch.empty(0, 64))
    assert found.quants.shape == (0, 64)
    assert found.scales.shape == (0, 2)


def test_error_of_the_format():
    """The error is half a step of the block's scale, even if fp16 has few bits for it."""
    x = Matrix(1, 32 * 64).numbers(4, "fp32")
    made = reference.quantise(x)
    steps = made.scales.double().repeat_interleave(BLOCK, 1)
    error = (reference.numbers_of(made) - x.double()).abs()
    assert (error <= steps * (0.5 + 127 * 2.0**-11)).all()


def test_what_no_scale_holds():
    """A block with NaN, an infinity or too large numbers has zero quants, and a scale that is not
    finite."""
    x = torch.ones(1, 128)
    x[0, 0], x[0, 40], x[0, 70] = math.nan, -math.inf, 3e38
    made = reference.quantise(x)
    assert made.scales[0, :3].isfinite().tolist() == [False] * 3
    assert made.quants[0, :96].eq(0).all()
    assert made.scales[0, 3].item() == pytest.approx(1 / 127, rel=2**-11)
    assert made.quants[0, 96:].eq(127).all()
