"""A small problem for an operator of every family, in the emulator."""

from __future__ import annotations

import torch

import fmha
import gqa_lowlatency
import kvcache
import moe
import q8_0
from kvcache.layouts.records import BF16_512
from kvcache.layouts.rows import Rows
from q8_0 import reference as q8_0_reference


def results() -> dict[str, torch.Tensor]:
    """Results of all operators by name, the same in every process."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, tokens, 2, 64).bfloat16() for tokens in (9, 33, 33))
    found = {"attention": fmha.attention(q, k, v, causal=True)}
    found["decode"] = gqa_lowlatency.decode(q[:, 0], k, v)
    parts = torch.randn(2, 1, 4, 2, 64), torch.randn(2, 1, 2, 4)
    found["merge"], _ = fmha.merge(parts)
    w13, w2 = torch.randn(2, 256, 128).bfloat16(), torch.randn(2, 128, 128).bfloat16()
    experts = moe.pack(w13, w2, "mxfp8")
    x, logits = torch.randn(3, 128).bfloat16(), torch.randn(3, 2)
    found["moe"] = moe.fused_moe(x, experts, logits, moe.Router(1))
    weights = q8_0_reference.rounded(torch.randn(8, 64), "soa")
    found["q8_0"] = q8_0.matvec(weights, torch.randn(1, 64).bfloat16())
    pool, tokens = torch.zeros(2, 64 * 1024, dtype=torch.uint8), torch.arange(3)
    angles = torch.randn(2, 8, 32)
    kvcache.append_swa(Rows(pool, 0, 0, 64, BF16_512), torch.randn(3, 512), tokens, tokens, *angles)
    return found | {"append": pool}
