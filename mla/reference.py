"""Cached attention of one token in plain torch: the definition, and a version rounded as the
kernels.

Both are one softmax over the entries of the window and of the past, with the sink, as
`mla.attention.reference` has it: `definition` in fp64, `rounded` with the kernels' roundings. Both
read entries as a record returns them, in bf16, and rotate the last columns of O back by the token's
position. A chunk's kernels round O of each part to fp32 before the merge, which adds nothing that a
tolerance for bf16 could see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mla.attention import reference

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

    def attend(self, compute: Callable[..., reference.Attended]) -> torch.Tensor:
        """Return O [H, 512] by a function of `mla.attention.reference`."""
        keys = self.near if self.far is None else torch.cat((self.near, self.far))
        source = reference.Source(keys, torch.arange(len(keys))[None])
        found = compute(
            self.q[None, None], [source], scale=self.scale, sinks=self.sinks, rope=self.rope,
            positions=torch.tensor([self.position]),
        )  # fmt: skip
        return found.o[0, 0]


def seen(entries: torch.Tensor, position: int, window: int) -> torch.Tensor:
    """Return the entries visible at `position`, given those of all tokens by position."""
    return entries[max(0, position - window + 1) : position + 1]


def definition(token: Token) -> torch.Tensor:
    """Return O, fp64 [H, 512]."""
    return token.attend(reference.definition)


def rounded(token: Token) -> torch.Tensor:
    """Return O, bf16 [H, 512]."""
    return token.attend(reference.rounded)
