"""Routing in plain torch: choice of experts, order of rows, and combination.

T tokens choose k of E experts each, in R = T k slots: slot token k + j is choice j of a token. Rows
are the slots sorted by expert; rows of an expert are in the order of slots.

The functions run on any device and read nothing back on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

SCORING = ("softmax", "sigmoid", "sqrtsoftplus")
LARGEST_LOGIT = torch.finfo(torch.float32).max
Exponential = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Permutation:
    """Order of rows by expert.

    offsets: int32 [E + 1], expert e has rows offsets[e] .. offsets[e + 1] - 1; for a range of
    experts, only its experts.
    slot_of_row, row_of_slot: int32 [R], inverse to each other.

    Slots without an expert, or of an expert outside of the range, have the row -1. Entries of
    slot_of_row past the last offset are undefined.
    """

    offsets: torch.Tensor
    slot_of_row: torch.Tensor
    row_of_slot: torch.Tensor


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    logit_bias: torch.Tensor | None = None,
    shared: int = 0,
    shared_weight: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token and their weights: ids int32 and weights fp32 [T, k +
    shared].

    logits [T, E] in any float dtype, plus logit_bias (fp32 [E], of the router's linear layer),
    become scores in fp32. Experts are chosen by score plus bias (fp32 [E]), the highest first; ties
    go to the lower index. They come from the topk_group best of n_group groups of E / n_group
    neighbours. A group is ranked by the sum of its two best experts (DeepSeek-V3). Weights are the
    scores without bias, over their sum if `renormalize` (over 1 if that is 0), times scale. Softmax
    over the chosen experts alone (gpt-oss, Mixtral) is 'softmax' with renormalize, up to rounding.
    'sqrtsoftplus' is sqrt(ln(1 + exp(x))) (DeepSeek-V4).

    After its choices every token has the experts E .. E + shared - 1, with shared_weight.

    A NaN counts as -inf, +inf as the largest number. A token with only -inf has scores of 0.
    """
    _check_route(logits.shape[1], top_k, scoring, n_group, topk_group)
    logits = logits.float()
    of_experts = scores(logits if logit_bias is None else logits + logit_bias, scoring)
    chosen_by = of_experts if bias is None else of_experts + bias.float()
    order = chosen_by.argsort(dim=-1, descending=True, stable=True)
    closed = _closed_groups(chosen_by, n_group, topk_group).gather(-1, order)
    order = order.gather(-1, closed.int().argsort(dim=-1, stable=True))
    ids = order[:, :top_k]
    weights = weights_of(of_experts, ids, renormalize) * scale
    every = torch.arange(shared, device=ids.device).expand(len(ids), shared) + logits.shape[1]
    fixed = weights.new_full(every.shape, shared_weight)
    return torch.cat((ids, every), -1).int(), torch.cat((weights, fixed), -1)


def scores(logits: torch.Tensor, scoring: str, exp: Exponential = torch.exp) -> torch.Tensor:
    """Return the scores that `route` computes from logits [T, E], in their dtype. exp: may be one
    that rounds as kernels do."""
    logits = torch.nan_to_num(logits, nan=-math.inf, posinf=LARGEST_LOGIT, neginf=-math.inf)
    if scoring == "sigmoid":
        return 1.0 / (1.0 + exp(-logits))
    if scoring == "sqrtsoftplus":
        return (torch.log1p(exp(-logits.abs())) + logits.clamp(min=0)).sqrt()
    top = logits.amax(-1, keepdim=True)
    weights = exp(logits - top.masked_fill(top == -math.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0)


def weights_of(scores: torch.Tensor, ids: torch.Tensor, renormalize: bool) -> torch.Tensor:
    """Return the weights of the experts ids [T, k], from scores [T, E]."""
    weights = scores.gather(-1, ids.long())
    if not renormalize:
        return weights
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0)


def permutation(
    ids: torch.Tensor, num_experts: int, *, expert_range: tuple[int, int] | None = None
) -> Permutation:
    """Sort slots by expert. ids: int [T, k] within 0 .. num_experts - 1, or other values for none.

    expert_range: (first, end): only these have rows, and offsets are theirs. Slots of other experts
    have the row -1, and unused rows the slot -1.
    """
    first, end = expert_range or (0, num_experts)
    expert = ids.flatten().long() - first
    is_here = (expert >= 0) & (expert < end - first)
    expert = torch.where(is_here, expert, end - first)
    slot_of_row = expert.argsort(stable=True)
    row_of_slot = torch.empty_like(slot_of_row)
    row_of_slot[slot_of_row] = torch.arange(len(expert), device=ids.device)
    edges = torch.arange(end - first + 1, device=ids.device)
    offsets = torch.searchsorted(expert[slot_of_row], edges)
    slot_of_row = slot_of_row.masked_fill(~is_here[slot_of_row], -1)
    row_of_slot = row_of_slot.masked_fill(~is_here, -1)
    return Permutation(offsets.int(), slot_of_row.int(), row_of_slot.int())


def combine(
    y: torch.Tensor,
    weights: torch.Tensor | None,
    row_of_slot: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the sum over j of weights[t, j] y[row_of_slot[t, j]], [T, H]: j by j, rounded to
    `dtype`.

    y [R, H]; weights [T, k], None for 1; row_of_slot int [T, k], or [T k] with weights. A slot
    without a row, -1, adds nothing.
    """
    row = row_of_slot.long().reshape((row_of_slot if weights is None else weights).shape)
    total = torch.zeros(len(row), y.shape[1], dtype=dtype, device=y.device)
    for j in range(row.shape[1]):
        part = y[row[:, j].clamp(min=0)].to(dtype)
        part = part if weights is None else weights[:, j, None].to(dtype) * part
        total = torch.where(row[:, j, None] < 0, total, total + part)
    return total


def _check_route(experts: int, top_k: int, scoring: str, n_group: int, topk_group: int) -> None:
    if scoring not in SCORING:
        raise ValueError(f"scoring {scoring!r}: one of {', '.join(SCORING)}")
    if n_group < 1 or experts % n_group:
        raise ValueError(f"n_group {n_group}: a divisor of {experts} experts")
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"topk_group {topk_group}: from 1 to n_group = {n_group}")
    eligible = experts // n_group * topk_group
    if not 1 <= top_k <= eligible:
        raise ValueError(f"top_k {top_k}: from 1 to {eligible}, the experts of {topk_group} groups")


def _closed_groups(chosen_by: torch.Tensor, n_group: int, topk_group: int) -> torch.Tensor:
    """Return bool [T, E]: experts of the groups that are not among the best."""
    in_groups = chosen_by.unflatten(-1, (n_group, -1))
    best = in_groups.topk(min(2, in_groups.shape[-1]), dim=-1).values.sum(-1)
    order = best.argsort(dim=-1, descending=True, stable=True)
    closed = torch.ones_like(best, dtype=torch.bool)
    closed.scatter_(-1, order[:, :topk_group], False)
    return closed[..., None].expand_as(in_groups).flatten(-2)
