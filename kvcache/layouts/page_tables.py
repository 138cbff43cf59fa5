"""Page tables of other libraries, and the slots of tokens in pages: torch operations, no kernel.

FlashInfer lists the pages of all entries one after the other (`kv_indptr`, `kv_indices`,
`kv_last_page_len`). `fmha.attention` and `gqa_lowlatency.decode` read a table with a row for each
entry, and lengths. `append_pages` reads the slot of each token.
"""

from __future__ import annotations

import torch

from kernelkit.call.tensors import (
    brought,
    require_memory,
    require_table,
    require_tensors,
    require_types,
)
from kernelkit.plan.limits import MAX_POSITION
from kvcache.checks import whole
from kvcache.layouts.rows import NO_ENTRY, check_range

NO_PAGE = -1  # fills the rows of a table after the pages of an entry
INDEX_DTYPES = (torch.int32, torch.int64)


def page_table(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    page_size: int,
    *,
    max_pages: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert FlashInfer's page lists to the page table and the lengths of attention.

    Entry b has pages indices[indptr[b] : indptr[b + 1]], all of them full but the last.

    Args:
        indptr: int32 [B + 1], where the pages of each entry begin in `indices`, and the last end.
        indices: int32 [N], N >= indptr[B]: the pages of all entries, one entry after the other.
        last_page_len: int32 [B], rows of the last page, 1 to page_size. Ignored for an entry
            without pages, which has length 0.
        page_size: rows of a page.
        max_pages: columns of the table. None is the largest number of pages of an entry; the host
            waits for it if `indptr` is on a GPU.

    `indptr` and `last_page_len` are on the device of `indices`, or both on the CPU.

    Returns:
        (page_table, kv_lens) on the device of `indices`: int32 [B, max_pages], with -1 after the
        pages of an entry, and int32 [B].

    Raises:
        TypeError, ValueError: naming the value and the limit. Contents are checked on the CPU. On a
            GPU, an entry with more than max_pages pages ends with them.
    """
    page_size = whole("page_size", page_size, 1, MAX_POSITION)
    _check_lists(indptr, indices, last_page_len)
    on_host, counts = indptr.device.type == "cpu", indptr.diff().long()
    if on_host:
        _check_contents(indptr, indices, last_page_len, page_size)
    most = 0 if max_pages is None else whole("max_pages", max_pages)
    if max_pages is None or on_host:
        longest = int(counts.max()) if len(counts) else 0
        most = longest if max_pages is None else most
        if longest > most:
            raise ValueError(f"max_pages {most}, but an entry has {longest} pages")
    if most * page_size >= MAX_POSITION:
        raise ValueError(f"{most} pages of {page_size} rows: at most {MAX_POSITION - 1} keys")
    lengths = torch.where(counts > 0, (counts - 1) * page_size + last_page_len, 0)
    lengths = lengths.clamp(max=most * page_size).int()
    column = torch.arange(most, device=indptr.device)
    places = torch.where(column < counts[:, None], indptr[:-1, None] + column, len(indices))
    if indptr.device != indices.device:
        places, lengths = (brought(each, indices.device) for each in (places, lengths))
    pages = torch.cat((indices, indices.new_full((1,), NO_PAGE)))
    return pages[places.clamp(0, len(indices))], lengths


def page_slots(
    table: torch.Tensor,
    positions: torch.Tensor,
    page_size: int,
    *,
    entries: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the slot of each token, page * page_size + row, as `append_pages` reads it.

    Args:
        table: int32 [B, W], the page table: entry b has its keys in pages table[b].
        positions: int32 or int64 [B, n], positions of n tokens of each entry; or [T] with
            `entries`. A negative position is no token.
        page_size: rows of a page.
        entries: int32 or int64 [T], the entry of each token; a negative one is no token.

    Returns:
        int64 [B n], the tokens of an entry one after the other, or [T]. The slot is -1 where there
        is no token, and on a GPU also where the table has no page for it.

    Raises:
        TypeError, ValueError: naming the value and the limit. Contents are checked on the CPU.
    """
    page_size = whole("page_size", page_size, 1, MAX_POSITION)
    given = {"table": table, "positions": positions}
    given |= {} if entries is None else {"entries": entries}
    require_tensors(**given)
    require_memory(**given)
    require_table("table", table, torch.int32, (None, None))
    (batch, width), rank = table.shape, 1 if entries is not None else 2
    _require_index("positions", positions, (None,) if rank == 1 else (batch, None))
    if entries is None:
        entries = torch.arange(batch, device=table.device)[:, None].expand_as(positions)
    else:
        _require_index("entries", entries, tuple(positions.shape))
    entries, positions = entries.flatten().long(), positions.flatten().long()
    column, token = positions // page_size, (entries >= 0) & (positions >= 0)
    if table.device.type == "cpu":
        limit = f"the table has {width} pages of {page_size} rows"
        check_range("entries", entries[token], (0, batch), f"the table has {batch} rows")
        check_range("positions", positions[token], (0, width * page_size), limit)
        found = table[entries[token], column[token]]
        check_range("pages of tokens", found, (0, 1 << 31), "0 or more")
    exists = token & (entries < batch) & (column < width)
    pages = torch.cat((table.flatten(), table.new_full((1,), NO_PAGE)))
    page = pages[torch.where(exists, entries * width + column, table.numel())].long()
    return torch.where(page >= 0, page * page_size + positions % page_size, NO_ENTRY)


def _require_index(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise ValueError unless `tensor` is int32 or int64 of this shape."""
    wanted = tensor.dtype if tensor.dtype in INDEX_DTYPES else torch.int64
    require_table(name, tensor, wanted, shape)


def _check_lists(indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor) -> None:
    """Check types, shapes and devices of FlashInfer's three tensors."""
    given = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
    require_types(**given)
    require_memory(**given)
    require_tensors(indptr=indptr, last_page_len=last_page_len)
    for name, tensor in given.items():
        require_table(name, tensor, torch.int32, (None,))
    if len(indptr) != len(last_page_len) + 1:
        raise ValueError(
            f"indptr has {len(indptr)} numbers, last_page_len {len(last_page_len)}: B + 1 and B"
        )
    devices = indptr.device, indices.device
    if devices[0] != devices[1] and [each.type for each in devices] != ["cpu", "cuda"]:
        raise ValueError(
            f"indptr is on {indptr.device}, indices on {indices.device}: one device, or indptr and "
            "last_page_len on the CPU"
        )


def _check_contents(
    indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, page_size: int
) -> None:
    """Check the numbers of page lists on the CPU; those of `indices` only if they are there."""
    counts, used = indptr.diff(), int(indptr[-1])
    if indptr[0] != 0 or (counts < 0).any() or used > len(indices):
        raise ValueError(
            f"indptr {indptr.tolist()}: not ascending from 0 to at most {len(indices)} indices"
        )
    wrong = (counts > 0) & ((last_page_len < 1) | (last_page_len > page_size))
    if wrong.any():
        entry = int(wrong.nonzero()[0])
        raise ValueError(
            f"last_page_len {int(last_page_len[entry])} of entry {entry}: from 1 to {page_size}"
        )
    check_range("indices", indices[:used], (0, 1 << 31), "pages are 0 or more")
