"""Angles of tokens: what kernels that rotate check, and where they find them (host code)."""

from __future__ import annotations

import torch

from kernelkit.tensors import require_table, require_tma
from kvcache.layouts.latent import ROPE
from kvcache.layouts.rows import check_range


def check_rope(
    positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, tokens: int
) -> list[int]:
    """ValueError for what is no table of angles, or positions of `tokens` tokens; for a kernel the
    addresses of positions, cosines and sines, bytes between positions in both, and how many."""
    angles = len(cos) if cos.ndim else 0
    require_table("positions", positions, torch.int64, (tokens,))
    require_table("cos", cos, torch.float32, (None, ROPE // 2))
    require_table("sin", sin, torch.float32, (angles, ROPE // 2))
    require_tma("cos", cos)
    require_tma("sin", sin)
    if tokens and not angles:
        raise ValueError(f"cos has shape {tuple(cos.shape)}: a row for every position")
    addresses = [tensor.data_ptr() for tensor in (positions, cos, sin)]
    return [*addresses, *(tensor.stride(0) * tensor.itemsize for tensor in (cos, sin)), angles]


def check_positions(positions: torch.Tensor, angles: int) -> None:
    """ValueError for one that the tables have not, where it can be looked at."""
    check_range("positions", positions, (0, angles), f"the tables have 0 to {angles - 1}")
