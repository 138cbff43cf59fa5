"""vLLM's experts on these kernels: `--quantization blackwell_kernels`.

vLLM's own configs read the checkpoint and quantise everything but the routed experts. Those are
loaded by vLLM's own loader into parameters that have its names. Then they are packed.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

from blackwell_engines.engines.experts import StoredExperts, compute, whole_blocks
from blackwell_engines.engines.quantization import (
    GPT_OSS,
    NAME,
    InCompressedTensors,
    InModelOpt,
    InMxfp4,
    OurExperts,
)
from moe import ArrangedExperts, SwiGLU
from moe.huggingface import Scheme
from moe.models import GPT_OSS_ALPHA, GPT_OSS_BETA

logger = init_logger(f"vllm.plugins.{NAME}")
GPT_OSS_LIMIT = 7.0  # of vLLM's swigluoai


class Layers(OurExperts):
    """vLLM's layers: experts with our method, others with vLLM's."""

    online_quantization_config: Any

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return the method of a layer.

        Raises:
            ValueError: the layer's experts are not in four bits, or two options contradict.
        """
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)  # type: ignore[misc]
        if self.online_quantization_config is not None:
            raise ValueError(f"quantization_config with --quantization {NAME}: drop one")
        return BlackwellExperts(layer, self.scheme(layer, prefix))


class Mxfp4(Layers, InMxfp4, GptOssMxfp4Config):
    """MXFP4 of gpt-oss."""


class ModelOpt(Layers, InModelOpt, ModelOptNvFp4Config):
    """NVFP4 of ModelOpt."""


class CompressedTensors(Layers, InCompressedTensors, CompressedTensorsConfig):
    """NVFP4 or MXFP4 of compressed-tensors."""


CONFIGS: dict[str, type[Any]] = {
    "mxfp4": Mxfp4, "modelopt": ModelOpt, "compressed-tensors": CompressedTensors,
}  # fmt: skip


class BlackwellExperts(FusedMoEMethodBase):
    """A layer's experts: their parameters, and the product with the router's choices."""

    experts: ArrangedExperts | None = None
    stored: StoredExperts

    def __init__(self, layer: RoutedExperts, scheme: Scheme) -> None:
        """Check what is known before the checkpoint is read.

        Raises:
            NotImplementedError: the kernels do not support the layer.
            ValueError: two options contradict.
        """
        moe = layer.moe_config
        super().__init__(moe)
        self.scheme = scheme
        self.form, self.order = form_of(moe)
        if scheme is GPT_OSS:
            self.weight_dtype = "gpt_oss_mxfp4"  # by which vLLM's model loads its experts
        parallel = moe.moe_parallel_config
        if moe.moe_backend != "auto":
            raise ValueError(f"--moe-backend {moe.moe_backend} with --quantization {NAME}")
        for wrong, words in (
            (moe.is_lora_enabled, "LoRA"),
            (
                parallel.use_all2all_kernels and not parallel.use_ag_rs_all2all_kernels,
                f"--all2all-backend {parallel.all2all_backend}, expected allgather_reducescatter",
            ),
        ):
            if wrong:
                raise NotImplementedError(f"--quantization {NAME}: no experts with {words}")

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any, **options: Any
    ) -> tuple[int, int]:
        """Round I up to whole blocks, as vLLM's loader of gpt-oss divides it among ranks."""
        rows = intermediate_size_per_partition
        return hidden_size, whole_blocks(rows) if self.scheme is GPT_OSS else rows

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Register the parameters that vLLM's loader fills.

        Raises:
            ValueError: the kernels do not support the sizes.
        """
        moe = self.moe
        self.stored = StoredExperts(
            self.scheme, num_experts, hidden_size, intermediate_size_per_partition,
            moe.experts_per_token, self.form, self.order, "bias" if moe.has_bias else "",
            padded=intermediate_size_per_partition != moe.intermediate_size_per_partition_unpadded,
        )  # fmt: skip
        self.stored.register(layer, attributes)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Pack the parameters, and compile or find every kernel that a step can need.

        Raises:
            ValueError: naming the layer, and an expert that is wrong or was not loaded.
        """
        tokens = self.moe.max_num_tokens * self.moe.dp_size
        self.experts = self.stored.load(layer, layer.layer_name, tokens, logger.info)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """Return None: vLLM's modular kernels are not used."""

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return this rank's part of the routed experts' output; vLLM computes shared ones."""
        if self.experts is None:
            raise RuntimeError(f"{layer.layer_name} has no experts: weights were not loaded")
        return compute(
            x, self.experts, topk_ids, topk_weights, self.form,
            expert_map=layer.expert_map, weigh_tokens=layer.apply_router_weight_on_input,
        )  # fmt: skip


def form_of(moe: Any) -> tuple[SwiGLU, str]:
    """The activation of vLLM's layer, and the order of the rows of w13.

    Raises:
        NotImplementedError: no kernel has the activation.
    """
    given = moe.swiglu_alpha, moe.swiglu_beta, moe.swiglu_limit
    if moe.activation is MoEActivation.SILU:
        return SwiGLU(limit=moe.swiglu_limit), "gate_up"
    order, usual = {
        MoEActivation.SWIGLUOAI: ("alternating", (GPT_OSS_ALPHA, GPT_OSS_BETA, GPT_OSS_LIMIT)),
        MoEActivation.SWIGLUOAI_UNINTERLEAVE: ("gate_up", (1.0, 0.0, None)),
    }.get(moe.activation, ("", ()))
    if order:
        values: list[Any] = [b if a is None else a for a, b in zip(given, usual, strict=True)]
        return SwiGLU(*values), order
    raise NotImplementedError(f"--quantization {NAME}: activation {moe.activation.value!r}")
