"""`EmulatedPlatform`: vLLM on a CPU that treats attention backends as it does on a GPU.

Device, workers, model runners, scheduler and KV cache manager are vLLM's own for CPUs. This class
lets a backend be chosen and checked for a compute capability, as vLLM's platform for CUDA does,
where that for CPUs knows a single backend. Without vLLM's extension some operators that its CPU
worker calls are missing: they are defined here in Python.

VLLM_TARGET_DEVICE must not be `cpu`: vLLM then ignores platforms of plugins.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import linear, silu
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability

CAPABILITY = "BLACKWELL_CAPABILITY"  # '9.0'; '10.0' without it
ASYNCHRONOUS = "BLACKWELL_ASYNCHRONOUS"  # '1': scheduling as on a GPU


class EmulatedPlatform(CpuPlatform):
    """vLLM's CPU with the attention of a GPU, in the emulator."""

    @classmethod
    def import_kernels(cls) -> None:
        """Import nothing: no extension is installed."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None
    ) -> str:
        """Return the path of the chosen backend's class.

        Raises:
            ValueError: if none is chosen, or the backend refuses the configuration.
        """
        if selected_backend is None:
            raise ValueError("no attention backend is named")
        backend = selected_backend.get_class()
        capability = DeviceCapability(*map(int, os.environ.get(CAPABILITY, "10.0").split(".")))
        reasons = backend.validate_configuration(
            device_capability=capability, **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(f"{selected_backend} refuses this configuration: {reasons}")
        return f"{backend.__module__}.{backend.__qualname__}"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Let steps be scheduled ahead where a test asks for it; vLLM turns that off on CPUs."""
        super().check_and_update_config(vllm_config)
        if os.environ.get(ASYNCHRONOUS):
            vllm_config.scheduler_config.async_scheduling = True

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Replace the one Triton kernel that the V1 runner launches, where Triton is off."""
        from vllm.triton_utils import HAS_TRITON

        if not HAS_TRITON:
            from vllm.triton_utils.dispatcher import register_kernels

            name = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"
            register_kernels({name: slot_mapping})


def slot_mapping(*given: Any) -> None:
    """Write the slot of each token, block * block size + row, and padding behind the last one: what
    `vllm.v1.worker.block_table.ComputeSlotMappingKernel` does, with its arguments in order.

    Raises:
        NotImplementedError: if several ranks share the keys of a request.
    """
    tokens, most, starts, positions, table, _, slots, block_size, ranks, _, _, padding, *_ = given
    if ranks != 1:
        raise NotImplementedError(f"{ranks} ranks of context parallelism on the V1 runner")
    for request, (begin, end) in enumerate(pairwise(starts.tolist())):
        at = positions[begin:end]
        slots[begin:end] = table[request, at // block_size].long() * block_size + at % block_size
    slots[tokens:most] = padding


# ---- operators of vLLM's extension for CPUs

torch.cpu._is_amx_tile_supported = lambda: False  # else weights are packed by the extension
_OPERATORS = torch.library.Library("_C", "FRAGMENT")


def _define(schema: str, function: Any) -> None:
    _OPERATORS.define(schema)
    _OPERATORS.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")


def _experts(*given: Any) -> None:
    """Compute a layer of experts in the dtype of x, summed in fp32, from the operator's arguments
    in order."""
    out, x, w13, w2, bias13, bias2, weights, ids, skip_weighted, activation, _ = given
    total = torch.zeros(out.shape, dtype=torch.float32)
    for expert in range(w13.shape[0]):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        biases = [None if b is None else b[expert].to(x.dtype) for b in (bias13, bias2)]
        hidden = _gated(linear(x[token], w13[expert], biases[0]).float(), activation)
        y = linear(hidden.to(x.dtype), w2[expert], biases[1]).float()
        factor = 1.0 if skip_weighted else weights[token, choice, None].float()
        total.index_add_(0, token, y * factor)
    out.copy_(total)


def _gated(hidden: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        gate, up = hidden.chunk(2, -1)
        return silu(gate) * up
    if activation == "swigluoai":  # of gpt-oss: gate and up alternate
        gate, up = hidden[..., ::2].clamp(max=7.0), hidden[..., 1::2].clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    raise NotImplementedError(f"activation {activation!r} of experts on a CPU")


_define("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None)
_define("greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(-1))
_define(
    "prepack_moe_weight(Tensor weight, Tensor(a!) output, str isa) -> ()",
    lambda weight, output, isa: (output.copy_(weight), None)[1],
)
_define(
    "cpu_fused_moe(Tensor(a!) out, Tensor input, Tensor w13, Tensor w2, Tensor? w13_bias, "
    "Tensor? w2_bias, Tensor topk_weights, Tensor topk_ids, bool skip_weighted, str act, str isa) "
    "-> ()",
    _experts,
)
