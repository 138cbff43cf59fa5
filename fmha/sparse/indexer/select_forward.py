"""Arguments of `select`: checked by value and limit, turned into addresses, launched."""

from __future__ import annotations

import torch

from fmha.sparse.compile import compile_select
from fmha.sparse.indexer.select_config import KEY_BITS, MAX_K, SelectConfig, choose_select
from kernelkit.launch import choose_target, launch, written_for
from kernelkit.param_table import table_of
from kernelkit.tensors import (
    DTYPE_NAMES,
    is_broadcast,
    require_rank,
    require_table,
    require_tensors,
)
from kvcache.layouts.rows import check_range
from kvcache.movement.config import VECTOR_BYTES, vector_of

ARCHS = ("sm_100a", "sm_90a")
MAX_CTAS = (1 << 31) - 1
MAX_CANDIDATES = 1 << 30

Paging = tuple[torch.Tensor, torch.Tensor, int]  # owners, block tables, entries of a block


def run_select(
    scores: torch.Tensor,
    counts: torch.Tensor,
    k: int,
    paging: Paging | None = None,
    *,
    config: SelectConfig | None = None,
    backend: str = "auto",
    arch: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `fmha.sparse.indexer.api.select`; config: instead of the one that suits the sizes."""
    _check(scores, counts, k)
    numbers = _paging(scores, counts, paging)
    target = choose_target(scores.device, backend, arch, ARCHS)
    rows, candidates = scores.shape
    stride = scores.stride(0) * scores.itemsize if rows > 1 else 0
    entries, chosen = select_outputs(scores, k)
    if not rows:
        return entries, chosen
    if config is None:
        dtype, native = DTYPE_NAMES[scores.dtype], written_for(target.arch)
        aligned = vector_of(scores.data_ptr(), stride) == VECTOR_BYTES
        config = choose_select(
            dtype, (rows, candidates, k), native, paged=paging is not None, aligned=aligned
        )
    ctas = rows * config.cluster
    if ctas > MAX_CTAS:
        raise ValueError(f"{rows} rows of {config.cluster} CTAs each: up to {MAX_CTAS} in all")
    source = scores.data_ptr(), stride, candidates, counts.data_ptr()
    table = table_of([*source, k, entries.data_ptr(), chosen.data_ptr(), *numbers])
    launch(compile_select(config, target.arch), (table, ctas), target, scores.device)
    return entries, chosen


def select_outputs(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(entries, chosen), empty."""
    rows = scores.shape[0]
    entries = scores.new_empty(rows, k, dtype=torch.int64)
    return entries, scores.new_empty(rows, dtype=torch.int32)


def _check(scores: torch.Tensor, counts: torch.Tensor, k: int) -> None:
    require_tensors(scores=scores, counts=counts)
    require_rank("scores", scores, "[T, S]")
    dtypes = [dtype for dtype, name in DTYPE_NAMES.items() if name in KEY_BITS]
    if scores.dtype not in dtypes or scores.shape[1] > MAX_CANDIDATES:
        raise ValueError(
            f"scores is {scores.dtype} {tuple(scores.shape)}: {dtypes}, up to {MAX_CANDIDATES} "
            "candidates"
        )
    if (scores.shape[1] > 1 and scores.stride(1) != 1) or is_broadcast(scores):
        raise ValueError(f"scores has strides {scores.stride()}: rows of their own, in one piece")
    require_table("counts", counts, torch.int32, (len(scores),))
    check_range("counts", counts, (0, scores.shape[1] + 1), f"0 to {scores.shape[1]} candidates")
    if not 1 <= k <= MAX_K:
        raise ValueError(f"k {k}: from 1 to {MAX_K}")


def _paging(scores: torch.Tensor, counts: torch.Tensor, paging: Paging | None) -> list[int]:
    """For the kernel: addresses of owners and block tables, bytes between these, how many, blocks
    of each, entries of a block."""
    if paging is None:
        return [0] * 6
    owners, block_tables, size = paging
    require_tensors(scores=scores, owners=owners, block_tables=block_tables)
    require_table("owners", owners, torch.int32, (len(scores),))
    require_table("block_tables", block_tables, torch.int32, (None, None))
    requests, blocks = block_tables.shape
    if not 1 <= size < 1 << 31:
        raise ValueError(f"entries {size}: from 1 to {(1 << 31) - 1}")
    if len(scores) and not requests * blocks:
        raise ValueError(f"block_tables has shape {tuple(block_tables.shape)}: no block at all")
    check_range("owners", owners, (0, requests), f"block_tables has 0 to {requests - 1}")
    if counts.device.type == "cpu" and len(counts) and int(counts.max()) > blocks * size:
        raise ValueError(
            f"counts up to {int(counts.max())}: {blocks} blocks of {size} entries have "
            f"{blocks * size}"
        )
    stride = block_tables.stride(0) * block_tables.itemsize
    return [owners.data_ptr(), block_tables.data_ptr(), stride, requests, blocks, size]
