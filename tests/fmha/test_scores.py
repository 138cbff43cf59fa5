"""Scores of any size and sign: every kind of kernel gives the row of attention that they define."""

from __future__ import annotations

import pytest
import torch

from fmha import attention
from fmha.reference import definition
from gqa_lowlatency import decode

E4M3 = torch.float8_e4m3fn
ARCHS = ("sm_100a", "sm_90a", "sm_89")


def integers(*shape: int, most: int = 8) -> torch.Tensor:
    """Small integers: scores are exact, and equal ones are equal for every order of sums."""
    return torch.randint(-most, most + 1, shape).float()


def compare(found: torch.Tensor, q, k, v, **options) -> None:
    exact = definition(q, k, v, **options)
    torch.testing.assert_close(found.double(), exact.o.double(), rtol=2.0**-3, atol=2.0**-6)


@pytest.mark.parametrize("scale", [1e6, 1e9, 1e12])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_huge_scale_gives_one_hot_rows(arch, scale):
    q, k, v = (
        integers(1, 33, 2, 64).half(),
        integers(1, 170, 2, 64).half(),
        torch.rand(1, 170, 2, 64),
    )
    v = v.half()
    compare(attention(q, k, v, scale=scale, arch=arch), q, k, v, scale=scale)
    row = q[:, -1:]
    found = decode(row[:, 0], k, v, scale=scale, arch=arch)[:, None]
    compare(found, row, k, v, scale=scale)


@pytest.mark.parametrize("arch", ARCHS)
def test_large_q_and_k_give_one_hot_rows(arch):
    q, k = integers(1, 33, 2, 64), integers(1, 170, 2, 64)
    q, k, v = (q * 2.0**12).half(), (k * 2.0**12).half(), torch.rand(1, 170, 2, 64).half()
    compare(attention(q, k, v, arch=arch), q, k, v)


@pytest.mark.parametrize("scale", [0.0, -1.0, -1e4])
@pytest.mark.parametrize("name", ["q_scale", "k_scale"])
@pytest.mark.parametrize("arch", ARCHS[:2])
def test_a_scale_of_keys_or_queries_has_any_sign(arch, name, scale):
    q, k, v = integers(1, 40, 2, 64), integers(1, 150, 1, 64), torch.rand(1, 150, 1, 64)
    q, k, v = q.to(E4M3), k.to(E4M3), v.to(E4M3)
    heads = torch.tensor([scale, 1.0] if name == "q_scale" else [scale])
    options = {"causal": True, name: heads}
    compare(attention(q, k, v, arch=arch, **options), q, k, v, **options)
