"""Stand-ins for the parts of SGLang 0.5.23 that the experts need, and a layer that is loaded and
called as by the engine.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.blackwell_engines.experts import DESCRIBED, EXPERTS, HIDDEN, INNER, TOP_K, Checkpoint
from tests.blackwell_engines.requests import stand_ins

FP8 = SimpleNamespace(override_quantization_method=lambda config, user: "fp8")
METHODS: dict[str, Any] = {}
CHOICES: list[str] = []
A2A = SimpleNamespace(is_none=lambda: True)
SERVER = SimpleNamespace(chunked_prefill_size=16, max_prefill_tokens=64, max_running_requests=4)


class Config:
    """The part of SGLang's config classes that the plugin reads."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Config:
        made = cls()
        made.config = config
        return made

    def get_quant_method(self, layer: Any, prefix: str) -> str:
        return f"SGLang's for {prefix}"


class Mxfp4Config(Config):
    pass


class ModelOptFp4Config(Config):
    def is_layer_excluded(self, prefix: str) -> bool:
        return prefix in self.config.get("ignore", ())


class CompressedTensorsConfig(Config):
    def _add_fused_moe_to_target_scheme_map(self) -> None:
        pass

    def get_scheme_dict(self, layer: Any, name: str) -> dict:
        group = self.config["group_size"]
        return {"weights": SimpleNamespace(num_bits=4, type="float", group_size=group)}


class FusedMoEMethodBase:
    pass


class Chosen(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    format: str = "standard"


class TopKOutputChecker:
    @staticmethod
    def format_is_standard(chosen: Chosen) -> bool:
        return chosen.format == "standard"


class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


class FusedMoE(torch.nn.Module):
    """A layer as SGLang makes it. first, end: experts of this rank."""

    def __init__(
        self, config: Any, name: str, first: int = 0, end: int = EXPERTS, *,
        with_bias: bool = False, hidden_size: int = HIDDEN, ranks: int = 1, rows: int = INNER,
        **given: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden_size_unpadded, self.first, self.end = HIDDEN, first, end
        self.moe_tp_size = ranks
        self.moe_runner_config = runner_config(**given)
        self.quant_method = config.get_quant_method(self, name)
        self.quant_method.create_weights(
            layer=self, num_experts=end - first, hidden_size=hidden_size,
            intermediate_size_per_partition=rows, params_dtype=torch.bfloat16,
            weight_loader=self.weight_loader, with_bias=with_bias, moe_intermediate_size=INNER,
        )  # fmt: skip
        self.quant_method.create_moe_runner(self, self.moe_runner_config)

    def weight_loader(self, param: Any, value: torch.Tensor, expert: int, half: int | None) -> None:
        """Load a matrix of an expert, or one of its scales; half: 0 for gate, 1 for up."""
        if not self.first <= expert < self.end:
            return
        place = param.data[expert - self.first]
        if value.numel() == 1:
            (place if half is None else place[half]).copy_(value.reshape(()))
        else:
            (place if half is None else place.chunk(2)[half]).copy_(value)

    def load(self, checkpoint: Checkpoint) -> None:
        parameters = dict(self.named_parameters())
        if checkpoint.biases is not None:
            for name, value in checkpoint.whole():
                name = name.replace("_bias", "_weight_bias")
                parameters[name].data.copy_(value[self.first : self.end])
        else:
            for expert, (gate, up, down) in enumerate(checkpoint.matrices):
                for half, matrix in ((0, gate), (1, up), (None, down)):
                    for name, value in matrix.tensors.items():
                        param = parameters[f"{'w2' if half is None else 'w13'}_{name}"]
                        param.weight_loader(param, value, expert, half)
        self.quant_method.process_weights_after_loading(self)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Call the method as after SGLang's standard dispatcher: with ids of this rank."""
        here = (ids >= self.first) & (ids < self.end)
        chosen = Chosen(weights, torch.where(here, ids - self.first, -1))
        given = SimpleNamespace(hidden_states=x, topk_output=chosen)
        return self.quant_method.apply(layer=self, dispatch_output=given).hidden_states


def runner_config(**given: Any) -> SimpleNamespace:
    fields = {
        "activation": "silu", "is_gated": True, "gemm1_alpha": None, "gemm1_beta": None,
        "gemm1_clamp_limit": None, "swiglu_limit": None, "gate_up_interleaved": True,
        "top_k": TOP_K, "no_combine": False, "apply_router_weight_on_input": False,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **given})


def modules() -> dict[str, ModuleType]:
    """Map the names under which the plugin imports modules to stand-ins."""
    moe, quantization = "sglang.srt.layers.moe", "sglang.srt.layers.quantization"
    contents: dict[str, dict[str, Any]] = {
        "sglang.srt.arg_groups.choices": {"QUANTIZATION_CHOICES": CHOICES},
        quantization: {"QUANTIZATION_METHODS": METHODS},
        moe: {"get_moe_a2a_backend": lambda: A2A},
        f"{moe}.fused_moe_triton": {"FusedMoE": FusedMoE},
        f"{moe}.token_dispatcher": {"StandardCombineInput": StandardCombineInput},
        f"{moe}.topk": {"TopKOutputChecker": TopKOutputChecker},
        f"{quantization}.base_config": {"FusedMoEMethodBase": FusedMoEMethodBase},
        f"{quantization}.mxfp4": {"Mxfp4Config": Mxfp4Config},
        f"{quantization}.modelopt_quant": {"ModelOptFp4Config": ModelOptFp4Config},
        f"{quantization}.compressed_tensors.compressed_tensors": {
            "CompressedTensorsConfig": CompressedTensorsConfig
        },
        "sglang.srt.runtime_context": {"get_server_args": lambda: SERVER},
    }
    return stand_ins(contents)


@contextmanager
def imported() -> Iterator[ModuleType]:
    """The plugin's experts, for the stand-ins."""
    name = "blackwell_engines.sglang.experts"
    with pytest.MonkeyPatch.context() as patch:
        for path, module in modules().items():
            patch.setitem(sys.modules, path, module)
        sys.modules.pop(name, None)
        METHODS.clear()
        METHODS["fp8"] = FP8
        CHOICES[:] = ["fp8"]
        importlib.import_module("blackwell_engines.sglang.quantization").register()
        yield importlib.import_module(name)
        sys.modules.pop(name, None)


def config_of(kind: str, **other: Any) -> Any:
    """The config of a checkpoint, made as SGLang makes it when the user asks for ours."""
    described = {**DESCRIBED[kind], **other}
    for method in METHODS.values():
        if asked := method.override_quantization_method(described, CHOICES[-1]):
            return METHODS[asked].from_config({**described, "packed_modules_mapping": {}})
    raise AssertionError("no method")
