"""SGLang's pool of tokens as K and V in pages, and its table of slots as pages and as keys.

A token has a slot of the pool; `req_to_token` says which, for each request and position. Slots come
in pages of `page_size`, one by default, whose slots follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blackwell_engines.engines.step import Gathered


def pages_of(buffer: torch.Tensor, heads: int, page_size: int) -> torch.Tensor:
    """A view [slots / page_size, page_size, heads, D] of a layer's K or V, [slots, heads, D].

    Raises:
        ValueError: for a buffer of another shape, or slots that are no whole pages.
    """
    if buffer.ndim != 3 or buffer.shape[1] != heads or buffer.shape[0] % page_size:
        raise ValueError(
            f"a buffer {tuple(buffer.shape)} of the pool with page_size {page_size}: expected "
            f"[slots, {heads}, D], slots a multiple of page_size"
        )
    slot, head, _ = buffer.stride()
    size = (buffer.shape[0] // page_size, page_size, *buffer.shape[1:])
    return buffer.as_strided(size, (page_size * slot, slot, head, 1))


def page_table(
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    page_size: int,
    pages: int,
    mapping: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> torch.Tensor:
    """int32 [B, pages]: the pages of requests, made on the device, so that a graph captures it.

    Args:
        req_to_token: int32 [rows, positions], the slot of each position.
        requests: int64 [B], their rows.
        mapping: int64 [slots], the slot that the layers with a window have for one of the others;
            a slot that they gave back may be anything.
        first: int64 [B], the position where each one's pages begin, a multiple of page_size; 0 by
            default.
    """
    if first is None:
        slots = req_to_token[:, : pages * page_size : page_size].index_select(0, requests)
    else:
        steps = torch.arange(0, pages * page_size, page_size, device=first.device)
        # Behind the keys of a request a table may hold anything that is a slot.
        positions = (first[:, None] + steps).clamp_(max=req_to_token.shape[1] - 1)
        slots = req_to_token[requests[:, None], positions]
    if mapping is not None:
        slots = mapping[slots].clamp_(min=0).to(torch.int32)
    return slots if page_size == 1 else slots.div_(page_size, rounding_mode="floor")


def keys_of(
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    seq_lens: torch.Tensor,
    lengths: Sequence[int],
    mapping: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> Gathered:
    """The slots of all keys, request behind request, made on the device without a wait.

    Args:
        seq_lens: int32 [B] on the device; lengths: the same on the host.
        mapping, first: as for `page_table`.
    """
    total, device = sum(lengths), seq_lens.device
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
    torch.cumsum(seq_lens, 0, dtype=torch.int32, out=starts[1:])
    rows = torch.arange(len(lengths), device=device)
    owner = rows.repeat_interleave(seq_lens, output_size=total)
    position = torch.arange(total, device=device) - starts[owner]
    position = position if first is None else position + first[owner]
    slots = req_to_token[requests[owner], position].long()
    return Gathered(slots if mapping is None else mapping[slots].clamp_(min=0), starts)
