"""Attention over a sequence that ranks share: keys and values go round a ring, each rank attends to
what it has while the next part is on its way, and `fmha.merge` makes one result of all parts.

The parts are merged once, behind the last one: that reads each part once and rounds once, where a
merge behind each part would read and write what there is so far again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, overload

import torch
import torch.distributed as dist

from blackwell_engines.parallel.zigzag import Step, steps
from fmha import attention, merge
from kernelkit.call.front import defaults_of, require_names, spelled

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
        raise ValueError(f"q has {q.ndim} dimensions: [B, T, Hq, D]")
    if causal and q.shape[1] % 2:
        raise ValueError(f"q has {q.shape[1]} tokens: an even number, two chunks of a rank")
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
