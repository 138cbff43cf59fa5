"""Right calls of the mixture of experts, for hostile ones to be made of."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch

import moe
from moe.api import InPlacePlan
from moe.formats import laid_out
from moe.reference import quantise as quantised
from tests.hostile_generator import Base, Given
from tests.hostile_values import bf16, normal, positive, some_bytes
from tests.moe.hub_files import LAYER, experts_of, gpt_oss, write

INT = torch.int32
OFFSETS = torch.tensor([0, 2, 2, 5], dtype=INT)
W13, W2 = bf16(3, 128, 128), bf16(3, 128, 64)
PACKED, MX = moe.pack(W13, W2, "nvfp4"), moe.pack(W13, W2, "mxfp4")
BIASED = moe.pack(W13, W2, "mxfp4", biases=(bf16(3, 128), bf16(3, 128)))
ARRANGED = moe.arrange(MX)
NAMES = [f"{LAYER}.experts.{expert}" for expert in range(2)]


def _route() -> Given:
    return {"logits": normal(5, 8), "top_k": 2, "bias": normal(8), "n_group": 2,
            "logit_bias": normal(8), "shared": 1, "scale": 2.0}  # fmt: skip


def _route_tokens() -> Given:
    linear = moe.RouterLinear(bf16(8, 64), bf16(8))
    return {"x": bf16(5, 64), "linear": linear, "router": moe.Router(2, bias=normal(8))}


def _permutation() -> Given:
    return {"ids": torch.tensor([[0, 1], [2, 0]], dtype=INT), "num_experts": 4,
            "expert_range": (1, 3)}  # fmt: skip


def _combine() -> Given:
    return {"y": bf16(6, 64), "weights": positive(3, 2),
            "row_of_slot": torch.arange(6, dtype=INT).view(3, 2)}  # fmt: skip


def _quantise() -> Given:
    return {"x": bf16(5, 128), "fmt": "nvfp4", "global_scale": positive(1), "offsets": OFFSETS}


def _grouped_gemm() -> Given:
    x = quantised(bf16(5, 128), "nvfp4", offsets=OFFSETS)
    return {"x": laid_out(x, offsets=OFFSETS), "w": PACKED.w13, "offsets": OFFSETS.clone(),
            "amax": torch.zeros(1), "bias": normal(3, 128)}  # fmt: skip


def _activated() -> Given:
    return _grouped_gemm() | {"activation": moe.Activation(PACKED.granularity)}


def _swiglu() -> Given:
    given = _grouped_gemm()
    return {"x": given["x"], "w13": PACKED.w13, "offsets": given["offsets"], "form": moe.SwiGLU()}


def _mixed_gemm() -> Given:
    return {"x": bf16(5, 64), "w": ARRANGED.w2, "offsets": OFFSETS.clone(),
            "bias": normal(3, 128)}  # fmt: skip


def _fused_moe() -> Given:
    return {"x": bf16(5, 128), "experts": PACKED, "router_logits": normal(5, 3),
            "router": moe.Router(2, bias=normal(3)), "activation": moe.SwiGLU(),
            "scales": moe.Scales(positive(1), positive(1), torch.zeros(1))}  # fmt: skip


def _fused_mixed() -> Given:
    return {"x": bf16(5, 128), "experts": ARRANGED, "router_logits": normal(5, 3),
            "router": moe.Router(2)}  # fmt: skip


def _warming() -> Given:
    given = _fused_mixed()
    return {**given, "experts": PACKED, "tokens": (1, 5)}


def _planned(plan: InPlacePlan, _: Given) -> Any:
    """The result of a plan for the tensors that it was made with."""
    return plan()


def _pack() -> Given:
    return {"w13": W13, "w2": W2, "fmt": "mxfp8", "granularity": 32}


def _checkpoint_weight(rows: int, k: int) -> moe.CheckpointWeight:
    scales = some_bytes(3, rows, k // 16).clamp(min=1)
    return moe.CheckpointWeight(some_bytes(3, rows, k // 2), scales, decode_scale=positive(3))


def _pack_quantised() -> Given:
    return {"w13": _checkpoint_weight(128, 128), "w2": _checkpoint_weight(128, 64),
            "fmt": "nvfp4", "biases": (bf16(3, 128), bf16(3, 128))}  # fmt: skip


FOLDER = tempfile.TemporaryDirectory(prefix="hostile-")  # removed when the process ends


@functools.cache
def _folder(name: str) -> Path:
    """A checkpoint: of gpt-oss, or of experts with tensors of their own."""
    path = Path(FOLDER.name) / name
    path.mkdir()
    if name == "gpt-oss":
        return write(path, gpt_oss(2, 64, 64))
    projections = ("gate_proj", "up_proj", "down_proj")
    return write(path, experts_of("modelopt", NAMES, projections, 64, 64))


def _pack_gpt_oss() -> Given:
    return {"path": _folder("gpt-oss"), "prefix": f"{LAYER}.experts", "expert_range": (0, 1)}


def _pack_experts() -> Given:
    return {"path": _folder("modelopt"), "experts": NAMES}


MOE_BASES = (
    Base("route", moe.route, _route),
    Base("route_tokens", moe.route_tokens, _route_tokens),
    Base("permutation", moe.permutation, _permutation),
    Base("combine", moe.combine, _combine),
    Base("moe.quantise", moe.quantise, _quantise),
    Base("grouped_gemm", moe.grouped_gemm, _grouped_gemm, ("amax",)),
    Base("grouped_gemm, activated", moe.grouped_gemm, _activated, ("amax",)),
    Base(
        "grouped_gemm_swiglu", moe.grouped_gemm_swiglu, _swiglu
    ),
    Base("mixed_gemm", moe.mixed_gemm, _mixed_gemm),
    Base("fused_moe", moe.fused_moe, _fused_moe, ("scales/h_amax",)),
    Base("fused_moe, arranged", moe.fused_moe, _fused_mixed),
    Base(
        "grouped_gemm_plan", moe.grouped_gemm_plan, _grouped_gemm, ("amax",), computed=_planned,
    ),
    Base(
        "fused_moe_plan", moe.fused_moe_plan, _fused_moe, ("scales/h_amax",), computed=_planned,
    ),
    Base(
        "fused_moe_plan, arranged", moe.fused_moe_plan, _fused_mixed,
        computed=_planned,
    ),
    Base(
        "moe.warmup", moe.warmup, _warming, contents=False, computed=None
    ),
    Base("pack", moe.pack, _pack),
    Base("pack_quantised", moe.pack_quantised, _pack_quantised),
    Base("pack_gpt_oss", moe.pack_gpt_oss, _pack_gpt_oss),
    Base("pack_experts", moe.pack_experts, _pack_experts),
    Base("activation_scales", moe.activation_scales, _pack_experts),
    Base("arrange", moe.arrange, lambda: {"experts": MX, "activations": "e4m3"}),
    Base("unpack", moe.unpack, lambda: {"packed": PACKED}),
    Base("unpack_biases", moe.unpack_biases, lambda: {"packed": BIASED}),
    Base("ExpertWeights", moe.ExpertWeights, lambda: {"packed": PACKED}, contents=False,
         computed=None),
)  # fmt: skip
