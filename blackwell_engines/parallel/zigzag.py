"""The tokens of a sequence that a rank has, so that causal attention is the same work for each.

The sequence is cut in two chunks for each rank; rank r has chunk r and the r-th from the end. An
early chunk sees little and a late one much, and every rank has one of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernelkit.call.tensors import require_memory, require_tensors, require_types
from kvcache.checks import whole
from kvcache.tokens import MAX_TOKENS

MAX_RANKS = 1 << 20


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
    """Return the tokens of a chunk; ValueError where they do not come out even."""
    tokens, world = whole("tokens", tokens, 0, MAX_TOKENS), whole("world", world, 1, MAX_RANKS)
    if tokens % (2 * world):
        raise ValueError(f"{tokens} tokens over {world} ranks: a multiple of {2 * world}")
    return tokens // (2 * world)


def own_positions(tokens: int, rank: int, world: int) -> torch.Tensor:
    """int64 [tokens / world]: which tokens of the sequence `rank` has, in its order; for rope."""
    chunk = require_chunks(tokens, world)
    world = int(world)
    rank = whole("rank", rank, 0, world - 1)
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
    dim = _dimension("x", x, dim)
    positions = own_positions(x.shape[dim], rank, world)
    return x.index_select(dim, positions.to(x.device))


def join(parts: Sequence[torch.Tensor], *, dim: int = 1) -> torch.Tensor:
    """The whole sequence of the parts of all ranks, in the order of ranks."""
    if not isinstance(parts, Sequence) or isinstance(parts, str | bytes):
        raise TypeError(f"parts is {type(parts).__name__}, expected a sequence of tensors")
    if not parts:
        raise ValueError("0 parts: one of each rank")
    named = {f"parts[{rank}]": part for rank, part in enumerate(parts)}
    require_tensors(**named)
    (first, like), *others = named.items()
    dim = _dimension(first, like, dim)
    require_chunks(like.shape[dim], 1)
    for name, part in others:
        _require_memory(name, part)
        if (part.shape, part.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"{name} is {part.dtype} {tuple(part.shape)}, {first} is {like.dtype} "
                f"{tuple(like.shape)}: ranks have equal parts"
            )
    early, late = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat([*early, *reversed(late)], dim)


def _require_memory(name: str, x: torch.Tensor) -> None:
    """As `require_memory`, where no tracer stands in for the memory."""
    if not torch.compiler.is_compiling():
        require_memory(**{name: x})


def _dimension(name: str, x: torch.Tensor, dim: int) -> int:
    """Return the number of a dimension of a tensor that is its elements by strides."""
    require_types(**{name: x})
    _require_memory(name, x)
    dim = whole("dim", dim, None)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim {dim}: {name} has shape {tuple(x.shape)}")
    return dim
