"""Threads that call operators at the same time: each gets the result of the call alone."""

from __future__ import annotations

import pytest
import torch

from fmha import attention
from gqa_lowlatency import decode
from kernelkit.compile import compiler as kernel_compile
from moe import Router, fused_moe, pack
from tests.ptxemu.test_threads import THREADS, in_threads

_BF16 = torch.bfloat16


def _attention():
    k, v = torch.randn(2, 1, 50, 1, 64).to(_BF16)
    return lambda n: attention(torch.full((1, 9 + n, 2, 64), n / 8).to(_BF16), k, v, causal=True)


def _decode():
    q, k, v = torch.randn(2, 4, 64), torch.randn(2, 60, 2, 64), torch.randn(2, 60, 2, 64)
    q, k, v = q.to(_BF16), k.to(_BF16), v.to(_BF16)
    return lambda n: decode(q * (n + 1), k, v)


def _moe():
    experts = pack(torch.randn(4, 128, 64) / 10, torch.randn(4, 64, 64) / 10, "mxfp8")
    x, logits = torch.randn(5, 64).to(_BF16), torch.randn(5, 4)
    return lambda n: fused_moe(x * (n + 1), experts, logits, Router(2))


CALLS = {"attention": _attention, "decode": _decode, "moe": _moe}


@pytest.mark.parametrize("family", CALLS)
def test_calls_in_threads(family):
    """The first call in each thread may compile. Each thread calls twice: the second call takes the
    shortcut."""
    torch.manual_seed(0)
    call = CALLS[family]()
    kernel_compile.forget()
    found = in_threads(lambda number: [call(number) for _ in range(2)])
    for number in range(THREADS):
        alone = call(number)
        for result in found[number]:
            assert torch.equal(result, alone)
