"""Mixture of experts in block-scaled formats, from router logits to the combined output."""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from moe.api import (
        fused_moe,
        fused_moe_plan,
        grouped_gemm,
        grouped_gemm_plan,
        grouped_gemm_swiglu,
    )
    from moe.arguments import Activation, Chosen, Router, RouterLinear, Scales, SwiGLU
    from moe.formats import FORMATS, BlockFormat
    from moe.huggingface import activation_scales, pack_experts, pack_gpt_oss
    from moe.mixed.api import mixed_gemm
    from moe.mixed.fragments import ArrangedExperts, Fragments, arrange
    from moe.module import ExpertWeights
    from moe.packing import (
        CheckpointWeight,
        PackedExperts,
        pack,
        pack_quantised,
        unpack,
        unpack_biases,
    )
    from moe.quantiser.api import quantise
    from moe.quantized import Quantized
    from moe.routing import Permutation, combine, permutation, route, route_tokens
    from moe.warm import warmup

__all__ = [
    "FORMATS",
    "Activation",
    "ArrangedExperts",
    "BlockFormat",
    "CheckpointWeight",
    "Chosen",
    "ExpertWeights",
    "Fragments",
    "PackedExperts",
    "Permutation",
    "Quantized",
    "Router",
    "RouterLinear",
    "Scales",
    "SwiGLU",
    "activation_scales",
    "arrange",
    "combine",
    "fused_moe",
    "fused_moe_plan",
    "grouped_gemm",
    "grouped_gemm_plan",
    "grouped_gemm_swiglu",
    "mixed_gemm",
    "pack",
    "pack_experts",
    "pack_gpt_oss",
    "pack_quantised",
    "permutation",
    "quantise",
    "route",
    "route_tokens",
    "unpack",
    "unpack_biases",
    "warmup",
]

__version__: str
exports(__name__, {
    "moe.api": "fused_moe fused_moe_plan grouped_gemm grouped_gemm_plan grouped_gemm_swiglu",
    "moe.arguments": "Activation Chosen Router RouterLinear Scales SwiGLU",
    "moe.formats": "FORMATS BlockFormat",
    "moe.huggingface": "activation_scales pack_experts pack_gpt_oss",
    "moe.mixed.api": "mixed_gemm",
    "moe.mixed.fragments": "ArrangedExperts Fragments arrange",
    "moe.module": "ExpertWeights",
    "moe.packing": "CheckpointWeight PackedExperts pack pack_quantised unpack unpack_biases",
    "moe.quantiser.api": "quantise",
    "moe.quantized": "Quantized",
    "moe.routing": "Permutation combine permutation route route_tokens",
    "moe.warm": "warmup",
})  # fmt: skip
