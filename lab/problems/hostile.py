"""Values that are hard on a block-scaled format: what its scale factors and elements become.

A kind changes random numbers and may ask for a global scale that does not fit them, a factor of the
one that would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe import reference
from moe.formats import format_of


@dataclass(frozen=True)
class Kind:
    """A kind of numbers.

    change: changes blocks [.., blocks of a row, elements], fp32.
    misfit: factor of the global scale."""

    change: Callable[[torch.Tensor], torch.Tensor]
    misfit: float = 1.0


def _zero_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """Every other block, of both signs, and all of the first row."""
    number = _number(blocks)
    zeros = torch.where(number % 4 == 0, 0.0, -0.0)
    changed = torch.where(number % 2 == 0, zeros, blocks)
    changed[..., :1, :, :] = 0.0
    return changed


def _one_hot(blocks: torch.Tensor) -> torch.Tensor:
    place = torch.arange(blocks.shape[-1])
    return torch.where(place == _number(blocks) % blocks.shape[-1], blocks, 0.0)


def _at_ends(blocks: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of a block is its first element, or its last one."""
    place, last = torch.arange(blocks.shape[-1]), blocks.shape[-1] - 1
    top = torch.where(_number(blocks) % 2 == 0, place == 0, place == last)
    return torch.where(top, 2.0 * blocks.abs().amax(-1, keepdim=True) * blocks.sign(), blocks)


def _far_apart(blocks: torch.Tensor) -> torch.Tensor:
    """Make the scale factors of some blocks subnormal or 0 in e4m3."""
    return blocks * torch.exp2(-(_number(blocks) * 5 % 23).float())


def _number(blocks: torch.Tensor) -> torch.Tensor:
    """int64 [.., rows, blocks, 1]: one that is another in the neighbour to either side."""
    rows, columns = blocks.shape[-3:-1]
    return (torch.arange(rows)[:, None] + torch.arange(columns))[..., None].expand(
        *blocks.shape[:-1], 1
    )


KINDS = {
    "normal": Kind(lambda blocks: blocks),
    "zero blocks": Kind(_zero_blocks),
    "one hot": Kind(_one_hot),
    "at ends": Kind(_at_ends),
    "far apart": Kind(_far_apart),
    "saturated": Kind(lambda blocks: blocks, 16.0),  # scale factors and elements, in nvfp4
    "subnormal": Kind(lambda blocks: blocks, 2.0**-16),  # scale factors, in nvfp4
}


def values(kind: str, numbers: torch.Tensor, fmt: str) -> torch.Tensor:
    """bf16 of the shape of `numbers`, fp32 [.., rows, K]."""
    blocks = numbers.unflatten(-1, (-1, format_of(fmt).block))
    return KINDS[kind].change(blocks).flatten(-2).bfloat16()


def encode_scale(kind: str, tensor: torch.Tensor, fmt: str) -> torch.Tensor | None:
    """Global scale of each row of bf16 [rows, numbers], with the misfit of its kind; None in a
    format without."""
    if not format_of(fmt).has_global:
        return None
    top = tensor.float().abs().amax(-1) if tensor.numel() else torch.zeros(len(tensor))
    return reference.encode_scale(top, fmt) * KINDS[kind].misfit
