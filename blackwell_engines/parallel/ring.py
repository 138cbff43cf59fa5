"""Attention over a sequence that ranks share: keys and values go round a ring, each rank attends to
what it has while the next part is on its way, and `fmha.merge` makes one result of all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, overload

import torch
import torch.distributed as dist

from fmha import attention, merge
from kernelkit.call.front import defaults_of, require_names, spelled
from kernelkit.call.tensors import require_memory, require_tensors, require_types
from kvcache.books.requests import MAX_TOKENS
from kvcache.checks import whole

# ---- Tokens of a rank, so that causal attention is the same work for each
#
# The sequence is cut in two chunks for each rank; rank r has chunk r and the r-th from the end. An
# early chunk sees little and a late one much, and every rank has one of both.

MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class Step:
    """A launch of a rank: some of its queries over some of the keys of `source`.

    late: whether only the queries of its late chunk take part
    early: whether only the keys of the early chunk take part
    causal: whether the keys are the rank's own, in order
    """

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
        raise ValueError("0 parts: expected one per rank")
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
                f"{tuple(like.shape)}: all ranks need equal parts"
            )
    early, late = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat([*early, *reversed(late)], dim)


def _require_memory(name: str, x: torch.Tensor) -> None:
    """Call `require_memory`, except while torch.compile traces."""
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


# ---- The ring
#
# The parts are merged once, after the last one: that reads each part once and rounds once, where a
# merge after each part would read and write what there is so far again and again.

if TYPE_CHECKING:
    from typing_extensions import Unpack

Pair = tuple[torch.Tensor, torch.Tensor]
Parts = list[tuple[torch.Tensor, torch.Tensor]]


class RingOptions(TypedDict, total=False):
    """Options of `ring_attention` that its overloads have in common."""

    causal: Annotated[bool, True]
    scale: Annotated[float | None, None]
    softcap: Annotated[float | None, None]
    sinks: Annotated[torch.Tensor | None, None]
    group: Annotated[dist.ProcessGroup | None, None]
    backend: Annotated[str, "auto"]
    arch: Annotated[str | None, None]


@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    return_lse: Literal[False] = False, **options: Unpack[RingOptions],
) -> torch.Tensor: ...  # fmt: skip


@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    return_lse: Literal[True], **options: Unpack[RingOptions],
) -> Pair: ...  # fmt: skip


@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    return_lse: bool = False, **options: Unpack[RingOptions],
) -> torch.Tensor | Pair: ...  # fmt: skip


@spelled(RingOptions)
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    return_lse: bool = False, **options: Unpack[RingOptions],
) -> torch.Tensor | Pair:  # fmt: skip
    """`fmha.attention` of this rank's queries over the keys of all ranks of `group`.

    Every rank calls it with tensors of the same shapes. Keys and values move by `isend` and `irecv`
    of torch.distributed (NCCL on GPUs, gloo on the CPU), under the attention to those that are
    there; world - 1 times K and V of a rank leave it.

    Args:
        q: [B, T, Hq, D], this rank's tokens; bfloat16 or float16.
        k, v: [B, T, Hkv, D] and [B, T, Hkv, Dv] of the same tokens.
        causal: a token sees those before it and itself. Then T is even, and a rank has the tokens
            that `own_positions` says. Otherwise all see all, and who has which does not matter.
        scale, softcap, backend, arch: those of `fmha.attention`.
        sinks: [Hq], any floating dtype, a logit of each head whose value is zero.
        return_lse: whether the LSE, fp32 [B, Hq, T], is returned, too; it includes the sinks.
        group: the ranks that share the sequence, all by default.

    Returns:
        O [B, T, Hq, Dv] in the dtype of q, or (O, LSE).

    Raises:
        ValueError: for an odd T where it is causal. TypeError, ValueError, NotImplementedError:
            what `fmha.attention` raises.
    """
    require_names(ring_attention, options)
    given: dict[str, Any] = {**_DEFAULTS, **options}
    causal, group, sinks = given["causal"], given["group"], given["sinks"]
    place = {"backend": given["backend"], "arch": given["arch"]}
    if q.ndim != 4:
        raise ValueError(f"q has {q.ndim} dimensions, expected [B, T, Hq, D]")
    if causal and q.shape[1] % 2:
        raise ValueError(f"q has {q.shape[1]} tokens: an even number, for two chunks per rank")
    rank, world = dist.get_rank(group), dist.get_world_size(group)

    def attend(queries: torch.Tensor, keys: Pair, step: Step, out: torch.Tensor) -> torch.Tensor:
        _, lse = attention(
            queries, *keys, causal=step.causal, scale=given["scale"], softcap=given["softcap"],
            return_lse=True, out=out, **place,
        )  # fmt: skip
        return lse

    plan = steps(rank, world, causal=causal)
    parts = attend_all(plan, q, round_the_ring((k, v), group), attend)
    sinks = None if sinks is None else sinks.float()
    return merge(parts, sinks=sinks, return_lse=return_lse, **place)


_DEFAULTS = defaults_of(ring_attention)


def attend_all(
    plan: Iterable[Step],
    q: torch.Tensor,
    keys: Iterable[Pair],
    attend: Callable[[torch.Tensor, Pair, Step, torch.Tensor], torch.Tensor],
) -> Parts:
    """(O, LSE) of all queries over each part of the keys; a query that sees none of a part has LSE
    -inf there. attend: writes O of some queries to its last argument, and returns their LSE."""
    parts, half = [], q.shape[1] // 2
    for step, (k, v) in zip(plan, keys, strict=True):
        if step.early:
            k, v = k[:, :half], v[:, :half]
        o = q.new_empty((*q.shape[:-1], v.shape[-1]))
        if step.late:
            lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, device=q.device)
            lse[..., half:] = attend(q[:, half:], (k, v), step, o[:, half:])
        else:
            lse = attend(q, (k, v), step, o)
        parts.append((o, lse))
    return parts


def round_the_ring(own: Pair, group: dist.ProcessGroup | None) -> Iterable[Pair]:
    """K and V of this rank, then of the one before it, and so on: while the caller uses a part the
    next one comes from the rank before and this one goes to the rank behind."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    here = own[0].contiguous(), own[1].contiguous()
    behind, before = (rank + 1) % world, (rank - 1) % world
    for hop in range(world):
        coming, requests = here, []
        if hop < world - 1:
            coming = torch.empty_like(here[0]), torch.empty_like(here[1])
            requests = dist.batch_isend_irecv(
                [
                    *(dist.P2POp(dist.isend, x, group=group, group_peer=behind) for x in here),
                    *(dist.P2POp(dist.irecv, x, group=group, group_peer=before) for x in coming),
                ]
            )
        yield here
        for request in requests:
            request.wait()
        here = coming
