"""Seeded values for the tensors of hostile calls: zeros and ones would hide a wrong stride."""

from __future__ import annotations

import torch

SEED = 60
RANDOM = torch.Generator().manual_seed(SEED)


def begin_again() -> None:
    """The next values are those of the first call again."""
    RANDOM.manual_seed(SEED)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normally distributed values."""
    return torch.randn(shape, generator=RANDOM).to(dtype)


def bf16(*shape: int) -> torch.Tensor:
    """Normally distributed values in bfloat16."""
    return normal(*shape, dtype=torch.bfloat16)


def positive(*shape: int) -> torch.Tensor:
    """Values in fp32 from 0.5 to 1.5, such as scales."""
    return torch.rand(shape, generator=RANDOM) + 0.5


def some_bytes(*shape: int) -> torch.Tensor:
    """Bytes of any value below 0x78, so that no float that they are read as is huge or NaN."""
    return torch.randint(0x78, shape, dtype=torch.uint8, generator=RANDOM)


def angles(positions: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin tables of rotary embeddings."""
    angle = torch.rand((positions, pairs), generator=RANDOM) * 6
    return angle.cos(), angle.sin()
