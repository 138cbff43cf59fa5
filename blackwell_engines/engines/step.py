"""`Step`: the batch of one step of an engine, as attention takes it.

An engine puts the requests with few new tokens first. As many of them as have equally many tokens
are decoded, [requests, tokens] at a time; all others, prompts and pieces of prompts, are packed.
What a step is made from lies in the host's memory, so that nothing waits for the GPU; what kernels
read stays on the device, in the tensors that the engine writes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class Step:
    """Requests in order; every one has a row of the tables. Engines add attributes of their own.

    requests, tokens: the first requests, decoded together, and new tokens of each; 0 for none. Rows
        of padding among them have tokens but no keys.
    rest, longest: number of tokens of the other requests, and of the longest of them
    starts: int32 [others + 1], first token of each other request, counted from the end of the
        decoded tokens; None if there are no others
    seq_lens: int32 [requests], keys of each, new ones included
    table: int32 [requests, pages]
    bound: upper bound of `seq_lens`
    gathered: how to make the others' keys contiguous first, for pages that no prefill reads in
        place
    causal: False: every token sees all keys of its request, before and behind it
    """

    requests: int
    tokens: int
    rest: int
    longest: int
    starts: torch.Tensor | None
    seq_lens: torch.Tensor
    table: torch.Tensor
    bound: int
    gathered: Gathered | None = None
    causal: bool = True


@dataclass(frozen=True)
class Gathered:
    """Index of gathered keys.

    slots: int64 [keys of all], the row of pages of each key
    starts: int32 [requests + 1]
    """

    slots: torch.Tensor
    starts: torch.Tensor


def make_step(
    lengths: Sequence[int],
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    *,
    padded: int,
    bound: int,
    most: int,
    causal: bool = True,
) -> Step:
    """The batch of a step.

    Args:
        lengths: new tokens of each request, on the host; 0 for a row of padding.
        starts: int32 [requests + 1] or longer, on the device, where their tokens begin.
        seq_lens: int32 [requests] or longer; table: int32 [requests or more, pages].
        padded: tokens that the engine's tensors have for this batch, those of padding included.
        bound: of `seq_lens`, a number of the host.
        most: tokens of a request that is decoded, at most; 0: none is.
        causal: as in `Step`.

    Raises:
        ValueError: for tables that have fewer rows than there are requests.
    """
    count, total = len(lengths), sum(lengths)
    for name, tensor, rows in (("starts", starts, count + 1), ("seq_lens", seq_lens, count),
                               ("table", table, count)):  # fmt: skip
        if tensor.shape[0] < rows:
            raise ValueError(f"{name} has {tensor.shape[0]} rows, {count} requests need {rows}")
    requests, tokens = _decoded(lengths, padded, most)
    begun = requests * tokens
    rest = max(total - begun, 0)
    others = None
    if rest:
        others = starts[requests : count + 1]
        others = others - begun if begun else others
    return Step(
        requests=requests,
        tokens=tokens,
        rest=rest,
        longest=max(lengths[requests:], default=0) if rest else 0,
        starts=others,
        seq_lens=seq_lens[:count],
        table=table[:count],
        bound=bound,
        causal=causal,
    )


def _decoded(lengths: Sequence[int], padded: int, most: int) -> tuple[int, int]:
    """(requests, tokens of each) that come first and are alike."""
    tokens = lengths[0] if lengths else 0
    if not 0 < tokens <= most:
        return 0, 0
    alike = next((n for n, length in enumerate(lengths) if length != tokens), len(lengths))
    # A graph's batch ends in rows of padding, which have tokens like the others.
    if not any(lengths[alike:]) and padded == len(lengths) * tokens:
        alike = len(lengths)
    return alike, tokens
