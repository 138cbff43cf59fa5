"""Arguments of the preparation of queries: checked by value and limit, turned into addresses."""

from __future__ import annotations

import struct

import torch

from fmha.sparse.compile import compile_query
from fmha.sparse.indexer.formats import WIDTH, index_format
from fmha.sparse.indexer.query_config import QueryConfig
from kernelkit.launch import choose_target
from kernelkit.tensors import DTYPE_NAMES, is_broadcast, require_tensors, require_tma
from kvcache.movement.rope import check_positions, check_rope

ARCHS = ("sm_100a", "sm_90a")
DTYPES = (torch.bfloat16, torch.float32)
ELEMENTS = {"e2m1": torch.uint8, "e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}
MAX_ROWS = 1 << 31

Prepared = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def query_outputs(q: torch.Tensor, record: str) -> Prepared:
    """(data, scales, weights) of a query in a record, empty: no scales where weights have them."""
    form = index_format(record)
    size = form.record.data_bytes // ELEMENTS[form.element].itemsize
    data = q.new_empty(*q.shape[:2], size, dtype=ELEMENTS[form.element])
    groups = form.groups if form.scale_size == 1 else 0
    scales = q.new_empty(*q.shape[:2], groups, dtype=torch.uint8)
    return data, scales, q.new_empty(q.shape[:2], dtype=torch.float32)


def run_prepare_query(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    *,
    record: str,
    factor: float = 1.0,
    backend: str = "auto",
    arch: str | None = None,
) -> Prepared:
    """See `fmha.sparse.indexer.api.prepare_query`."""
    cos, sin = rope
    require_tensors(q=q, weights=weights, positions=positions, cos=cos, sin=sin)
    index_format(record)
    _check(q, weights)
    tables = check_rope(positions, cos, sin, len(q))
    target = choose_target(q.device, backend, arch, ARCHS)
    prepared, rows = query_outputs(q, record), q.shape[0] * q.shape[1]
    if not rows:
        return prepared
    if rows >= MAX_ROWS:
        raise ValueError(f"{rows} heads of all tokens: fewer than {MAX_ROWS}")
    check_positions(positions, tables[-1])
    from kvcache.movement.forward import launch_items

    config = QueryConfig(record, DTYPE_NAMES[q.dtype], DTYPE_NAMES[weights.dtype])
    numbers = [*_strided(q), *_strided(weights), q.shape[1], rows, *tables]
    numbers += [tensor.data_ptr() for tensor in prepared]
    numbers += struct.unpack("<I", struct.pack("<f", factor))
    launch_items(compile_query(config, target.arch), numbers, (rows, config.rows), target, q.device)
    return prepared


def _strided(tensor: torch.Tensor) -> list[int]:
    """Address, bytes between tokens, bytes between heads."""
    return [tensor.data_ptr(), *(step * tensor.itemsize for step in tensor.stride()[:2])]


def _check(q: torch.Tensor, weights: torch.Tensor) -> None:
    if q.ndim != 3 or q.dtype not in DTYPES or q.shape[2] != WIDTH:
        raise ValueError(f"q is {q.dtype} {tuple(q.shape)}: {DTYPES} [T, H, {WIDTH}]")
    if weights.dtype not in DTYPES or weights.shape != q.shape[:2]:
        raise ValueError(
            f"weights is {weights.dtype} {tuple(weights.shape)}: {DTYPES} {tuple(q.shape[:2])}"
        )
    require_tma("q", q)
    if is_broadcast(q):
        raise ValueError(f"q has strides {q.stride()}: no broadcast")
