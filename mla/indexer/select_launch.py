"""The operator `blackwell_kernels::kv_index_select`: check, allocate, describe the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernelkit.call.launch import choose_target, launch, written_for
from kernelkit.call.operator import Operator
from kernelkit.call.tensors import (
    DTYPE_NAMES,
    is_broadcast,
    require_rank,
    require_table,
    require_tensors,
)
from kernelkit.compile.compiler import compile_once
from kernelkit.device.param_table import ParamTable
from kvcache.layouts.rows import check_range
from kvcache.movement.config import VECTOR_BYTES, vector_of
from mla.indexer.params import SelectParams
from mla.indexer.select_config import KEY_BITS, MAX_K, SelectConfig, choose_select

ARCHS = ("sm_100a", "sm_90a")
MAX_CTAS = (1 << 31) - 1
MAX_CANDIDATES = 1 << 30


@dataclass(frozen=True)
class Candidates:
    """Arguments of `mla.select`."""

    scores: torch.Tensor
    counts: torch.Tensor
    k: int
    owners: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    entries: int = 1
    backend: str = "auto"
    arch: str | None = None


def run_select(
    given: Candidates, config: SelectConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel once and return (entries, chosen).

    config: used in place of the config chosen for the sizes.
    """
    scores, counts, k = given.scores, given.counts, given.k
    _check(scores, counts, k)
    paged = _paging(given)
    target = choose_target(scores.device, given.backend, given.arch, ARCHS)
    rows, candidates = scores.shape
    stride = scores.stride(0) * scores.itemsize if rows > 1 else 0
    entries, chosen = select_outputs(given)
    if not rows:
        return entries, chosen
    if config is None:
        dtype, native = DTYPE_NAMES[scores.dtype], written_for(target.arch)
        aligned = vector_of(scores.data_ptr(), stride) == VECTOR_BYTES
        config = choose_select(
            dtype, (rows, candidates, k), native, paged=bool(paged), aligned=aligned
        )
    ctas = rows * config.cluster
    if ctas > MAX_CTAS:
        raise ValueError(f"{rows} rows of {config.cluster} CTAs each: up to {MAX_CTAS} in all")
    params = SelectParams(
        scores=scores,
        scores_stride=stride,
        columns=candidates,
        counts=counts,
        k=k,
        entries=entries,
        chosen=chosen,
        **paged,
    )
    compiled = compile_once(config, target.arch, "mla.indexer.select_kernel")
    launch(compiled, (ParamTable.of(params), ctas), target, scores.device)
    return entries, chosen


def select_outputs(given: Candidates) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate (entries, chosen)."""
    scores, rows = given.scores, given.scores.shape[0]
    entries = scores.new_empty(rows, given.k, dtype=torch.int64)
    return entries, scores.new_empty(rows, dtype=torch.int32)


def _check(scores: torch.Tensor, counts: torch.Tensor, k: int) -> None:
    require_tensors(scores=scores, counts=counts)
    require_rank("scores", scores, "[T, S]")
    dtypes = [dtype for dtype, name in DTYPE_NAMES.items() if name in KEY_BITS]
    if scores.dtype not in dtypes or scores.shape[1] > MAX_CANDIDATES:
        raise ValueError(
            f"scores is {scores.dtype} {tuple(scores.shape)}, expected one of {dtypes} with up to "
            f"{MAX_CANDIDATES} candidates"
        )
    if (scores.shape[1] > 1 and scores.stride(1) != 1) or is_broadcast(scores):
        raise ValueError(f"scores has strides {scores.stride()}: not rows of contiguous elements")
    require_table("counts", counts, torch.int32, (len(scores),))
    check_range("counts", counts, (0, scores.shape[1] + 1), f"0 to {scores.shape[1]} candidates")
    if not 1 <= k <= MAX_K:
        raise ValueError(f"k {k}: from 1 to {MAX_K}")


def _paging(given: Candidates) -> dict[str, Any]:
    """Return the fields of `SelectParams` that locate entries; none without block tables."""
    scores, counts, owners, block_tables = (
        given.scores, given.counts, given.owners, given.block_tables
    )  # fmt: skip
    if (owners is None) != (block_tables is None):
        raise ValueError("owners and block_tables: give both or neither")
    if owners is None:
        return {}
    size = given.entries
    require_tensors(scores=scores, owners=owners, block_tables=block_tables)
    require_table("owners", owners, torch.int32, (len(scores),))
    require_table("block_tables", block_tables, torch.int32, (None, None))
    requests, blocks = block_tables.shape
    if not 1 <= size < 1 << 31:
        raise ValueError(f"entries {size}: from 1 to {(1 << 31) - 1}")
    if len(scores) and not requests * blocks:
        raise ValueError(
            f"block_tables has shape {tuple(block_tables.shape)}, expected at least one block"
        )
    check_range("owners", owners, (0, requests), f"block_tables has 0 to {requests - 1}")
    if counts.device.type == "cpu" and len(counts) and int(counts.max()) > blocks * size:
        raise ValueError(
            f"counts up to {int(counts.max())}: {blocks} blocks of {size} entries have "
            f"{blocks * size}"
        )
    return {
        "owners": owners,
        "block_tables": block_tables,
        "table_stride": block_tables.stride(0) * block_tables.itemsize,
        "requests": requests,
        "blocks": blocks,
        "block_entries": size,
    }


SELECT = Operator("kv_index_select", Candidates, run_select, select_outputs, results=2)
