"""Entry points for vLLM; importing this file imports nothing of vLLM."""

from __future__ import annotations

import torch


def platform() -> str:
    """Return the class that vLLM uses as its platform."""
    return "lab.engines.harness.vllm_platform.EmulatedPlatform"


def operators() -> None:
    """Replace the kernel that merges the parts of ranks: Triton's interpreter fails on it."""
    from vllm.v1.attention.ops import dcp

    dcp.correct_attn_out = correct_attn_out


def correct_attn_out(
    out: torch.Tensor, lses: torch.Tensor, rank: int, ctx: object, is_lse_base_on_e: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale a rank's O [T, H, D] by its part of the sum over ranks; lses fp32 [ranks, T, H], in
    natural log. Returns O, in place, and the LSE of all."""
    lse = lses.float().logsumexp(0)
    out.copy_(out.float() * (lses[rank] - lse).exp().nan_to_num()[..., None])
    return out, lse
