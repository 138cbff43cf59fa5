"""Definitions of what the kernels of few tokens compute, in fp64, rounded once where they store."""

from __future__ import annotations

import torch

from examples.gpt_oss.few.launch import Heads, Norm
from kvcache.layouts.rows import NO_ENTRY


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """RMSNorm of x [T, K], in fp64."""
    wide = x.double()
    return wide * (wide.square().mean(1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()


def multiplied(x: torch.Tensor, linear: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x [T, K] by weight [N, K] and bias [N], in fp64."""
    weight, bias = linear
    return x.double() @ weight.double().T + bias.double()


def rotated(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """heads [T, H, D], turned by `angles` [T, 2, 2, D / 2], in fp64."""
    halves = heads.double().unflatten(-1, (2, -1))
    by, across = angles[:, None, 0].double(), angles[:, None, 1].double()
    return (halves * by + halves.flip(-2) * across).flatten(-2)


def attention_input(
    x: torch.Tensor,
    more: torch.Tensor | None,
    norm: Norm,
    linear: tuple[torch.Tensor, torch.Tensor],
    heads: Heads,
    later: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `launch.attention_input`; writes the same entries."""
    summed, queries, keys, values = exact_input(x, more, norm, linear, heads)
    kept = heads.mapping != NO_ENTRY
    for rows, entries in zip(heads.rows, (keys, values), strict=True):
        place = heads.mapping[kept] // rows.rows, heads.mapping[kept] % rows.rows
        rows.data()[place] = entries.to(x.dtype)[kept].flatten(1).view(torch.uint8)
    return summed, queries.to(x.dtype)


def exact_input(
    x: torch.Tensor,
    more: torch.Tensor | None,
    norm: Norm,
    linear: tuple[torch.Tensor, torch.Tensor],
    heads: Heads,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (x + more, queries, keys, values), all but the first in fp64."""
    summed = x if more is None else x + more
    found = multiplied(normed(summed, norm), linear).unflatten(1, (-1, heads.head_dim))
    counts = heads.q_heads, heads.kv_heads, heads.kv_heads
    queries, keys, values = found.split(counts, dim=1)
    angles = heads.angles[heads.positions]
    return summed, rotated(queries, angles), rotated(keys, angles), values


def attention_output(
    o: torch.Tensor,
    x: torch.Tensor,
    norm: Norm,
    linear: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `launch.attention_output`."""
    out = (multiplied(o, linear) + x.double()).to(x.dtype)
    return out, normed(out, norm).to(x.dtype)


def add_norm(
    x: torch.Tensor, more: torch.Tensor | None, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `launch.add_norm`."""
    summed = x if more is None else x + more
    return summed, normed(summed, norm).to(x.dtype)


def most_likely(logits: torch.Tensor, out: torch.Tensor) -> None:
    """See `launch.most_likely`."""
    out.copy_(logits.argmax(-1))
