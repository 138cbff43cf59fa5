"""A right call of every public function that takes arguments, for hostile ones to be made of."""

from __future__ import annotations

from typing import Any

import torch

import fmha
import gqa_lowlatency
from blackwell_engines import parallel
from kernelkit.call.prepared import Plan
from tests.hostile_cache_bases import CACHE_BASES
from tests.hostile_generator import Base, Given
from tests.hostile_moe_bases import MOE_BASES
from tests.hostile_sparse_bases import SPARSE_BASES
from tests.hostile_values import angles, bf16, normal, positive

INT = torch.int32


def _attention() -> Given:
    return {"q": bf16(2, 8, 4, 64), "k": bf16(2, 32, 2, 64), "v": bf16(2, 32, 2, 64),
            "out": bf16(2, 8, 4, 64), "sinks": normal(4),
            "kv_lens": torch.tensor([32, 9], dtype=INT)}  # fmt: skip


def _packed() -> Given:
    starts = torch.tensor([0, 5, 8], dtype=INT)
    return {"q": bf16(8, 4, 64), "k": bf16(9, 16, 2, 64), "v": bf16(9, 16, 2, 64),
            "cu_seqlens_q": starts, "max_seqlen_q": 5, "causal": True, "window": (7, 0),
            "q_offset": torch.tensor([3, 0], dtype=INT), "scale": 0.5, "softcap": 3.0,
            "kv_lens": torch.tensor([17, 9], dtype=INT), "rope": angles(32, 8),
            "page_table": torch.tensor([[1, 2], [8, 0]], dtype=INT),
            "config": fmha.AttentionConfig()}  # fmt: skip


def _decode() -> Given:
    k, v = (normal(9, 64, 2, 64, dtype=torch.float8_e4m3fn) for _ in range(2))
    return {"q": bf16(2, 1, 8, 64), "k": k, "v": v, "out": bf16(2, 1, 8, 64),
            "k_scale": positive(2), "v_scale": positive(2), "sinks": normal(8),
            "kv_lens": torch.tensor([10, 64], dtype=INT), "max_kv_len": 64,
            "page_table": torch.tensor([[3], [1]], dtype=INT), "window": 20,
            "config": gqa_lowlatency.DecodeConfig()}  # fmt: skip


def _merge() -> Given:
    parts = [(normal(1, 3, 2, 64), normal(1, 2, 3)) for _ in range(2)]
    return {"parts": parts, "sinks": normal(2)}


def _without(given: Given, *names: str) -> Given:
    return {name: value for name, value in given.items() if name not in names}


def _planned(plan: Plan, given: Given) -> Any:
    """The results of a plan for the tensors that it was made with."""
    moves = ("q", "k", "v", "kv_lens", "q_offset", "first_keys", "cu_seqlens_q", "cu_seqlens_k",
             "page_table")  # fmt: skip
    tensors = {name: given.get(name) for name in moves}
    return plan(**{n: t for n, t in tensors.items() if isinstance(t, torch.Tensor)})


def _warming(given: Given) -> Given:
    return {**_without(given, "out"), "batches": (1, 2), "lengths": (1, 64)}


BASES = {
    base.name: base
    for base in (
        Base("attention", fmha.attention, _attention, ("out",), frozenset({"q", "out"})),
        Base("attention of pages", fmha.attention, _packed),
        Base(
            "attention_plan", fmha.attention_plan, lambda: _without(_attention(), "out"),
            computed=_planned,
        ),
        Base("fmha.warmup", fmha.warmup, lambda: _warming(_packed()), computed=None),
        Base("decode", gqa_lowlatency.decode, _decode, ("out",), frozenset({"q", "out"})),
        Base(
            "decode_plan", gqa_lowlatency.decode_plan, lambda: _without(_decode(), "out"),
            computed=_planned,
        ),
        Base(
            "gqa_lowlatency.warmup", gqa_lowlatency.warmup, lambda: _warming(_decode()),
            computed=None,
        ),
        Base("merge", fmha.merge, _merge),
        Base(
            "own_positions", parallel.own_positions, lambda: {"tokens": 8, "rank": 1, "world": 2}
        ),
        Base(
            "own_tokens", parallel.own_tokens,
            lambda: {"x": normal(2, 8, 3) > 0, "rank": 1, "world": 2},
        ),
        Base(
            "join", parallel.join, lambda: {"parts": [normal(2, 4, 3) > 0, normal(2, 4, 3) > 0]}
        ),
        *SPARSE_BASES,
        *CACHE_BASES,
        *MOE_BASES,
    )
}  # fmt: skip
