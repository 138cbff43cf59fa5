"""The operators of routing: check the tensors, allocate, describe the launches.

Nothing here reads a tensor on a GPU, so a CUDA graph can capture it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kernelkit.call.launch import choose_target, launch
from kernelkit.call.operator import Operator
from kernelkit.call.tensors import (
    DTYPE_NAMES,
    in_sequence,
    plain_table,
    require_rank,
    require_table,
    require_tensors,
    require_tma,
)
from kernelkit.compile.compiler import compile_once
from moe.arguments import Router, check_bias, check_expert_range, check_factor, check_range
from moe.routing.config import (
    VECTOR_BYTES,
    CombineConfig,
    RouteConfig,
    checked,
    columns_of,
    in_vectors,
    plan_permutation,
)

ARCHS = ("sm_90a", "sm_100a")
BIASES = ("bias", "logit_bias")  # fields of `Router`
PERMUTING = "moe.routing.permutation_kernel"
# Offsets, slot_of_row, row_of_slot, and the first expert with rows (None if all have rows).
OrderTables = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int | None]


@dataclass(frozen=True, kw_only=True)
class Choices(Router):
    """The arguments of `moe.route`."""

    logits: torch.Tensor
    backend: str = "auto"
    arch: str | None = None


@dataclass(frozen=True)
class Slots:
    """The arguments of `moe.permutation`; end_expert: None for all experts."""

    ids: torch.Tensor
    num_experts: int
    first_expert: int = 0
    end_expert: int | None = None
    backend: str = "auto"
    arch: str | None = None

    @property
    def experts(self) -> int:
        """Number of experts that have rows."""
        end = self.num_experts if self.end_expert is None else self.end_expert
        return end - self.first_expert


@dataclass(frozen=True)
class Weighted:
    """The arguments of `moe.combine`; row_of_slot: [T, k]."""

    y: torch.Tensor
    row_of_slot: torch.Tensor
    weights: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    partial: bool = False
    backend: str = "auto"
    arch: str | None = None


def run_route(
    given: Choices, order: OrderTables | None = None, cleared: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch once, and return (ids, weights). The launch of a single token also writes the order of
    its slots. cleared: int32, which become zeros."""
    logits, biases = given.logits, biases_of(given)
    _check_logits(logits, biases)
    config = config_of(given, logits.shape[1], logits.dtype)
    scales = scales_of(given)
    logits, bias, logit_bias = map(
        plain_table, (logits, biases.get("bias"), biases.get("logit_bias"))
    )
    config = writing(config_for(config, logits, bias, logit_bias), order, cleared)
    target = choose_target(logits.device, given.backend, given.arch, ARCHS)
    ids, weights = empty_choices(given)
    if len(logits):
        outputs = ids.view(-1), weights.view(-1)
        arguments = (logits, bias, logit_bias, outputs, scales, order, cleared)
        compiled = compile_once(config, target.arch, "moe.routing.topk_kernel")
        launch(compiled, arguments, target, logits.device)
    return ids, weights


def biases_of(router: Router) -> dict[str, torch.Tensor]:
    """Map the name of each bias to its tensor, leaving out those that are None."""
    biases = {name: getattr(router, name) for name in BIASES}
    return {name: bias for name, bias in biases.items() if bias is not None}


def config_of(router: Router, experts: int, dtype: torch.dtype) -> RouteConfig:
    """Return the checked config; `in_vectors` sets `vectors`."""
    names = ("top_k", "scoring", "n_group", "topk_group", "renormalize", "shared")
    static: dict[str, Any] = {name: getattr(router, name) for name in names}
    static |= {name: getattr(router, name) is not None for name in BIASES}
    return checked(RouteConfig(experts, dtype=DTYPE_NAMES[dtype], **static))


def scales_of(router: Router) -> tuple[float, float | None]:
    """Return (scale, shared_weight), checked; shared_weight is None without shared experts."""
    check_factor("scale", router.scale)
    check_factor("shared_weight", router.shared_weight)
    return router.scale, router.shared_weight if router.shared else None


def config_for(config: RouteConfig, *read: torch.Tensor | None) -> RouteConfig:
    """The config for these logits and biases."""
    aligned = all(_is_aligned(each) for each in read if each is not None)
    return in_vectors(config) if aligned else config


def writing(
    config: RouteConfig, order: OrderTables | None, cleared: torch.Tensor | None
) -> RouteConfig:
    """Return the config of a launch that writes these tables, or none."""
    config = replace(config, clears=cleared is not None)
    if order is None:
        return config
    return replace(config, ordered=True, partial=order[-1] is not None)


