"""SGLang's experts on these kernels: `--quantization blackwell_kernels`.

SGLang's own configs read the checkpoint and quantise everything but the routed experts. Those are
loaded by SGLang's own loader into parameters that have its names. Then they are packed.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.moe import get_moe_a2a_backend
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.runtime_context import get_server_args

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
from moe.models import GPT_OSS_BETA

logger = logging.getLogger(__name__)


class Layers(OurExperts):
    """SGLang's layers: experts with our method, others with SGLang's."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return the method of a layer.

        Raises:
            ValueError: the layer's experts are not in four bits.
        """
        if not isinstance(layer, FusedMoE):
            return super().get_quant_method(layer, prefix)  # type: ignore[misc]
        return BlackwellExperts(prefix, self.scheme(layer, prefix))


class Mxfp4(Layers, InMxfp4, Mxfp4Config):
    """MXFP4 of gpt-oss."""


class ModelOpt(Layers, InModelOpt, ModelOptFp4Config):
    """NVFP4 of ModelOpt."""


class CompressedTensors(Layers, InCompressedTensors, CompressedTensorsConfig):
    """NVFP4 or MXFP4 of compressed-tensors."""


CONFIGS: dict[str, type[Any]] = {
    "mxfp4": Mxfp4, "modelopt": ModelOpt, "compressed-tensors": CompressedTensors,
}  # fmt: skip


class BlackwellExperts(FusedMoEMethodBase):
    """A layer's experts: their parameters, and the product with the router's choices.

    It has no runner, so SGLang gives it ids of this rank's experts, -1 for those elsewhere.
    """

    fuse_routed_scaling_factor_in_topk = True  # the weights of choices are final
    experts: ArrangedExperts | None = None
    stored: StoredExperts

    def __init__(self, prefix: str, scheme: Scheme) -> None:
        """prefix: the layer's name."""
        super().__init__()
        self.prefix, self.scheme = prefix, scheme

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **attributes: Any,
    ) -> None:
        """Register the parameters that SGLang's loader fills.

        Raises:
            NotImplementedError: the kernels do not support the layer.
            ValueError: the kernels do not support the sizes.
        """
        config, rows = layer.moe_runner_config, intermediate_size_per_partition
        form, order = form_of(config)
        if hidden_size != layer.hidden_size_unpadded:
            raise ValueError(
                f"--quantization {NAME}: the MoE runner pads tokens from "
                f"{layer.hidden_size_unpadded} to {hidden_size}; pass --moe-runner-backend triton"
            )
        shared = self.scheme is GPT_OSS and layer.moe_tp_size > 1
        if shared:  # of whole blocks, of which the last rank may have fewer
            rows = whole_blocks(rows)
        self.stored = StoredExperts(
            self.scheme, num_experts, hidden_size, rows, config.top_k, form, order,
            "weight_bias" if with_bias else "", padded=shared,
        )  # fmt: skip
        self.stored.register(layer, attributes)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Check how SGLang calls the layer; there is no runner.

        Raises:
            NotImplementedError: tokens arrive in another form than the standard one.
        """
        for wrong, words in (
            (not get_moe_a2a_backend().is_none(), f"--moe-a2a-backend {get_moe_a2a_backend()}"),
            (moe_runner_config.no_combine, "no_combine"),
        ):
            if wrong:
                raise NotImplementedError(f"--quantization {NAME}: no experts with {words}")
        self.weigh_tokens = moe_runner_config.apply_router_weight_on_input

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the parameters, and compile or find every kernel that a step can need.

        Raises:
            ValueError: naming the layer and the expert that is wrong or was not loaded.
        """
        tokens = most_tokens(get_server_args())
        self.experts = self.stored.load(layer, self.prefix, tokens, logger.info)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Return this rank's part of the routed experts' output."""
        chosen = dispatch_output.topk_output
        if self.experts is None:
            raise RuntimeError(f"{self.prefix} has no experts: weights were not loaded")
        if not TopKOutputChecker.format_is_standard(chosen):
            raise NotImplementedError(f"--quantization {NAME}: choices in {chosen.format}")
        result = compute(
            dispatch_output.hidden_states, self.experts, chosen.topk_ids, chosen.topk_weights,
            self.stored.form, weigh_tokens=self.weigh_tokens,
        )  # fmt: skip
        return StandardCombineInput(hidden_states=result)


def form_of(config: Any) -> tuple[SwiGLU, str]:
    """The activation of SGLang's layer, and the order of the rows of w13.

    Raises:
        NotImplementedError: no kernel has the activation.
    """
    if config.activation != "silu" or not config.is_gated:
        gate = "" if config.is_gated else " without a gate"
        raise NotImplementedError(f"--quantization {NAME}: activation {config.activation!r}{gate}")
    if config.gemm1_alpha is None:
        return SwiGLU(limit=config.swiglu_limit), "gate_up"
    beta = GPT_OSS_BETA if config.gemm1_beta is None else config.gemm1_beta
    order = "alternating" if config.gate_up_interleaved else "gate_up"
    return SwiGLU(config.gemm1_alpha, beta, config.gemm1_clamp_limit), order


def most_tokens(server_args: Any) -> int:
    """Upper bound of the tokens of a step."""
    chunk = server_args.chunked_prefill_size
    whole = server_args.max_prefill_tokens or 0
    return max(chunk if chunk and chunk > 0 else whole, server_args.max_running_requests or 0, 1)
