"""Arguments of scores: checked by value and limit, turned into addresses, launched."""

from __future__ import annotations

import torch

from fmha.sparse.compile import compile_block_scaled, compile_warp_scores
from fmha.sparse.indexer.formats import index_format
from fmha.sparse.indexer.scores_config import (
    HEADS,
    PAGE_UNIT,
    BlockScaledConfig,
    WarpConfig,
    box_for,
    grid_for,
    tokens_for,
    warp_config,
)
from kernelkit.launch import Target, choose_target, launch, sms_of, written_for
from kernelkit.param_table import table_of
from kernelkit.tensors import (
    DTYPE_NAMES,
    is_broadcast,
    require_rank,
    require_table,
    require_tensors,
    require_tma,
    with_plain_strides,
)
from kvcache.layouts.rows import Rows, check_range

ARCHS = ("sm_100a", "sm_90a")
KERNELS = ("auto", "warp", "tcgen05")
QUERY_DTYPES = {"e2m1": torch.uint8, "e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}
OUT_DTYPES = (torch.float32, torch.bfloat16)
MAX_KEYS = 1 << 30  # of a request

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run_scores(
    rows: Rows,
    query: Tensors,
    tables: Tensors,
    out: torch.Tensor,
    *,
    longest: int = 1,
    kernel: str = "auto",
    backend: str = "auto",
    arch: str | None = None,
) -> None:
    """See `fmha.sparse.indexer.scores_api.scores`; tables: owners, counts, block_tables.

    kernel: 'tcgen05' is for e2m1 on sm_100a, and what 'auto' takes there.
    """
    q, q_scales, weights = query
    owners, counts, block_tables = tables
    require_tensors(
        pool=rows.pool, q=q, q_scales=q_scales, weights=weights, owners=owners, counts=counts,
        block_tables=block_tables, out=out,
    )  # fmt: skip
    if longest < 0:
        raise ValueError(f"longest {longest}: the most tokens of a request, at least 0")
    _check_rows(rows)
    _check_query(rows, query)
    _check_out(out, len(q))
    _check_tables(rows, tables, out)
    target = choose_target(q.device, backend, arch, ARCHS)
    name = _kernel_for(kernel, rows, target)
    tokens, keys = len(q), min(out.shape[1], block_tables.shape[1] * rows.rows)
    if not (tokens and keys):
        return
    numbers, record = _numbers(rows, query, tables, out), rows.record.name
    heads = q.shape[1]
    options = record, heads, tokens_for(heads, longest), DTYPE_NAMES[out.dtype]
    if name == "warp":
        config = warp_config(*options, written_for(target.arch))
        _launch_warp(config, numbers, keys, target, q.device)
    else:
        config = BlockScaledConfig(*options, box=box_for(rows.rows))
        _launch_tcgen05(config, (rows, q), (numbers, keys), target)


def _launch_warp(
    config: WarpConfig, numbers: list[int], keys: int, target: Target, device: torch.device
) -> None:
    ctas, groups = grid_for(config, numbers[-1], keys, sms_of(device) * config.ctas_per_sm)
    compiled = compile_warp_scores(config, target.arch)
    launch(compiled, (table_of(numbers), ctas, groups), target, device)


def _launch_tcgen05(
    config: BlockScaledConfig,
    moved: tuple[Rows, torch.Tensor],
    problem: tuple[list[int], int],
    target: Target,
) -> None:
    """moved: rows and q, which TMA reads. problem: its numbers, and the most keys of a request."""
    from fmha.sparse.indexer.sm100.plan import make_plan
    (rows, q), (numbers, keys) = moved, problem
    at_once = sms_of(q.device) * make_plan(config).ctas_per_sm
    ctas, groups = grid_for(config, len(q), keys, at_once)
    operands = tuple(with_plain_strides(x[:, :, None]) for x in (rows.data(), q))
    compiled = compile_block_scaled(config, target.arch)
    launch(compiled, (operands, table_of(numbers), ctas, groups), target, q.device)


def _numbers(rows: Rows, query: Tensors, tables: Tensors, out: torch.Tensor) -> list[int]:
    """The fields of `scores_device.Problem`."""
    (q, q_scales, weights), (owners, counts, block_tables) = query, tables
    pool = rows.pool.data_ptr()
    numbers = [pool + rows.data_offset, pool + rows.scale_offset]
    numbers += [rows.pool.stride(0), rows.rows, len(rows.pool)]
    for tensor in (q, q_scales):
        numbers += [tensor.data_ptr(), *(step * tensor.itemsize for step in tensor.stride()[:2])]
    numbers += [weights.data_ptr(), weights.stride(0) * weights.itemsize]
    numbers += [owners.data_ptr(), counts.data_ptr()]
    numbers += [block_tables.data_ptr(), block_tables.stride(0) * block_tables.itemsize]
    numbers += [block_tables.shape[1], len(block_tables)]
    numbers += [out.data_ptr(), out.stride(0) * out.itemsize, out.shape[1], len(q)]
    return numbers


def _kernel_for(kernel: str, rows: Rows, target: Target) -> str:
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r}: one of {KERNELS}")
    possible = rows.record.name == "indexer_fp4" and written_for(target.arch) == "sm_100a"
    if kernel == "tcgen05" and not possible:
        raise NotImplementedError(
            f"kernel 'tcgen05' with record {rows.record.name} on {target.arch}: it is for "
            "indexer_fp4 on sm_100a"
        )
    return "tcgen05" if possible and kernel != "warp" else "warp"


