"""What is between products and kernels, element by element: norms behind sums, rotations.

Launch by launch these are eight small kernels of torch in a layer; `compiled` has inductor make
three of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import rms_norm


def add_norm(
    x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + more [T, H], and its RMSNorm."""
    x = x + more
    return x, rms_norm(x, weight.shape, weight, eps)


def rotated(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """heads [T, H, D], turned by `angles` [T, 2, 2, D / 2] of its tokens; in fp32, rounded once.

    Element i of the first half and of the second are a pair.
    """
    halves = heads.unflatten(-1, (2, -1))
    by, across = angles[:, None, 0], angles[:, None, 1]
    return torch.addcmul(halves * by, halves.flip(-2), across).to(heads.dtype).flatten(-2)


@dataclass(frozen=True)
class Elementwise:
    """Both functions, as they are or compiled."""

    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = add_norm
    rotated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = rotated

    @classmethod
    def compiled(cls) -> Elementwise:
        """By torch.compile, which needs a compiler of C or, on a GPU, Triton."""
        return cls(torch.compile(add_norm), torch.compile(rotated))
