"""The best keys of every row in plain torch: what the kernel does, to the last place."""

from __future__ import annotations

import torch


def select(
    scores: torch.Tensor,
    counts: torch.Tensor,
    k: int,
    tables: tuple[torch.Tensor, torch.Tensor, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(entries int64 [T, k], chosen int32 [T]); tables: owners, block tables, entries of a block.

    Of scores[t, :counts[t]] the k largest, of equal ones the first, a NaN below all numbers; in the
    order of candidates. Their numbers, or with tables their entries; behind them -1.
    """
    entries = torch.full((len(scores), k), -1, dtype=torch.int64, device=scores.device)
    chosen = counts.clamp(0, scores.shape[1]).clamp(max=k).to(torch.int32)
    for row, count in enumerate(counts.clamp(0, scores.shape[1]).tolist()):
        values = scores[row, :count].double()
        # By what counts less first: stable sorts keep the order of candidates among equals.
        order = values.nan_to_num(-torch.inf, torch.inf, -torch.inf).argsort(
            descending=True, stable=True
        )
        order = order[values[order].isnan().byte().argsort(stable=True)]
        best = order[:k].sort().values
        entries[row, : len(best)] = (
            best if tables is None else numbers_for_gather(best, row, tables)
        )
    return entries, chosen


def numbers_for_gather(
    candidates: torch.Tensor, row: int, tables: tuple[torch.Tensor, torch.Tensor, int]
) -> torch.Tensor:
    """Numbers for `gather` of candidates of a row; -1 of those that the block table has not."""
    owners, block_tables, size = tables
    blocks = block_tables[int(owners[row])].long()
    pages = candidates // size
    known = pages < len(blocks)
    found = blocks[pages.clamp(max=len(blocks) - 1)] * size + candidates % size
    return torch.where(known & (found >= 0), found, -1)
