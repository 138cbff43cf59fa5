"""Which tokens of a sequence a rank has, so that causal attention is the same work for each.

The sequence is cut in two chunks for each rank; rank r has chunk r and the r-th from the end. An
early chunk sees little and a late one much, and every rank has one of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Step:
    """One of the launches of a rank: some of its queries over some of the keys of `source`. late:
    the queries of its late chunk alone; early: the keys of the early chunk alone; causal: the keys
    are its own, and in order."""

    source: int
    late: bool = False
    early: bool = False
    causal: bool = False


def steps(rank: int, world: int, *, causal: bool) -> list[Step]:
    """The launches of a rank, in the order in which keys come round the ring: its own first, then
    those of the rank before it, and so on. Causal ones behind the first are half of the work of a
    full one, whichever rank the keys come from."""
    sources = [(rank - hop) % world for hop in range(world)]
    if not causal:
        return [Step(source) for source in sources]
    own, *others = sources
    return [
        Step(own, causal=True),
        *(Step(source, late=source > rank, early=source < rank) for source in others),
    ]


def require_chunks(tokens: int, world: int) -> int:
    """Tokens of a chunk; ValueError where they do not come out even."""
    if tokens % (2 * world):
        raise ValueError(f"{tokens} tokens over {world} ranks: a multiple of {2 * world}")
    return tokens // (2 * world)


def own_positions(tokens: int, rank: int, world: int) -> torch.Tensor:
    """int64 [tokens / world]: which tokens of the sequence `rank` has, in its order; for rope."""
    chunk = require_chunks(tokens, world)
    late = 2 * world - 1 - rank
    early_begin, late_begin = rank * chunk, late * chunk
    return torch.cat(
        [
            torch.arange(early_begin, early_begin + chunk),
            torch.arange(late_begin, late_begin + chunk),
        ]
    )


def own_tokens(x: torch.Tensor, rank: int, world: int, *, dim: int = 1) -> torch.Tensor:
    """The part of a whole sequence that `rank` has, [.., tokens / world, ..], contiguous."""
    positions = own_positions(x.shape[dim], rank, world)
    return x.index_select(dim, positions.to(x.device))


def join(parts: Sequence[torch.Tensor], *, dim: int = 1) -> torch.Tensor:
    """The whole sequence of the parts of all ranks, in the order of ranks."""
    if not parts:
        raise ValueError("0 parts: one of each rank")
    early, late = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat([*early, *reversed(late)], dim)
