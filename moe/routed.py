"""Where the rows of experts begin, of tokens that are dealt to them at random."""

from __future__ import annotations

import torch


def offsets_of(tokens: int, experts: int, top_k: int, device: torch.device) -> torch.Tensor:
    """int32 [experts + 1] of tokens that have `top_k` different experts each, the same for the same
    sizes."""
    if device.type == "meta":
        return torch.empty(experts + 1, dtype=torch.int32, device=device)
    order = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, experts, generator=order).topk(min(top_k, experts)).indices
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    return starts.int().to(device)
