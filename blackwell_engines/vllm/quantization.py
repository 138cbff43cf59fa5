"""`--quantization blackwell_kernels` of vLLM.

Plugins are loaded before vLLM's layers, so nothing here imports these.
"""

from __future__ import annotations

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from blackwell_engines.engines.quantization import NAME, Asked


@register_quantization_config(NAME)
class BlackwellKernelsConfig(Asked, QuantizationConfig):
    """`from_config` returns one of vLLM's configs with our experts."""

    configs = "blackwell_engines.vllm.experts"
