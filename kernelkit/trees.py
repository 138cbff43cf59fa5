"""Words of a tree of draft tokens, for `tree=` of `fmha.attention` and `gqa_lowlatency.decode`.

A token of a tree sees its ancestors and itself; a block that is not causal has every bit. One word
for each token serves all layers and heads of a step, so make them once a step.
"""

from __future__ import annotations

import torch

from kernelkit.call.tensors import require_type
from kernelkit.plan.limits import MAX_TREE_TOKENS

DOUBLINGS = MAX_TREE_TOKENS.bit_length() - 1  # of the distance to an ancestor


def tree_of_parents(parents: torch.Tensor) -> torch.Tensor:
    """Return int64 [..., T]: bit j of word t says whether token j is t or an ancestor of t.

    A CUDA graph can capture it: no value is read by the host on a GPU.

    Args:
        parents: int32 or int64 [..., T], the parent of each token, -1 for none; T from 1 to 64.

    Raises:
        TypeError, ValueError: naming the value and the limit; for a parent outside -1 .. T - 1 and
            for a cycle on the CPU only, and not under `torch.compile`.
    """
    require_type("parents", parents, torch.Tensor)
    if parents.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"parents is {parents.dtype}, expected torch.int32 or torch.int64")
    tokens = _tokens("parents", parents)
    is_readable = parents.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_readable and not ((parents >= -1) & (parents < tokens)).all():
        raise ValueError(f"parents {parents.tolist()}: from -1 to {tokens - 1}")
    words = _bits(tokens, parents.device).expand(parents.shape)
    above = parents.long()
    for _ in range(DOUBLINGS):
        is_there, place = above >= 0, above.clamp(0, tokens - 1)
        words = torch.where(is_there, words | words.gather(-1, place), words)
        above = torch.where(is_there, above.gather(-1, place), above)
    if is_readable and (above >= 0).any():
        raise ValueError(f"parents {parents.tolist()}: a token is its own ancestor")
    return words.contiguous()


def tree_of_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return int64 [..., T]: bit j of word t is mask[..., t, j].

    Args:
        mask: bool [..., T, T], whether token t sees token j; T from 1 to 64.

    Raises:
        TypeError, ValueError: naming the value and the limit.
    """
    require_type("mask", mask, torch.Tensor)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask is {mask.dtype}, expected torch.bool")
    tokens = _tokens("mask", mask)
    if mask.ndim < 2 or mask.shape[-2] != tokens:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, expected [..., T, T]")
    return torch.where(mask, _bits(tokens, mask.device), 0).sum(dim=-1)


def _tokens(name: str, tensor: torch.Tensor) -> int:
    tokens = tensor.shape[-1] if tensor.ndim else 0
    if not 1 <= tokens <= MAX_TREE_TOKENS:
        raise ValueError(f"{name} has {tokens} tokens: from 1 to {MAX_TREE_TOKENS}")
    return tokens


def _bits(tokens: int, device: torch.device) -> torch.Tensor:
    """Return int64 [T] whose element j has bit j alone."""
    return torch.ones((), dtype=torch.int64, device=device) << torch.arange(tokens, device=device)
