"""Lists of key blocks for `block_mask=` of `attention`: which blocks of keys a block of queries
sees as a whole, and which it sees in part.

The lists of FlexAttention's BlockMask and of FlashAttention-4's block-sparse tensors are accepted
as they are. Both count queries from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

FLEX = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
FLASH = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
FLASH_BLOCK = (128, 128)  # where its tensors do not say


@dataclass(frozen=True)
class BlockLists:
    """Lists of key blocks. All tensors are int32; B and H may be 1 for all entries and heads.

    block_counts: [B, H, query blocks], number of blocks that are seen in part.
    block_indices: [B, H, query blocks, N], these blocks first.
    full_counts: [B, H, query blocks], number of blocks that are seen as a whole.
    full_indices: [B, H, query blocks, N], these blocks first.
    block_rows: queries of a block.
    block_keys: keys of a block.
    order: [B, H, query blocks], numbers of the query blocks, those with the most blocks first, so
        that all CTAs end at the same time; None for those that `block_lists` is to find.
    """

    block_counts: torch.Tensor
    block_indices: torch.Tensor
    full_counts: torch.Tensor
    full_indices: torch.Tensor
    block_rows: int
    block_keys: int
    order: torch.Tensor | None = None


def block_lists(mask: Any) -> tuple[BlockLists, Callable[..., Any] | None]:
    """Return the lists of a block mask, and its function for blocks that are seen in part.

    mask: FlexAttention's BlockMask, FlashAttention-4's block-sparse tensors, or BlockLists. Only
        the first brings a function.

    Keep the lists for later calls: finding the order takes a few small kernels on a GPU.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(mask, BlockLists):
        return _ordered(mask), None
    for names in (FLEX, FLASH):
        if all(hasattr(mask, name) for name in names):
            break
    else:
        raise TypeError(
            f"block_mask is {type(mask).__name__}, expected FlexAttention's BlockMask, "
            "FlashAttention-4's block-sparse tensors or BlockLists"
        )
    counts, indices, full_counts, full_indices = (getattr(mask, name) for name in names)
    if full_counts is None:
        full_counts, full_indices = torch.zeros_like(counts), indices
    sizes = getattr(mask, "BLOCK_SIZE" if names is FLEX else "block_size", None) or FLASH_BLOCK
    function = getattr(mask, "mask_mod", None) if names is FLEX else None
    lists = BlockLists(counts, indices, full_counts, full_indices, *sizes)
    return _ordered(lists), function


def _ordered(lists: BlockLists) -> BlockLists:
    """Return the lists with an order of the query blocks."""
    counts, full_counts = lists.block_counts, lists.full_counts
    if lists.order is not None or not all(
        isinstance(n, torch.Tensor) for n in (counts, full_counts)
    ):
        return lists  # what is no tensor is refused by the operator
    sizes = list(zip(counts.shape, full_counts.shape, strict=False))
    if {counts.ndim, full_counts.ndim} != {3} or any(a != b and 1 not in (a, b) for a, b in sizes):
        return lists  # refused with the shapes
    order = torch.argsort(counts + full_counts, dim=-1, descending=True, stable=True)
    return replace(lists, order=order.int())


def seen_blocks(counts: torch.Tensor, indices: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return int32 [B, H, query blocks, `blocks`], how often a list has each block of keys."""
    listed = torch.arange(indices.shape[-1], device=counts.device) < counts[..., None]
    found = torch.zeros((*counts.shape, blocks), dtype=torch.int32, device=counts.device)
    return found.scatter_add_(-1, indices.long().clamp(0, blocks - 1), listed.int())
