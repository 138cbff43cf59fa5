"""Angles of tokens: what is checked before a kernel rotates (host code)."""

from __future__ import annotations

import torch

from kernelkit.call.tensors import require_table, require_tma
from kvcache.layouts.latent import ROPE
from kvcache.layouts.rows import check_range


def check_rope(positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, tokens: int) -> None:
    """Refuse, by ValueError, what is no table of angles, or no positions of `tokens` tokens."""
    require_table("positions", positions, torch.int64, (tokens,))
    check_angles(cos, sin)
    if tokens and not len(cos):
        raise ValueError(f"cos has shape {tuple(cos.shape)}: a row for every position")


def check_angles(cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Refuse, by ValueError, what are no tables of cosines and sines of the same positions."""
    require_table("cos", cos, torch.float32, (None, ROPE // 2))
    require_table("sin", sin, torch.float32, (len(cos), ROPE // 2))
    require_tma("cos", cos)
    require_tma("sin", sin)


def check_positions(positions: torch.Tensor, angles: int) -> None:
    """Refuse, by ValueError, a position that the tables do not have; on the CPU alone."""
    check_range("positions", positions, (0, angles), f"the tables have 0 to {angles - 1}")
