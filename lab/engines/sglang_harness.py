"""`install`: what SGLang needs on a CPU without its extension, before it is imported.

The scheduler, the radix tree, pools, allocators and models are SGLang's own. SGLang starts
processes afresh, and each imports the main module again: a main module that calls `install` at its
top has it everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from lab.engines import sglang_operators

VARIABLES = {"SGLANG_USE_CPU_ENGINE": "1"}
# '1': an FP8 pool as on CUDA; SGLang's for CPUs is for one backend alone.
FP8_POOL = "BLACKWELL_SGLANG_FP8_POOL"


def install() -> None:
    """Stand in for `sgl_kernel`, and register hooks that SGLang applies when it loads plugins."""
    os.environ.update(VARIABLES)
    sglang_operators.install()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from transformers import Gemma2Config

    path = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
    HookRegistry.register(path, experts, HookType.AROUND)
    path = "sglang.srt.mem_cache.allocation.get_last_loc"
    HookRegistry.register(path, last_slots, HookType.REPLACE)
    if os.environ.get(FP8_POOL):
        path = "sglang.srt.model_executor.model_runner.ModelRunner.alloc_memory_pool"
        HookRegistry.register(path, _with_fp8_pool, HookType.AROUND)
    # Google's files have both names; transformers writes the newer one alone.
    Gemma2Config.hidden_act = property(lambda config: config.hidden_activation)


def experts(
    inner: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, chosen: Any, config: Any
) -> torch.Tensor:
    """Experts whose gate and up columns alternate, as in gpt-oss, which SGLang's own function in
    torch takes for halves; that one does all others."""
    if config.gemm1_alpha is None:
        return inner(layer, x, chosen, config)
    limit, total = config.gemm1_clamp_limit, torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(layer.num_experts):
        token, choice = (chosen.topk_ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        hidden = linear(x[token], layer.w13_weight[expert]).float()
        hidden = hidden + layer.w13_weight_bias[expert].float()
        gate, up = hidden[..., ::2].clamp(max=limit), hidden[..., 1::2].clamp(-limit, limit)
        hidden = gate * torch.sigmoid(config.gemm1_alpha * gate) * (up + 1)
        y = linear(hidden.to(x.dtype), layer.w2_weight[expert]).float()
        y = y + layer.w2_weight_bias[expert].float()
        total.index_add_(0, token, y * chosen.topk_weights[token, choice, None].float())
    return total.to(x.dtype)


def last_slots(table: torch.Tensor, requests: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Slot of each request's last key, or -1; SGLang has a Triton kernel there."""
    found = table[requests, (lengths - 1).clamp(min=0)]
    return torch.where(lengths > 0, found, -1).to(lengths.dtype)


class _LikeCuda:
    """A platform that does not call itself a CPU."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def is_cpu(self) -> bool:
        return False


def _with_fp8_pool(inner: Callable[..., Any], *given: Any, **named: Any) -> Any:
    from sglang.srt.mem_cache import kv_cache_configurator as module

    platform = module.current_platform
    module.current_platform = _LikeCuda(platform)
    try:
        return inner(*given, **named)
    finally:
        module.current_platform = platform
