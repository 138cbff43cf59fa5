"""vLLM's experts on these kernels: `--quantization blackwell_kernels`.

vLLM's own configs read the checkpoint and quantise everything but the routed experts. Those are
loaded by vLLM's own loader into parameters that have its names. Then they are packed.
"""

from __future__ import annotations

from functools import cache
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
from vllm.model_executor.utils import set_weight_attrs

from blackwell_engines.engines.experts import (
    GPT_OSS,
    MODELOPT,
    NAME,
    StoredExperts,
    compute,
    scheme_of,
)
from moe import ArrangedExperts, SwiGLU
from moe.huggingface import Scheme
from moe.models import GPT_OSS_ALPHA, GPT_OSS_BETA

logger = init_logger(f"vllm.plugins.{NAME}")
GPT_OSS_LIMIT = 7.0  # of vLLM's swigluoai, which has no parameters
BLOCK = 32  # rows of I that a rank's share of gpt-oss is a multiple of


class OurExperts:
    """Base class before one of vLLM's configs: its experts are ours."""

    online_quantization_config: Any

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 90: no kernel runs on older GPUs."""
        return 90

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtype of the model that the kernels compute in."""
        return [torch.bfloat16]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return our method for experts, vLLM's for other layers.

        Raises:
            ValueError: the layer's experts are not in four bits, or two options contradict.
        """
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)  # type: ignore[misc]
        if self.online_quantization_config is not None:
            raise ValueError(f"quantization_config with --quantization {NAME}: drop one")
        return BlackwellExperts(layer, self.scheme(layer, prefix))

    def scheme(self, layer: RoutedExperts, prefix: str) -> Scheme:
        """Return how the checkpoint stores the experts of a layer."""
        raise NotImplementedError


class GptOss(OurExperts, GptOssMxfp4Config):
    """MXFP4 as in openai/gpt-oss-*."""

    def scheme(self, layer: RoutedExperts, prefix: str) -> Scheme:
        """Return how the checkpoint stores the experts of a layer."""
        return GPT_OSS


class ModelOpt(OurExperts, ModelOptNvFp4Config):
    """NVFP4 of ModelOpt."""

    def scheme(self, layer: RoutedExperts, prefix: str) -> Scheme:
        """Return how the checkpoint stores the experts of a layer."""
        if self.is_layer_excluded(prefix):
            raise ValueError(f"--quantization {NAME}: {prefix} is in exclude_modules")
        return MODELOPT


class CompressedTensors(OurExperts, CompressedTensorsConfig):
    """NVFP4 or MXFP4 of compressed-tensors."""

    def scheme(self, layer: RoutedExperts, prefix: str) -> Scheme:
        """Return how the checkpoint stores the experts of a layer."""
        self._add_fused_moe_to_target_scheme_map()
        names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        found = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names]
        schemes = {scheme_of(prefix, each and each["weights"]) for each in found}
        if len(schemes) > 1:
            raise ValueError(f"--quantization {NAME}: {prefix} has more than one format")
        return schemes.pop()


CONFIGS: dict[str, type[Any]] = {
    "mxfp4": GptOss, "modelopt": ModelOpt, "compressed-tensors": CompressedTensors,
}  # fmt: skip


class BlackwellExperts(FusedMoEMethodBase):
    """A layer's experts: their parameters, and the product with the router's choices."""

    def __init__(self, layer: RoutedExperts, scheme: Scheme) -> None:
        """Check what is known before the checkpoint is read.

        Raises:
            NotImplementedError: the kernels do not support the layer.
            ValueError: two options contradict.
        """
        moe = layer.moe_config
        super().__init__(moe)
        self.scheme, self.experts = scheme, None
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

    experts: ArrangedExperts | None
    stored: StoredExperts

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any, **options: Any
    ) -> tuple[int, int]:
        """Round I up to whole blocks, as vLLM's loader of gpt-oss divides it among ranks."""
        rows = intermediate_size_per_partition
        if self.scheme is GPT_OSS:
            rows = -(-rows // BLOCK) * BLOCK
        return hidden_size, rows

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
        self.stored.check()
        for name, parameter in self.stored.parameters():
            weight = torch.nn.Parameter(parameter.data, requires_grad=False)
            layer.register_parameter(name, weight)
            set_weight_attrs(weight, attributes)
            if parameter.kind:
                set_weight_attrs(weight, {"quant_method": parameter.kind})
            if parameter.kind and weight.is_floating_point():
                set_weight_attrs(weight, {"dummy_weight_value": 1.0})  # of --load-format dummy

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Pack the parameters, and compile or find every kernel that a step can need.

        Raises:
            ValueError: naming the layer and the expert that is wrong or was not loaded.
        """
        names = [name for name, _ in self.stored.parameters()]
        try:
            self.experts = self.stored.pack({name: getattr(layer, name).data for name in names})
        except ValueError as error:
            raise ValueError(f"{layer.layer_name}: {error}; was it loaded?") from error
        for name in names:
            delattr(layer, name)
        tokens = self.moe.max_num_tokens * self.moe.dp_size
        device, pairs = self.experts.w13.data.device, self.experts.w13.has_pairs
        compile_all(self.stored, tokens, device, pairs)

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
    alpha, beta, limit = moe.swiglu_alpha, moe.swiglu_beta, moe.swiglu_limit
    if moe.activation is MoEActivation.SILU:
        return SwiGLU(limit=limit), "gate_up"
    if moe.activation is MoEActivation.SWIGLUOAI:
        return SwiGLU(GPT_OSS_ALPHA, GPT_OSS_BETA, GPT_OSS_LIMIT), "alternating"
    if moe.activation is MoEActivation.SWIGLUOAI_UNINTERLEAVE:
        given = (1.0 if alpha is None else alpha, 0.0 if beta is None else beta)
        return SwiGLU(*given, limit), "gate_up"
    raise NotImplementedError(f"--quantization {NAME}: activation {moe.activation.value!r}")


@cache
def compile_all(stored: StoredExperts, tokens: int, device: torch.device, pairs: bool) -> None:
    """Compile or find the kernels of all layers that are like this one."""
    warmed = stored.warmup(range(1, tokens + 1), device, pairs=pairs)
    logger.info("Experts in %s on %s: %s", stored.scheme.fmt, NAME, warmed)
