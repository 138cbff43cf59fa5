"""The operator `blackwell_kernels::kv_prepare_query`: check, allocate, describe the launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernelkit.call.launch import choose_target, launch
from kernelkit.call.operator import Operator
from kernelkit.call.tensors import DTYPE_NAMES, is_broadcast, require_tensors, require_tma
from kernelkit.compile.compiler import compile_once
from kernelkit.device.param_table import ParamTable
from kernelkit.device.param_words import fp32_bits
from kernelkit.plan.limits import FLT_MAX
from kvcache.movement.arguments import check_positions, check_rope
from kvcache.movement.config import Angles, ctas_for
from mla.indexer.formats import PLAIN, WIDTH, Rotation, index_format
from mla.indexer.params import HeadRows, QueryParams
from mla.indexer.query_config import QueryConfig

ARCHS = ("sm_100a", "sm_90a")
DTYPES = (torch.bfloat16, torch.float32)
ELEMENTS = {"e2m1": torch.uint8, "e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}
MAX_ROWS = 1 << 31

Prepared = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Query:
    """The arguments of `mla.prepare_query`."""

    q: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    record: str = "indexer_fp4"
    factor: float = 1.0
    rotation: Rotation = PLAIN
    backend: str = "auto"
    arch: str | None = None


def query_outputs(given: Query) -> Prepared:
    """Allocate (data, scales, weights) of a query.

    There are no scales for a record whose weights include them.
    """
    q, form = given.q, index_format(given.record)
    size = form.record.data_bytes // ELEMENTS[form.element].itemsize
    data = q.new_empty(*q.shape[:2], size, dtype=ELEMENTS[form.element])
    groups = form.groups if form.scale_size == 1 else 0
    scales = q.new_empty(*q.shape[:2], groups, dtype=torch.uint8)
    return data, scales, q.new_empty(q.shape[:2], dtype=torch.float32)


def run_prepare_query(given: Query) -> Prepared:
    """Launch the kernel once and return data, scales and weights."""
    check(given)
    target = choose_target(given.q.device, given.backend, given.arch, ARCHS)
    prepared = query_outputs(given)
    config, params, ctas = plan(given, prepared)
    if ctas:
        compiled = compile_once(config, target.arch, "mla.indexer.query_kernel")
        launch(compiled, (ParamTable.of(params), ctas), target, given.q.device)
    return prepared


def check(given: Query) -> None:
    """Raise TypeError, ValueError or NotImplementedError, naming the value and the limit."""
    q, positions, cos, sin = given.q, given.positions, given.cos, given.sin
    require_tensors(q=q, weights=given.weights, positions=positions, cos=cos, sin=sin)
    index_format(given.record)
    _check(q, given.weights)
    given.rotation.check()
    if not abs(given.factor) <= FLT_MAX:
        raise ValueError(f"factor {given.factor}: a finite fp32 number, at most {FLT_MAX:.4g}")
    check_rope(positions, cos, sin, len(q))
    rows = q.shape[0] * q.shape[1]
    if rows >= MAX_ROWS:
        raise ValueError(f"{rows} heads of all tokens: fewer than {MAX_ROWS}")
    if rows:
        check_positions(positions, len(cos))


def plan(given: Query, prepared: Prepared) -> tuple[QueryConfig, QueryParams, int]:
    """Return the config, the parameters and the number of CTAs, 0 if there are no rows.

    prepared: the results that the launch writes.
    """
    q, weights, rows = given.q, given.weights, given.q.shape[0] * given.q.shape[1]
    dtypes = DTYPE_NAMES[q.dtype], DTYPE_NAMES[weights.dtype]
    config = QueryConfig(given.record, *dtypes, given.rotation)
    data, scales, out_weights = prepared
    params = QueryParams(
        q=HeadRows.of(q),
        weights=HeadRows.of(weights),
        heads=q.shape[1],
        rows=rows,
        positions=given.positions,
        angles=Angles.of(given.cos, given.sin),
        data=data,
        scales=scales,
        out_weights=out_weights,
        factor_bits=fp32_bits(given.factor),
    )
    return config, params, ctas_for(rows, config.rows)


def _check(q: torch.Tensor, weights: torch.Tensor) -> None:
    if q.ndim != 3 or q.dtype not in DTYPES or q.shape[2] != WIDTH:
        given = f"{q.dtype} {tuple(q.shape)}"
        raise ValueError(f"q is {given}, expected one of {DTYPES}, [T, H, {WIDTH}]")
    if weights.dtype not in DTYPES or weights.shape != q.shape[:2]:
        raise ValueError(
            f"weights is {weights.dtype} {tuple(weights.shape)}, expected one of {DTYPES}, "
            f"{tuple(q.shape[:2])}"
        )
    require_tma("q", q)
    if is_broadcast(q):
        raise ValueError(f"q has strides {q.stride()}: broadcast is not supported")


PREPARE_QUERY = Operator("kv_prepare_query", Query, run_prepare_query, query_outputs, results=3)
