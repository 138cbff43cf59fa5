"""Stand-ins for the parts of vLLM 0.33.0 that the experts need, and a layer that is loaded and
called as by the engine.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.blackwell_engines.experts import DESCRIBED, EXPERTS, HIDDEN, INNER, TOP_K, Checkpoint
from tests.blackwell_engines.requests import stand_ins

METHODS: dict[str, type] = {}


class QuantizationConfig:
    """The part of vLLM's base class that the plugin reads."""

    online_quantization_config: Any = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        made = cls()
        made.config = config
        return made

    def get_quant_method(self, layer: Any, prefix: str) -> str:
        return f"vLLM's for {prefix}"


class GptOssMxfp4Config(QuantizationConfig):
    pass


class ModelOptNvFp4Config(QuantizationConfig):
    def is_layer_excluded(self, prefix: str) -> bool:
        return prefix in self.config.get("ignore", ())


class CompressedTensorsConfig(QuantizationConfig):
    def _add_fused_moe_to_target_scheme_map(self) -> None:
        self.fused = True

    def get_scheme_dict(self, layer: Any, name: str) -> dict | None:
        if not self.fused or any(part in name for part in self.config.get("ignore", ())):
            return None
        group = self.config["group_size"] if "up_proj" not in name else self.config.get(
            "up", self.config["group_size"]
        )  # fmt: skip
        return {"weights": SimpleNamespace(num_bits=4, type="float", group_size=group)}


class MoEActivation(Enum):
    SILU = "silu"
    GELU = "gelu"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"


class FusedMoEMethodBase:
    def __init__(self, moe: Any) -> None:
        self.moe = moe


class RoutedExperts(torch.nn.Module):
    """A layer as vLLM makes it, under the model's default dtype. here: of each expert of the
    layer, its number on this rank, or -1."""

    def __init__(
        self, config: Any, name: str, here: list[int] | None = None, device: str = "cpu",
        **given: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.moe_config = moe_config(**given)
        self.layer_name, self.apply_router_weight_on_input = name, False
        self.expert_map = None
        if here is not None:
            self.expert_map = torch.tensor(here, dtype=torch.int32, device=device)
        count = EXPERTS if here is None else sum(each >= 0 for each in here)
        self.quant_method = config.get_quant_method(self, name)
        sizes = self.quant_method.maybe_roundup_sizes(
            HIDDEN, INNER, torch.bfloat16, self.moe_config.moe_parallel_config
        )
        with torch.device(device):
            torch.set_default_dtype(torch.bfloat16)
            try:
                self.quant_method.create_weights(
                    self, count, *sizes, params_dtype=torch.bfloat16,
                    weight_loader=self.weight_loader, global_num_experts=EXPERTS,
                )  # fmt: skip
            finally:
                torch.set_default_dtype(torch.float32)

    def weight_loader(self, param: Any, value: torch.Tensor, expert: int, half: int | None) -> None:
        """Load a matrix of an expert, or one of its scales; half: 0 for gate, 1 for up."""
        if self.expert_map is not None:
            expert = int(self.expert_map[expert])
        if expert < 0:
            return
        place = param.data[expert]
        if value.numel() == 1:
            (place if half is None else place[half]).copy_(value.reshape(()))
        else:
            (place if half is None else place.chunk(2)[half]).copy_(value)

    def load(self, checkpoint: Checkpoint) -> None:
        parameters = dict(self.named_parameters())
        if checkpoint.biases is not None:
            here = slice(None) if self.expert_map is None else self.expert_map.cpu() >= 0
            for name, value in checkpoint.whole():
                parameters[name].data.copy_(value[here])
        else:
            for expert, (gate, up, down) in enumerate(checkpoint.matrices):
                for half, matrix in ((0, gate), (1, up), (None, down)):
                    for name, value in matrix.tensors.items():
                        param = parameters[f"{'w2' if half is None else 'w13'}_{name}"]
                        param.weight_loader(param, value, expert, half)
        self.quant_method.process_weights_after_loading(self)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x, weights, ids, None, None)


def moe_config(activation: str = "silu", **given: Any) -> SimpleNamespace:
    parallel = SimpleNamespace(
        use_all2all_kernels=False, use_ag_rs_all2all_kernels=False, all2all_backend="deepep_v2"
    )
    vars(parallel).update({name: given.pop(name) for name in [*given] if hasattr(parallel, name)})
    fields: dict[str, Any] = {
        "activation": MoEActivation(activation), "has_bias": activation == "swigluoai",
        "swiglu_alpha": None, "swiglu_beta": None, "swiglu_limit": None, "moe_backend": "auto",
        "is_lora_enabled": False, "experts_per_token": TOP_K, "max_num_tokens": 16, "dp_size": 1,
        "intermediate_size_per_partition_unpadded": INNER, "moe_parallel_config": parallel,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **given})


def register_quantization_config(name: str) -> Any:
    return lambda made: METHODS.setdefault(name, made)


def modules() -> dict[str, ModuleType]:
    """Map the names under which the plugin imports modules to stand-ins."""
    layers = "vllm.model_executor.layers"
    contents: dict[str, dict[str, Any]] = {
        "vllm.logger": {"init_logger": logging.getLogger},
        f"{layers}.fused_moe": {
            "FusedMoEMethodBase": FusedMoEMethodBase, "RoutedExperts": RoutedExperts,
        },
        f"{layers}.fused_moe.activation": {"MoEActivation": MoEActivation},
        f"{layers}.quantization": {"register_quantization_config": register_quantization_config},
        f"{layers}.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
        f"{layers}.quantization.mxfp4": {"GptOssMxfp4Config": GptOssMxfp4Config},
        f"{layers}.quantization.modelopt": {"ModelOptNvFp4Config": ModelOptNvFp4Config},
        f"{layers}.quantization.compressed_tensors.compressed_tensors": {
            "CompressedTensorsConfig": CompressedTensorsConfig
        },
    }  # fmt: skip
    return stand_ins(contents)


@contextmanager
def imported() -> Iterator[ModuleType]:
    """The plugin's class that vLLM knows by name, for the stand-ins."""
    names = ("blackwell_engines.vllm.quantization", "blackwell_engines.vllm.experts")
    with pytest.MonkeyPatch.context() as patch:
        for path, module in modules().items():
            patch.setitem(sys.modules, path, module)
        for name in names:
            sys.modules.pop(name, None)
        METHODS.clear()
        importlib.import_module(names[0])
        yield importlib.import_module(names[1])
        for name in names:
            sys.modules.pop(name, None)


def config_of(kind: str, **other: Any) -> Any:
    """The config of a checkpoint, made as vLLM makes it when the user asks for ours."""
    ((asked, made),) = METHODS.items()
    described = {**DESCRIBED[kind], **other}
    model = SimpleNamespace(model_type="gpt_oss" if kind == "gpt-oss" else "qwen3_moe")
    assert made.override_quantization_method(described, None, hf_config=model) is None
    name = made.override_quantization_method(described, asked, hf_config=model)
    return METHODS[name].from_config(described)
