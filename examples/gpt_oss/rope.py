"""Rotary positions with YaRN: the angles of every position."""

from __future__ import annotations

import math

import torch

from examples.gpt_oss.config import Config


def frequencies(config: Config) -> tuple[torch.Tensor, float]:
    """(radians of a position, fp32 [D / 2]; what cosines and sines are multiplied by).

    YaRN (arXiv:2309.00071): pairs that turn often within the original context keep their
    frequency, those that turn seldom get it divided by `factor`, and a ramp is in between.
    """
    rope, dim = config.rope, config.head_dim
    base, factor, context = (
        rope[name] for name in ("rope_theta", "factor", "original_max_position_embeddings")
    )

    def pair_that_turns(times: float) -> float:
        """The pair, counted from the fastest, that turns so often within the context."""
        return dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_that_turns(rope["beta_fast"]), pair_that_turns(rope["beta_slow"])
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    pair = torch.arange(dim // 2, dtype=torch.float32)
    stretched = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    plain = base ** (-2 * pair / dim)
    return plain * (1 - stretched) + plain / factor * stretched, 0.1 * math.log(factor) + 1.0


def angle_table(config: Config, positions: int, device: torch.device | str) -> torch.Tensor:
    """fp32 [positions, 2, 2, D / 2]: (cos, cos), what a head is multiplied by, then (-sin, sin),
    what its halves are multiplied by that have changed places."""
    speed, scale = frequencies(config)
    turns = torch.arange(positions, dtype=torch.float32)[:, None] * speed
    cos, sin = turns.cos() * scale, turns.sin() * scale
    return torch.stack((cos, cos, -sin, sin), dim=1).unflatten(1, (2, 2)).to(device)
