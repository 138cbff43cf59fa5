"""`--quantization blackwell_kernels` of vLLM: whether a checkpoint has experts for these kernels.

Plugins register it before vLLM has loaded a model, so it imports nothing of vLLM's layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from blackwell_engines.engines.experts import NAME, kind_of


@register_quantization_config(NAME)
class BlackwellKernelsConfig(QuantizationConfig):
    """vLLM's config of the checkpoint, with our experts: `from_config` returns one of
    `blackwell_engines.vllm.experts`."""

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Return NAME if the user asks for it, None otherwise.

        Raises:
            ValueError: the user asks for it, and the checkpoint has no experts for it.
        """
        if user_quant != NAME:
            return None
        model = getattr(hf_config, "model_type", None)
        if kind_of(hf_quant_cfg) == "mxfp4" and model != "gpt_oss":
            raise ValueError(f"--quantization {NAME}: MXFP4 of {model}, expected of gpt_oss")
        return NAME

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """Return the config of a checkpoint."""
        from blackwell_engines.vllm.experts import CONFIGS

        return CONFIGS[kind_of(config)].from_config(config)

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return the file that older checkpoints of ModelOpt describe themselves in."""
        return ["hf_quant_config.json"]