def _check_rows(rows: Rows) -> None:
    form = index_format(rows.record.name)
    rows.check()
    if rows.rows % PAGE_UNIT:
        raise NotImplementedError(f"pages of {rows.rows} rows: a multiple of {PAGE_UNIT}")
    if form.group and rows.scale_offset % rows.record.scale_bytes:
        raise ValueError(
            f"scales at offset {rows.scale_offset} of a slot: a multiple of "
            f"{rows.record.scale_bytes}, the scales of a key"
        )


def _check_query(rows: Rows, query: Tensors) -> None:
    """data, scales and weights of queries in the record of the keys."""
    q, q_scales, weights = query
    form = index_format(rows.record.name)
    require_rank("q", q, "[T, H, D]")
    tokens, heads, size = q.shape
    dtype = QUERY_DTYPES[form.element]
    if q.dtype != dtype or size * q.itemsize != form.record.data_bytes:
        expected = form.record.data_bytes // dtype.itemsize
        raise ValueError(f"q is {q.dtype} {tuple(q.shape)}: {dtype} [T, H, {expected}]")
    if heads not in HEADS:
        raise NotImplementedError(f"{heads} heads: one of {HEADS}")
    require_tma("q", q)
    require_table("weights", weights, torch.float32, (tokens, heads))
    groups = form.groups if form.scale_size == 1 else 0
    require_table("q_scales", q_scales, torch.uint8, (tokens, heads, groups))
    for name, tensor in (("q", q), ("q_scales", q_scales), ("weights", weights)):
        if is_broadcast(tensor):
            raise ValueError(f"{name} has strides {tensor.stride()}: no broadcast")
    begins = (q_scales.data_ptr(), *q_scales.stride()[:2])
    if groups and q_scales.numel() and any(begin % groups for begin in begins):
        raise ValueError(
            f"q_scales at address {begins[0]:#x} with strides {q_scales.stride()}: multiples of "
            f"{groups} bytes, the scales of a head"
        )


def _check_out(out: torch.Tensor, tokens: int) -> None:
    require_rank("out", out, "[T, S]")
    if out.dtype not in OUT_DTYPES:
        raise ValueError(f"out is {out.dtype}: one of {OUT_DTYPES}")
    require_table("out", out, out.dtype, (tokens, None))
    if is_broadcast(out):
        raise ValueError(f"out has strides {out.stride()}: no broadcast")
    if out.shape[1] > MAX_KEYS:
        raise ValueError(f"out has {out.shape[1]} columns, limit {MAX_KEYS}")


def _check_tables(rows: Rows, tables: Tensors, out: torch.Tensor) -> None:
    """Shapes, and what stands there where it is at hand."""
    owners, counts, block_tables = tables
    for name, table in (("owners", owners), ("counts", counts)):
        require_table(name, table, torch.int32, (len(out),))
    require_table("block_tables", block_tables, torch.int32, (None, None))
    if is_broadcast(block_tables):
        raise ValueError(f"block_tables has strides {block_tables.stride()}: no broadcast")
    requests, blocks = block_tables.shape
    room = min(out.shape[1], blocks * rows.rows)
    limit = f"out has {out.shape[1]} columns, {blocks} blocks have {blocks * rows.rows} keys"
    check_range("counts", counts, (0, room + 1), limit)
    if owners.device.type != "cpu":
        return
    seeing = counts > 0
    check_range("owners", owners[seeing], (0, requests), f"there are {requests} requests")
    needed = torch.zeros(requests, dtype=torch.int32)
    needed.scatter_reduce_(0, owners[seeing].long(), counts[seeing], "amax")
    used = torch.arange(blocks) < -(-needed // rows.rows)[:, None]
    limit = f"the pool has slots 0 to {len(rows.pool) - 1}"
    check_range("block_tables", block_tables[used], (0, len(rows.pool)), limit)
