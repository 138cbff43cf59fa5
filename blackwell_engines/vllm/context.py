"""Decode context parallelism: ranks share the keys of a request, by turns of `interleave` tokens.

A rank attends with the query heads of all ranks to the keys that it has. These parts are combined
by their LSE, so that a rank has its own heads over all keys. A decoded token's own key is one of
them. Packed tokens see one another besides, by keys that have not gone through the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from blackwell_engines.engines.attend import Scores, attend, attend_with_lse
from blackwell_engines.engines.step import Step
from fmha import merge

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass
class SharedStep(Step):
    """All tokens of a step over the keys of this rank.

    own: the packed tokens over one another, None if there are none
    alone: no token sees others, so that ranks have nothing to share
    """

    own: Step | None = None
    alone: bool = False


@dataclass(frozen=True)
class Place:
    """One of `ranks` that share keys, `interleave` neighbours each."""

    rank: int
    ranks: int
    interleave: int = 1

    def keys(self, lengths: torch.Tensor) -> torch.Tensor:
        """How many of so many keys this rank has."""
        turn = self.ranks * self.interleave
        rest = lengths % turn - self.rank * self.interleave
        return lengths // turn * self.interleave + rest.clamp(0, self.interleave)

    def most(self, length: int) -> int:
        """How many of so many keys a rank has at most."""
        return -(-length // (self.ranks * self.interleave)) * self.interleave


def share(step: Step, place: Place, lengths: torch.Tensor, *, alone: bool) -> SharedStep:
    """The part of a step that this rank has.

    lengths: int32 [requests or more], overwritten, which a captured launch reads again.
    alone: whether no request has keys but those of its new tokens.
    """
    keys, own = step.seq_lens, None
    if step.rest and step.starts is not None:
        keys = keys.clone()
        keys[step.requests :] -= step.starts.diff()
        own = replace(step, requests=0, tokens=0)
    local = lengths[: len(keys)].copy_(place.keys(keys))
    changed = {"seq_lens": local, "bound": place.most(step.bound), "causal": False}
    return SharedStep(**vars(step) | changed, own=own, alone=alone and not step.requests)


def attend_shared(
    step: SharedStep,
    q: torch.Tensor,
    new: Pair,
    pages: Pair,
    out: torch.Tensor,
    scores: Scores,
    gather: Callable[[torch.Tensor], torch.Tensor],
    combine: Callable[[torch.Tensor, torch.Tensor], Pair],
) -> None:
    """Attention as by `attend`, with all ranks at once.

    Args:
        new: K and V of the new tokens, [tokens, Hkv, ..], of Q's dtype.
        gather: returns [tokens, heads of all ranks, D] for q of all ranks.
        combine: takes O [tokens, heads of all ranks, Dv] and LSE [tokens, heads of all ranks] over
            the keys of a rank, and returns those of the own heads over the keys of all ranks.
    """
    if step.own is not None and step.alone:
        attend(step.own, q, pages, out, scores, fresh=new)
        return
    begun = step.requests * step.tokens
    end, plain = begun + step.rest, replace(scores, sinks=None)
    every = gather(q[:end].contiguous())
    o = every.new_empty((*every.shape[:2], out.shape[-1]))
    lse = attend_with_lse(step, every, pages, o, plain)
    o, lse = combine(o, lse.T.contiguous())
    if begun:
        decoded = o[:begun]
        if scores.sinks is not None:
            decoded, _ = merge([(decoded, lse[:begun].T)], sinks=scores.sinks)
        out[:begun].copy_(decoded)
    if step.own is not None:
        k, v = (x[begun:end] for x in new)
        part = torch.empty_like(out[begun:end])
        own = attend_with_lse(step.own, q[begun:end], pages, part, plain, fresh=(k, v))
        parts = [(o[begun:], lse[begun:].T), (part, own)]
        out[begun:end].copy_(merge(parts, sinks=scores.sinks)[0])
