"""The steps around the products of a layer of experts, for libraries that have products alone.

Rows are routed, sorted and summed by our own kernels, in one launch each. Two more launches are
written in Triton: block tables, which Humming and Marlin read, and SwiGLU, which Marlin lacks.
Both are defined here in torch as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lab.problems.moe_models import Model, Tokens
from moe import combine, permutation, route


@dataclass(frozen=True)
class Blocks:
    """Slots in blocks of one expert each, as vLLM's and SGLang's `moe_align_block_size` lay them.

    slots: int32 [B * block], slots sorted by expert; places without a slot hold their number.
    experts: int32 [B], the expert of each block, -1 for blocks that are not needed.
    padded: int32 [1], places of the blocks that are needed.
    """

    slots: torch.Tensor
    experts: torch.Tensor
    padded: torch.Tensor


def most_blocks(slots: int, experts: int, block: int) -> int:
    """Return the largest number of blocks that slots can need, known without their experts."""
    return slots // block + min(experts, slots)


def blocks_in_torch(
    offsets: torch.Tensor, slot_of_row: torch.Tensor, block: int, most: int
) -> Blocks:
    """Define the tables: `blocks_of` computes the same ones.

    Args:
        offsets: int32 [E + 1], rows of each expert.
        slot_of_row: int32 [R], slots sorted by expert.
        block: places of a block.
        most: blocks of the tables.
    """
    rows = len(slot_of_row)
    counts = offsets.diff()
    needed = (counts + block - 1) // block
    ends = needed.cumsum(0)
    number = torch.arange(most, device=offsets.device)
    expert = torch.searchsorted(ends, number, right=True)
    used = number < ends[-1]
    expert = expert.clamp(max=len(counts) - 1)
    first = offsets[expert] + (number - ends[expert] + needed[expert]) * block
    row = first[:, None] + torch.arange(block, device=offsets.device)
    inside = used[:, None] & (row < offsets[expert + 1][:, None])
    slots = torch.where(inside, slot_of_row[row.clamp(max=rows - 1)], rows)
    experts = torch.where(used, expert, -1)
    padded = (ends[-1:] * block).int()
    return Blocks(slots.flatten().int(), experts.int(), padded)


@cache
def _kernels() -> Any:
    """Return Triton's kernels; ImportError without Triton."""
    from lab.bench.peers import glue_triton

    return glue_triton


def blocks_of(offsets: torch.Tensor, slot_of_row: torch.Tensor, block: int, most: int) -> Blocks:
    """Compute the tables in one launch of Triton's on a GPU, else in torch."""
    if not offsets.is_cuda:
        return blocks_in_torch(offsets, slot_of_row, block, most)
    slots, tables = _kernels().lay_blocks(offsets, slot_of_row, block, most)
    return Blocks(slots, tables[:most], tables[most:])


def swiglu_in_torch(both: torch.Tensor, form: Any, alternating: bool) -> torch.Tensor:
    """Define SwiGLU of [R, 2 I] in fp32, rounded once: `swiglu_of` computes the same.

    form: has alpha, beta and limit.
    alternating: columns of gate and up in turn, else halves.
    """
    gate, up = (both[:, ::2], both[:, 1::2]) if alternating else both.chunk(2, -1)
    gate, up = gate.float(), up.float()
    if form.limit is not None:
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    return (gate * torch.sigmoid(form.alpha * gate) * (up + form.beta)).to(both.dtype)


def swiglu_of(both: torch.Tensor, form: Any, alternating: bool) -> torch.Tensor:
    """Compute SwiGLU in one launch of Triton's on a GPU, else in torch."""
    if not both.is_cuda:
        return swiglu_in_torch(both, form, alternating)
    return _kernels().swiglu(both, form, alternating)


def routed(tokens: Tokens, model: Model) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return (ids, weights, permutation) from the logits, in two or three launches."""
    ids, weights = route(tokens.logits, **vars(model.layer.router))
    return ids, weights, permutation(ids, model.experts)


def summed(y: torch.Tensor, weights: torch.Tensor, row_of_slot: torch.Tensor) -> torch.Tensor:
    """Sum the weighted rows of each token, in one launch."""
    return combine(y, weights, row_of_slot, partial=False)


def every_slot(tokens: Tokens) -> torch.Tensor:
    """Return int32 [T * k], the numbers of all slots: rows that lie in the order of slots."""
    return torch.arange(tokens.ids.numel(), dtype=torch.int32, device=tokens.ids.device)


def by_slot(rows: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Return rows that are sorted by expert in the order of slots."""
    out = torch.empty_like(rows)
    out[tokens.rows.slot_of_row.long()] = rows
    return out


def by_expert(rows: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Return rows in the order of slots sorted by expert."""
    return rows[tokens.rows.slot_of_row.long()]


def gathered(tokens: Tokens) -> torch.Tensor:
    """Return the token of every row, sorted by expert: [R, H]."""
    slots = tokens.ids.shape[1]
    return tokens.x[tokens.rows.slot_of_row.long() // slots]


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e4m3 [R, K], fp32 [R]) with a decode scale for each row, its maximum over 448."""
    scale = x.float().abs().amax(-1).clamp_min(1e-12) / 448
    return (x.float() / scale[:, None]).to(torch.float8_e4m3fn), scale
