"""The operator `blackwell_kernels::kv_index_scores`: check, describe the launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernelkit.call.launch import Target, choose_target, launch, sms_of, written_for
from kernelkit.call.operator import Operator
from kernelkit.call.tensors import (
    DTYPE_NAMES,
    is_broadcast,
    require_rank,
    require_table,
    require_tensors,
    require_tma,
    with_plain_strides,
)
from kernelkit.compile.compiler import compile_once
from kernelkit.device.param_table import ParamTable
from kvcache.layouts.rows import Rows, check_range
from mla.indexer.formats import index_format
from mla.indexer.params import HeadRows, ScoresParams
from mla.indexer.scores_config import (
    HEADS,
    PAGE_UNIT,
    BlockScaledConfig,
    ScoresConfig,
    WarpConfig,
    WgmmaConfig,
    box_for,
    grid_for,
    tokens_for,
    warp_config,
    wgmma_tokens_for,
)
from mla.indexer.sm90 import plan as sm90
from mla.indexer.sm100 import plan as sm100

ARCHS = ("sm_100a", "sm_90a")
KERNELS = ("auto", "warp", "wgmma", "tcgen05")
# Kernels that are written for one architecture: (architecture, record).
OWN = {"wgmma": ("sm_90a", "indexer_fp8"), "tcgen05": ("sm_100a", "indexer_fp4")}
SOURCES = {
    WarpConfig: "mla.indexer.scores_kernel",
    WgmmaConfig: "mla.indexer.sm90.kernel",
    BlockScaledConfig: "mla.indexer.sm100.signature",
}
QUERY_DTYPES = {"e2m1": torch.uint8, "e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}
OUT_DTYPES = (torch.float32, torch.bfloat16)
MAX_KEYS = 1 << 30  # keys of a request


@dataclass(frozen=True)
class Scores:
    """Arguments of `mla.scores`; q, q_scales and weights are those of the query."""

    rows: Rows
    q: torch.Tensor
    q_scales: torch.Tensor
    weights: torch.Tensor
    owners: torch.Tensor
    counts: torch.Tensor
    block_tables: torch.Tensor
    out: torch.Tensor
    longest: int = 1
    kernel: str = "auto"
    backend: str = "auto"
    arch: str | None = None

    def check(self) -> None:
        """Raise TypeError, ValueError or NotImplementedError, naming the value and the limit."""
        names = ("q", "q_scales", "weights", "owners", "counts", "block_tables", "out")
        tensors = {name: getattr(self, name) for name in names}
        require_tensors(pool=self.rows.pool, **tensors)
        if self.longest < 0:
            raise ValueError(f"longest {self.longest}: at least 0, the most tokens of a request")
        _check_rows(self.rows)
        _check_query(self)
        _check_out(self.out, len(self.q))
        _check_tables(self)


def run_scores(given: Scores) -> tuple[()]:
    """Write `given.out`. Kernel 'auto' is that of OWN, or 'warp'."""
    given.check()
    rows, q, out = given.rows, given.q, given.out
    target = choose_target(q.device, given.backend, given.arch, ARCHS)
    name = _kernel_for(given.kernel, rows, target)
    tokens, keys = len(q), min(out.shape[1], given.block_tables.shape[1] * rows.rows)
    if not (tokens and keys):
        return ()
    table = ParamTable.of(_params(given))
    config, ctas_per_sm = _config_for(name, given, target)
    operands: tuple = ()
    if name != "warp":
        moved = rows.data(), q.view(torch.uint8)
        operands = (tuple(with_plain_strides(x[:, :, None]) for x in moved),)
    grid = grid_for(config, tokens, keys, sms_of(q.device) * ctas_per_sm)
    compiled = compile_once(config, target.arch, SOURCES[type(config)])
    launch(compiled, (*operands, table, *grid), target, q.device)
    return ()


def _config_for(name: str, given: Scores, target: Target) -> tuple[ScoresConfig, int]:
    """Return the config of a kernel, and the number of its CTAs that share an SM."""
    rows, heads, out = given.rows, given.q.shape[1], DTYPE_NAMES[given.out.dtype]
    record, box = rows.record.name, box_for(rows.rows)
    if name == "wgmma":
        tokens = wgmma_tokens_for(heads, given.longest)
        wgmma = WgmmaConfig(record, heads, tokens, out, box=box)
        return wgmma, sm90.make_plan(wgmma).ctas_per_sm
    tokens = tokens_for(heads, given.longest)
    if name == "tcgen05":
        block_scaled = BlockScaledConfig(record, heads, tokens, out, box=box)
        return block_scaled, sm100.make_plan(block_scaled).ctas_per_sm
    warp = warp_config(record, heads, tokens, out, written_for(target.arch))
    return warp, warp.ctas_per_sm


def _params(given: Scores) -> ScoresParams:
    rows, q, weights, out = given.rows, given.q, given.weights, given.out
    block_tables = given.block_tables
    return ScoresParams(
        data=(rows.pool, rows.data_offset),
        scales=(rows.pool, rows.scale_offset),
        slot_stride=rows.pool.stride(0),
        rows=rows.rows,
        slots=len(rows.pool),
        q=HeadRows.of(q),
        q_scales=HeadRows.of(given.q_scales),
        weights=weights,
        weights_stride=weights.stride(0) * weights.itemsize,
        owners=given.owners,
        counts=given.counts,
        block_tables=block_tables,
        table_stride=block_tables.stride(0) * block_tables.itemsize,
        blocks=block_tables.shape[1],
        requests=len(block_tables),
        out=out,
        out_stride=out.stride(0) * out.itemsize,
        keys=out.shape[1],
        tokens=len(q),
    )


def _kernel_for(kernel: str, rows: Rows, target: Target) -> str:
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r}: one of {KERNELS}")
    here = written_for(target.arch), rows.record.name
    if kernel in OWN and OWN[kernel] != here:
        arch, record = OWN[kernel]
        raise NotImplementedError(
            f"kernel {kernel!r} with record {rows.record.name} on {target.arch}: it is for "
            f"{record} on {arch}"
        )
    possible = [name for name, where in OWN.items() if where == here]
    return possible[0] if possible and kernel != "warp" else "warp"


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


def _check_query(given: Scores) -> None:
    """Check data, scales and weights of queries in the record of the keys."""
    q, q_scales, weights = given.q, given.q_scales, given.weights
    form = index_format(given.rows.record.name)
    require_rank("q", q, "[T, H, D]")
    tokens, heads, size = q.shape
    dtype = QUERY_DTYPES[form.element]
    if q.dtype != dtype or size * q.itemsize != form.record.data_bytes:
        expected = form.record.data_bytes // dtype.itemsize
        given = f"{q.dtype} {tuple(q.shape)}"
        raise ValueError(f"q is {given}, expected {dtype} [T, H, {expected}]")
    if heads not in HEADS:
        raise NotImplementedError(f"{heads} heads: one of {HEADS}")
    require_tma("q", q)
    require_table("weights", weights, torch.float32, (tokens, heads))
    groups = form.groups if form.scale_size == 1 else 0
    require_table("q_scales", q_scales, torch.uint8, (tokens, heads, groups))
    for name, tensor in (("q", q), ("q_scales", q_scales), ("weights", weights)):
        if is_broadcast(tensor):
            raise ValueError(f"{name} has strides {tensor.stride()}: broadcast is not supported")
    begins = (q_scales.data_ptr(), *q_scales.stride()[:2])
    if groups and q_scales.numel() and any(begin % groups for begin in begins):
        raise ValueError(
            f"q_scales at address {begins[0]:#x} with strides {q_scales.stride()}: multiples of "
            f"{groups} bytes, the scales of a head"
        )


def _check_out(out: torch.Tensor, tokens: int) -> None:
    require_rank("out", out, "[T, S]")
    if out.dtype not in OUT_DTYPES:
        raise ValueError(f"out is {out.dtype}, expected one of {OUT_DTYPES}")
    require_table("out", out, out.dtype, (tokens, None))
    if out.shape[1] > MAX_KEYS:
        raise ValueError(f"out has {out.shape[1]} columns, limit {MAX_KEYS}")


def _check_tables(given: Scores) -> None:
    """Check the shapes of the tables and, where the values are on the host, their values."""
    rows, out = given.rows, given.out
    owners, counts, block_tables = given.owners, given.counts, given.block_tables
    for name, table in (("owners", owners), ("counts", counts)):
        require_table(name, table, torch.int32, (len(out),))
    require_table("block_tables", block_tables, torch.int32, (None, None))
    if is_broadcast(block_tables):
        raise ValueError(
            f"block_tables has strides {block_tables.stride()}: broadcast is not supported"
        )
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


SCORES = Operator("kv_index_scores", Scores, run_scores, lambda _: (), results=0, writes=("out",))
