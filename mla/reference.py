"""Cached attention of one token in plain torch: the definition, and a version rounded as the
kernels.

`definition` is one softmax over the entries of the window and of the past, in fp64. `rounded` works
as the kernels do: attention over each of the two, with O in fp32, then one merge with the sink.
Both read entries as a record returns them, in bf16, and rotate the last columns of O back by the
token's position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fmha import reference

Rope = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Token:
    """Inputs of the attention of one token.

    q: bf16 [H, 512], at `position`.
    near, far: bf16 [n, 512], visible entries of window and past; far is None without a past.
    rope: tables.
    sinks: fp32 [H].
    """

    q: torch.Tensor
    position: int
    near: torch.Tensor
    far: torch.Tensor | None
    rope: Rope
    sinks: torch.Tensor | None = None
    scale: float | None = None

    @property
    def options(self) -> dict[str, object]:
        """Options for a table of one row; positions outside a table use its last row."""
        row = slice(self.position, self.position + 1)
        return {"rope": tuple(table[row] for table in self.rope), "scale": self.scale}


def seen(entries: torch.Tensor, position: int, window: int) -> torch.Tensor:
    """Return the entries visible at `position`, given those of all tokens by position."""
    return entries[max(0, position - window + 1) : position + 1]


def definition(token: Token) -> torch.Tensor:
    """Return O, fp64 [H, 512]."""
    parts = [token.near] if token.far is None else [token.near, token.far]
    keys = torch.cat(parts)[None, :, None]
    found = reference.definition(
        token.q[None, None], keys, keys, sinks=token.sinks, **token.options
    )
    return found.o[0, 0]


def rounded(token: Token) -> torch.Tensor:
    """Return O, bf16 [H, 512]."""
    q = token.q[None, None]
    if token.far is None:
        keys = token.near[None, :, None]
        return reference.rounded(q, keys, keys, sinks=token.sinks, **token.options).o[0, 0]
    parts = [
        reference.rounded(q, keys, keys, out_dtype=torch.float32, **token.options)
        for keys in (token.near[None, :, None], token.far[None, :, None])
    ]
    o = torch.cat([part.o[0] for part in parts])
    lse = torch.stack([part.lse[0, :, 0] for part in parts])
    sums = lse if token.sinks is None else torch.cat((lse, token.sinks[None]))
    top = sums.amax(0)
    top = top.masked_fill(top == -math.inf, 0.0)
    total = torch.exp(sums - top).sum(0)
    o = (o * torch.exp(lse - top)[..., None]).sum(0)
    return (o / total.masked_fill(total == 0, 1.0)[:, None]).bfloat16()
