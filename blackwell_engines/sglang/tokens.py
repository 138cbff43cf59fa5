"""`Tokens`: how many tokens a batch of SGLang brings, and how many keys they see, on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Tokens:
    """Numbers of a forward, on the host.

    new: new tokens of each request
    keys: keys of each request, new ones included
    decoded: whether all requests have equally many new tokens, which a decode takes
    unseen: new tokens that the batch's `seq_lens` does not count
    tree: whether the drafts of a request are branches, told apart by a mask
    """

    new: list[int]
    keys: list[int]
    decoded: bool
    unseen: int = 0
    tree: bool = False


def tokens_of(batch: Any, page_size: int, ahead: int = 0) -> Tokens:
    """The numbers of a `ForwardBatch`.

    Args:
        ahead: drafts of a draft model's step, its newest one included, that decode without being
            counted; 0 outside draft models.

    Raises:
        NotImplementedError: for modes that are not decoding, prompts, both at once, or drafts that
            are verified or extended; for drafts of a draft model, branches of drafts in pages of
            several slots, drafts of unequal number, keys of encoders in such pages, and lengths
            that only the device knows.
    """
    mode = batch.forward_mode
    if batch.seq_lens_cpu is None:
        raise NotImplementedError("a batch without seq_lens_cpu: the host has to know the lengths")
    if batch.encoder_lens is not None and (page_size > 1 or mode.is_target_verify()):
        raise NotImplementedError(
            f"encoders before the decoder's tokens with page_size {page_size} or drafts: only "
            "page_size 1, without drafts"
        )
    keys = batch.seq_lens_cpu.tolist()
    if mode.is_decode_or_idle():
        _refuse_draft_model(batch, ahead)
        return Tokens([1] * len(keys), [k + ahead for k in keys], decoded=True, unseen=ahead)
    if mode.is_target_verify():
        number, tree = drafts_of(batch.spec_info)
        if tree and page_size > 1:
            raise NotImplementedError(
                f"branches of drafts with page_size {page_size}: only page_size 1"
            )
        new = [number] * len(keys)
        return Tokens(new, [k + number for k in keys], True, number, tree)
    if mode.is_context_parallel_extend(include_draft_extend_v2=True):
        new = batch.extend_seq_lens_cpu
        if new is None and mode.is_draft_extend_v2():
            new = [batch.spec_info.num_tokens_per_req] * len(keys)
        if new is None:
            raise NotImplementedError("a batch without extend_seq_lens_cpu")
        return Tokens([int(length) for length in new], keys, decoded=False)
    raise NotImplementedError(f"a batch of {mode}: only decoding, prompts, both, or drafts")


@dataclass(frozen=True)
class Pieces:
    """New tokens cut where chunks of positions end; keys are those of the chunk.

    rows: the request of each piece
    first: position of its first key
    new, keys: as in `Tokens`
    """

    rows: list[int]
    first: list[int]
    new: list[int]
    keys: list[int]


def pieces_of(tokens: Tokens, chunk: int) -> Pieces:
    """The pieces of new tokens in chunks of so many positions, request behind request."""
    found = Pieces([], [], [], [])
    for row, (new, end) in enumerate(zip(tokens.new, tokens.keys, strict=True)):
        begin = end - new
        for first in range(begin // chunk * chunk, end, chunk):
            stop = min(first + chunk, end)
            found.rows.append(row)
            found.first.append(first)
            found.new.append(stop - max(begin, first))
            found.keys.append(stop - first)
    return found


def graph_tokens(batch: Any, ahead: int = 0) -> int:
    """New tokens of each request of a graph's batch; ahead: as for `tokens_of`.

    Raises:
        NotImplementedError: for graphs of anything but decoding and chains of drafts.
    """
    mode = batch.forward_mode
    if batch.encoder_lens is not None:
        raise NotImplementedError("a graph with keys of encoders: pass --disable-cuda-graph")
    if mode.is_decode_or_idle():
        _refuse_draft_model(batch, ahead)
        return 1
    if mode.is_target_verify():
        number, tree = drafts_of(batch.spec_info)
        if not tree:
            return number
        raise NotImplementedError("a graph of branches of drafts: only chains of drafts")
    raise NotImplementedError(f"a graph of {mode}: only decoding and chains of drafts")


def drafts_of(spec_info: Any) -> tuple[int, bool]:
    """(number of drafts of each request, whether they may be branches), as verified."""
    if getattr(spec_info, "ragged_verify_layout", None) is not None:
        raise NotImplementedError("drafts of unequal number (ragged_verify_layout)")
    # Inputs without a field `topk`, such as n-grams, are trees whatever their mask holds: those
    # that find too few drafts end in nodes of padding, which are branches.
    return int(spec_info.draft_token_num), getattr(spec_info, "topk", None) != 1


def _refuse_draft_model(batch: Any, ahead: int) -> None:
    if batch.spec_info is not None and batch.batch_size and not ahead:
        raise NotImplementedError(
            f"decoding with {type(batch.spec_info).__name__}: steps of a draft model need a "
            "backend of their own (`blackwell_engines.sglang.drafts`)"
        )


def tree_of(mask: torch.Tensor, seq_lens: torch.Tensor, number: int) -> torch.Tensor:
    """bool [B, number, number]: which drafts each one of a request sees.

    Args:
        mask: bool, flat: for each request and draft the drafts that it sees (B number^2), or
            before them all keys that the request has, too.
        seq_lens: int [B], keys before the drafts.
        number: of drafts of a request.
    """
    count = seq_lens.shape[0]
    if mask.numel() == count * number**2:
        return mask.view(count, number, number)
    rows = seq_lens.long() + number  # columns of a row of each request's mask
    first = number * (rows.cumsum(0) - rows)
    draft = torch.arange(number, device=mask.device)
    row = first[:, None] + draft * rows[:, None]
    return mask[(row + seq_lens[:, None])[..., None] + draft]


def tree_rows(
    table: torch.Tensor, seq_lens: torch.Tensor, tree: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(int32 [B n, slots], int32 [B n]): a row of slots for each of n drafts of a request, which
    ends in the drafts that it sees, itself last, and the number of its keys.

    Args:
        table: int32 [B, slots], those of the drafts in it.
        seq_lens: int [B], keys before the drafts.
        tree: bool [B, n, n].
    """
    number = tree.shape[1]
    at = seq_lens.long()[:, None] + torch.arange(number, device=table.device)  # [B, n]
    order = (~tree).to(torch.int8).argsort(dim=2, stable=True)  # those that are seen come first
    drafts = table.gather(1, at)[:, None].expand(tree.shape).gather(2, order)
    rows = table.repeat_interleave(number, 0)
    rows.scatter_(1, at.repeat_interleave(number, 0), drafts.flatten(0, 1))
    return rows, (seq_lens[:, None] + tree.sum(2)).flatten().to(torch.int32)