def empty_choices(given: Choices) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate ids and weights."""
    logits, shape = given.logits, (given.logits.shape[0], given.slots)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


def run_permutation(given: Slots) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (offsets, slot_of_row, row_of_slot); one launch, or two for many slots."""
    ids, experts = given.ids, given.num_experts
    require_tensors(ids=ids)
    require_rank("ids", ids, "[T, k]")
    if ids.dtype != torch.int32:
        raise NotImplementedError(f"ids is {ids.dtype}: supported is {torch.int32}")
    partial = given.end_expert is not None
    if partial:
        check_expert_range(given.first_expert, given.first_expert + given.experts, experts)
    plan = plan_permutation(max(ids.numel(), 1), given.experts, partial)
    target = choose_target(ids.device, given.backend, given.arch, ARCHS)
    check_range("ids", ids, experts, f"experts are 0 to {experts - 1}, and -1 for none", begin=-1)
    outputs = empty_permutation(given)
    if ids.numel() == 0:
        outputs[0].zero_()
        return outputs
    flat = in_sequence(ids)
    counts, first = None, given.first_expert if partial else None
    if plan.config.chunked:
        counts = ids.new_empty(plan.chunks * plan.config.words)
        compiled = compile_once(plan.config, target.arch, f"{PERMUTING}:host_function_of_count")
        launch(compiled, (flat, first, counts, plan.rounds), target, ids.device)
    compiled = compile_once(plan.config, target.arch, f"{PERMUTING}:host_function_of_scatter")
    launch(compiled, (flat, first, counts, outputs, plan.rounds, plan.chunks), target, ids.device)
    return outputs


def empty_permutation(given: Slots) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate the three tables."""
    return empty_tables(given.ids, given.experts, given.ids.numel())


def empty_tables(
    near: torch.Tensor, experts: int, slots: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate offsets, slot_of_row and row_of_slot on the device of `near`."""
    offsets = near.new_empty(experts + 1, dtype=torch.int32)
    return offsets, offsets.new_empty(slots), offsets.new_empty(slots)


def run_combine(given: Weighted) -> tuple[torch.Tensor]:
    """Launch once, and return [T, H]."""
    y, weights, row_of_slot = given.y, given.weights, given.row_of_slot
    out_dtype = y.dtype if given.out_dtype is None else given.out_dtype
    _check_combine(y, weights, row_of_slot, out_dtype)
    (tokens, top_k), (rows, hidden) = row_of_slot.shape, y.shape
    names = DTYPE_NAMES[y.dtype], DTYPE_NAMES[out_dtype]
    config = checked(CombineConfig(top_k, *names, weights is not None, given.partial))
    columns = columns_of(config, tokens, hidden)
    require_tma("y", y)
    target = choose_target(y.device, given.backend, given.arch, ARCHS)
    begin = -1 if given.partial else 0
    check_range("row_of_slot", row_of_slot, rows, f"y has rows 0 to {rows - 1}", begin=begin)
    (out,) = empty_combined(given)
    if out.numel():
        y, of_result, weights, row_of_slot = map(plain_table, (y, out, weights, row_of_slot))
        arguments = ((y, of_result), weights, row_of_slot, columns)
        compiled = compile_once(config, target.arch, "moe.routing.combine_kernel")
        launch(compiled, arguments, target, y.device)
    return (out,)


def empty_combined(given: Weighted) -> tuple[torch.Tensor]:
    """Allocate the result."""
    shape = given.row_of_slot.shape[0], given.y.shape[1]
    return (given.y.new_empty(shape, dtype=given.out_dtype or given.y.dtype),)


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether all rows begin at a multiple of VECTOR_BYTES."""
    begins = (tensor.data_ptr(), *(s * tensor.itemsize for s in tensor.stride()[:-1]))
    return not any(begin % VECTOR_BYTES for begin in begins)


def _check_logits(logits: torch.Tensor, biases: dict[str, torch.Tensor]) -> None:
    require_tensors(logits=logits, **biases)
    require_rank("logits", logits, "[T, E]")
    if logits.dtype not in DTYPE_NAMES:
        raise NotImplementedError(f"logits is {logits.dtype}: supported are {tuple(DTYPE_NAMES)}")
    require_table("logits", logits, logits.dtype, (None, None))
    for name, bias in biases.items():
        require_table(name, bias, torch.float32, (logits.shape[1],))
        check_bias(name, bias)


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


ROUTE = Operator("moe_route", Choices, run_route, empty_choices, results=2)
PERMUTATION = Operator("moe_permutation", Slots, run_permutation, empty_permutation, results=3)
COMBINE = Operator("moe_combine", Weighted, run_combine, empty_combined, results=1)
