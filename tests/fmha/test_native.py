"""The kernel on a GPU of compute capability 9.0 or 10.x: random problems, natively.

Run with --hw. `scripts/soak.py fmha` is the long run of this. Each problem runs twice, in a CUDA
graph, through torch.compile and concurrently with others, with equal bits, and is compared with
fp64.
"""

from __future__ import annotations

import pytest
import torch

import soak
from fmha import attention

pytestmark = pytest.mark.hw


@pytest.mark.parametrize("seed", range(3))
def test_random_problems(seed):
    flags = f"fmha --backend cuda --seed {seed} --configs 12 --problems 240 --graphs --streams"
    assert soak.main(flags.split()) == 0


def test_random_problems_through_torch_compile():
    assert soak.main("fmha --backend cuda --configs 6 --problems 18 --compile".split()) == 0


@pytest.mark.parametrize("causal", [False, True])
def test_more_entries_than_a_grid_is_high(causal):
    """70,000 packed entries of two tokens, compared with fp64."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (70_000, 2, 2, 64)
    q, k, v = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(3))
    starts = torch.arange(0, 140_001, 2, dtype=torch.int32, device="cuda")
    o = attention(
        *(x.flatten(0, 1) for x in (q, k, v)), causal=causal, cu_seqlens_q=starts,
        cu_seqlens_k=starts, max_seqlen_q=2,
    )  # fmt: skip
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 8
    if causal:
        scores[:, :, 0, 1] = -torch.inf
    exact = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())
    assert (o.view(shape).double() - exact).abs().max() < 0.02


def test_rows_of_128k_keys():
    assert soak.main("fmha --backend cuda --long --configs 10 --problems 40".split()) == 0
