"""`--quantization blackwell_kernels` of an engine: which checkpoints have experts for the kernels.

An engine's own config class reads the checkpoint and quantises all layers but the routed experts.
The classes here are bases before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from moe.huggingface import SCHEMES, Scheme

NAME = "blackwell_kernels"  # --quantization
GPT_OSS = Scheme("mxfp4", "weight", "weight_scale")  # as engines rename `_blocks` and `_scales`
MODELOPT, COMPRESSED_NVFP4, COMPRESSED_MXFP4 = SCHEMES[:3]
GROUPS = {16: COMPRESSED_NVFP4, 32: COMPRESSED_MXFP4}  # of compressed-tensors, by group size
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
WANTED = "MXFP4 of gpt-oss, NVFP4 of ModelOpt, NVFP4 or MXFP4 of compressed-tensors"


def kind_of(config: Mapping[str, Any]) -> str:
    """The kind of a checkpoint: 'mxfp4', 'modelopt' or 'compressed-tensors'.

    Args:
        config: `quantization_config` of config.json, or the contents of hf_quant_config.json.

    Raises:
        ValueError: the experts are not in four bits that the kernels read.
    """
    method = str(config.get("quant_method", "modelopt" if "quantization" in config else ""))
    algorithm = (config.get("quantization") or config).get("quant_algo", "")
    if method in ("mxfp4", "gpt_oss_mxfp4"):
        return "mxfp4"
    if method.startswith("modelopt") and str(algorithm).upper() in ("NVFP4", "W4A16_NVFP4"):
        return "modelopt"
    if method == "compressed-tensors":
        return method
    found = f"quant_method {method!r}" + (f" with quant_algo {algorithm!r}" if algorithm else "")
    raise ValueError(f"--quantization {NAME}: the checkpoint has {found}, expected {WANTED}")


class Asked:
    """The class that an engine knows by NAME. It is never instantiated.

    configs: name of the module with `CONFIGS`, which imports the engine's layers
    """

    configs: str

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
        kind = kind_of(hf_quant_cfg)
        model = getattr(hf_config, "model_type", "gpt_oss")
        if kind == "mxfp4" and model != "gpt_oss":
            raise ValueError(f"--quantization {NAME}: MXFP4 of {model}, expected of gpt_oss")
        return NAME

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Return the engine's config of a checkpoint, with our experts."""
        return import_module(cls.configs).CONFIGS[kind_of(config)].from_config(config)

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return the file in which older checkpoints of ModelOpt are described."""
        return ["hf_quant_config.json"]


class OurExperts:
    """Base class before an engine's config class: the routed experts are ours."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 90: no kernel runs on older GPUs."""
        return 90

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the dtype of models that the kernels compute in."""
        return [torch.bfloat16]

    def scheme(self, layer: Any, prefix: str) -> Scheme:
        """Return how the checkpoint stores the experts of a layer.

        Args:
            layer: the engine's layer of experts.
            prefix: the layer's name.

        Raises:
            ValueError: they are not in four bits.
        """
        raise NotImplementedError


class InMxfp4(OurExperts):
    """MXFP4 as in openai/gpt-oss-*."""

    def scheme(self, layer: Any, prefix: str) -> Scheme:
        """Return how the checkpoint stores the experts of a layer."""
        return GPT_OSS


class InModelOpt(OurExperts):
    """NVFP4 of ModelOpt."""

    def scheme(self, layer: Any, prefix: str) -> Scheme:
        """Return how the checkpoint stores the experts of a layer."""
        if self.is_layer_excluded(prefix):  # type: ignore[attr-defined]
            raise ValueError(f"--quantization {NAME}: the checkpoint excludes {prefix}")
        return MODELOPT


class InCompressedTensors(OurExperts):
    """NVFP4 or MXFP4 of compressed-tensors."""

    def scheme(self, layer: Any, prefix: str) -> Scheme:
        """Return how the checkpoint stores the experts of a layer."""
        self._add_fused_moe_to_target_scheme_map()  # type: ignore[attr-defined]
        found = {
            scheme_of(f"{prefix}.0.{name}", self.get_scheme_dict(layer, f"{prefix}.0.{name}"))  # type: ignore[attr-defined]
            for name in PROJECTIONS
        }
        if len(found) > 1:
            raise ValueError(f"--quantization {NAME}: {prefix} has weights in two formats")
        return found.pop()


def scheme_of(name: str, described: Mapping[str, Any] | None) -> Scheme:
    """The scheme of a matrix of compressed-tensors.

    Args:
        name: the matrix, for the message.
        described: its `QuantizationArgs` by 'weights'; None for a matrix that is not quantised.

    Raises:
        ValueError: it is in another format.
    """
    weights = None if described is None else described["weights"]
    if weights is not None and weights.num_bits == 4 and weights.group_size in GROUPS:
        if str(getattr(weights.type, "value", weights.type)) == "float":
            return GROUPS[weights.group_size]
    raise ValueError(f"--quantization {NAME}: {name} has weights {weights}, expected {WANTED}")
