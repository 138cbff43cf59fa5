"""What is between products and kernels, element by element: norms behind sums, rotations.

Launch by launch these are eight small kernels of torch in a layer; `compiled` has inductor make
three of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

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
        return cls(_of_any_count(add_norm), _of_any_count(rotated))


def _of_any_count(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors that begin with the tokens [T, ...], and weights of one dimension,
    compiled twice in all: for one token, and for any other number of them. Other sizes are
    constants, as kernels need them to be fast."""
    compiled = torch.compile(function)

    @wraps(function)
    def call(*args: Any) -> Any:
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.ndim > 1:
                torch._dynamo.maybe_mark_dynamic(arg, 0)
        return compiled(*args)

    return call
