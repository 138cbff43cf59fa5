"""What the operators of routing do: check the tensors, allocate, launch.

Nothing here reads a tensor on a GPU, so a CUDA graph can capture it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernelkit.launch import choose_target, launch
from kernelkit.tensors import (
    DTYPE_NAMES,
    require_rank,
    require_table,
    require_tensors,
    require_tma,
    with_plain_strides,
    without_broadcast,
)
from moe.compile import compile_combine, compile_count, compile_route, compile_scatter
from moe.indices import check_range
from moe.routing.config import (
    VECTOR_BYTES,
    CombineConfig,
    PermutationPlan,
    RouteConfig,
    combine_columns,
    plan_permutation,
)

ARCHS = ("sm_90a", "sm_100a")


def run_route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scale: float,
    backend: str = "auto",
    arch: str | None = None,
    **static: int | str | bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, weights); static: fields of RouteConfig, see `moe.routing.api.route`."""
    _check_logits(logits, bias)
    tokens, experts = logits.shape
    config = RouteConfig(
        experts=experts, dtype=DTYPE_NAMES[logits.dtype], bias=bias is not None, **static
    )
    config.check()
    bias = None if bias is None else with_plain_strides(without_broadcast(bias))
    logits = _plain(logits)
    if config.is_even and _is_aligned(logits) and (bias is None or _is_aligned(bias)):
        config = replace(config, vectors=True)
    target = choose_target(logits.device, backend, arch, ARCHS)
    ids = logits.new_empty((tokens, config.top_k), dtype=torch.int32)
    weights = logits.new_empty((tokens, config.top_k), dtype=torch.float32)
    if tokens == 0:
        return ids, weights
    arguments = (logits, bias, (ids.view(-1), weights.view(-1)), scale)
    launch(compile_route(config, target.arch), arguments, target, logits.device)
    return ids, weights


def run_permutation(
    ids: torch.Tensor, num_experts: int, *, backend: str = "auto", arch: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(offsets, slot_of_row, row_of_slot); one launch, or two for many slots."""
    require_tensors(ids=ids)
    require_rank("ids", ids, "[T, k]")
    if ids.dtype != torch.int32:
        raise NotImplementedError(f"ids is {ids.dtype}: supported is {torch.int32}")
    rows = ids.numel()
    plan = plan_permutation(max(rows, 1), num_experts)
    target = choose_target(ids.device, backend, arch, ARCHS)
    check_range("ids", ids, num_experts, f"experts 0 to {num_experts - 1}")
    if rows == 0:
        return ids.new_zeros(num_experts + 1), ids.new_empty(0), ids.new_empty(0)
    flat = ids.reshape(-1)  # in place where ids is in one piece
    outputs = (ids.new_empty(num_experts + 1), ids.new_empty(rows), ids.new_empty(rows))
    counts = _chunk_counts(ids, plan)
    if counts is not None:
        compiled = compile_count(plan.config, target.arch)
        launch(compiled, (flat, counts, plan.turns), target, ids.device)
    compiled = compile_scatter(plan.config, target.arch)
    launch(compiled, (flat, counts, outputs, plan.turns, plan.chunks), target, ids.device)
    return outputs


def run_combine(
    y: torch.Tensor,
    weights: torch.Tensor | None,
    row_of_slot: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    backend: str = "auto",
    arch: str | None = None,
) -> torch.Tensor:
    """[T, H]; one launch. row_of_slot: [T, k]."""
    _check_combine(y, weights, row_of_slot, out_dtype)
    tokens, top_k = row_of_slot.shape
    rows, hidden = y.shape
    config = CombineConfig(top_k, DTYPE_NAMES[y.dtype], DTYPE_NAMES[out_dtype], weights is not None)
    config.check()
    if hidden % config.vector:
        raise ValueError(f"hidden size {hidden}: a multiple of {config.vector} (16-byte accesses)")
    require_tma("y", y)
    target = choose_target(y.device, backend, arch, ARCHS)
    check_range("row_of_slot", row_of_slot, rows, f"y has rows 0 to {rows - 1}")
    out = y.new_empty((tokens, hidden), dtype=out_dtype)
    if out.numel() == 0:
        return out
    weights = None if weights is None else _plain(weights)
    columns = combine_columns(tokens, hidden // config.vector)
    arguments = ((_plain(y), _plain(out)), weights, _plain(row_of_slot), columns)
    launch(compile_combine(config, target.arch), arguments, target, y.device)
    return out


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """As the DSL takes it; the rows of a broadcast table are written out."""
    return with_plain_strides(without_broadcast(tensor))


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether all rows begin at a multiple of VECTOR_BYTES."""
    begins = (tensor.data_ptr(), *(s * tensor.itemsize for s in tensor.stride()[:-1]))
    return not any(begin % VECTOR_BYTES for begin in begins)


def _check_logits(logits: torch.Tensor, bias: torch.Tensor | None) -> None:
    require_tensors(logits=logits, **({} if bias is None else {"bias": bias}))
    require_rank("logits", logits, "[T, E]")
    if logits.dtype not in DTYPE_NAMES:
        raise NotImplementedError(f"logits is {logits.dtype}: supported are {tuple(DTYPE_NAMES)}")
    require_table("logits", logits, logits.dtype, (None, None))
    if bias is not None:
        require_table("bias", bias, torch.float32, (logits.shape[1],))


def _chunk_counts(ids: torch.Tensor, plan: PermutationPlan) -> torch.Tensor | None:
    """Workspace for the counts of every chunk."""
    if not plan.config.chunked:
        return None
    return ids.new_empty((plan.chunks, plan.config.columns))


def _check_combine(
    y: torch.Tensor,
    weights: torch.Tensor | None,
    row_of_slot: torch.Tensor,
    out_dtype: torch.dtype,
) -> None:
    given = {} if weights is None else {"weights": weights}
    require_tensors(y=y, row_of_slot=row_of_slot, **given)
    require_rank("y", y, "[R, H]")
    for name, dtype in (("y", y.dtype), ("out_dtype", out_dtype)):
        if dtype not in DTYPE_NAMES:
            raise NotImplementedError(f"{name} is {dtype}: supported are {tuple(DTYPE_NAMES)}")
    require_table("row_of_slot", row_of_slot, torch.int32, (None, None))
    if weights is not None:
        require_table("weights", weights, torch.float32, tuple(row_of_slot.shape))
