"""Layers of known models: sizes, routers and activations, from the fields of their config.json.

Use `of_model("gpt-oss-120b")`, or `from_config(json.load(file))` for any model of these families.

Some facts are in no config.json, but in the models' code: softmax and the constants 1.702 and 1 of
gpt-oss, softmax of Mixtral and Qwen3, and that `e_score_correction_bias` steers the choices of
DeepSeek and Kimi. Public code disagrees on whether the shared expert of DeepSeek-V4 has the limit
of the others; as one of `Router.shared` it has. In the first `num_hash_layers` layers of
DeepSeek-V4 a table of tokens chooses the experts; there is no router for it here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from moe.arguments import Router, SwiGLU

Config = Mapping[str, Any]
MAX_NUMBER = (1 << 31) - 1  # limit of every count in a config
GPT_OSS_ALPHA, GPT_OSS_BETA = 1.702, 1.0
# model_type -> how its activation is written, of models whose SwiGLU has a limit
CLAMPED = {
    "gpt_oss": f"SwiGLU({GPT_OSS_ALPHA}, {GPT_OSS_BETA}, 7.0)",
    "deepseek_v4": "SwiGLU(limit=10.0)",
}


@dataclass(frozen=True)
class ModelLayer:
    """An MoE layer of a model."""

    hidden: int  # H
    intermediate: int  # I of an expert
    experts: int  # E to choose from, without shared ones
    router: Router  # without its tensors
    activation: SwiGLU
    router_tensors: tuple[str, ...] = ()  # names of the router tensors that the model has
    biases: bool = False  # whether experts have biases


def _gpt_oss(config: Config) -> ModelLayer:
    return ModelLayer(
        config["hidden_size"],
        config["intermediate_size"],
        config["num_local_experts"],
        Router(config["num_experts_per_tok"]),
        SwiGLU(GPT_OSS_ALPHA, GPT_OSS_BETA, config["swiglu_limit"]),
        ("logit_bias",),
        biases=True,
    )


def _deepseek(config: Config) -> ModelLayer:
    """V3, V4 and Kimi-K2, which has V3's architecture. V4 has no groups, and a limit."""
    router = Router(
        config["num_experts_per_tok"],
        config["scoring_func"],
        n_group=config.get("n_group", 1),
        topk_group=config.get("topk_group", 1),
        renormalize=config["norm_topk_prob"],
        scale=config["routed_scaling_factor"],
        shared=config["n_shared_experts"],
    )
    activation = SwiGLU(limit=config.get("swiglu_limit"))
    sizes = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    return ModelLayer(*sizes, router, activation, ("bias",))


def _qwen3_moe(config: Config) -> ModelLayer:
    router = Router(config["num_experts_per_tok"], renormalize=config["norm_topk_prob"])
    sizes = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    return ModelLayer(*sizes, router, SwiGLU())


def _mixtral(config: Config) -> ModelLayer:
    sizes = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    return ModelLayer(*sizes, Router(config["num_experts_per_tok"]), SwiGLU())


READERS: MappingProxyType[str, Callable[[Config], ModelLayer]] = MappingProxyType({
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek,
    "deepseek_v4": _deepseek,
    "kimi_k2": _deepseek,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
})  # fmt: skip

_GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_experts_per_tok": 4, "swiglu_limit": 7.0,
}  # fmt: skip
_DEEPSEEK = {"n_shared_experts": 1, "norm_topk_prob": True}
_V4 = {
    **_DEEPSEEK, "model_type": "deepseek_v4", "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0,
}  # fmt: skip
_QWEN3 = {
    "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}  # fmt: skip
_MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}

# Keys as in the config.json of openai/gpt-oss-*, deepseek-ai/DeepSeek-*, moonshotai/Kimi-K2-*,
# Qwen/Qwen3-* and mistralai/Mixtral-*; what a layer of experts does not depend on is left out.
CONFIGS: MappingProxyType[str, Config] = MappingProxyType({
    "gpt-oss-120b": {**_GPT_OSS, "num_local_experts": 128},
    "gpt-oss-20b": {**_GPT_OSS, "num_local_experts": 32},
    "deepseek-v3": {
        **_DEEPSEEK, "model_type": "deepseek_v3", "hidden_size": 7168,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "scoring_func": "sigmoid", "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    },
    "deepseek-v4-pro": {
        **_V4, "hidden_size": 7168, "moe_intermediate_size": 3072, "n_routed_experts": 384,
        "routed_scaling_factor": 2.5,
    },
    "deepseek-v4-flash": {
        **_V4, "hidden_size": 4096, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "routed_scaling_factor": 1.5,
    },
    "kimi-k2": {
        **_DEEPSEEK, "model_type": "kimi_k2", "hidden_size": 7168, "moe_intermediate_size": 2048,
        "n_routed_experts": 384, "num_experts_per_tok": 8, "scoring_func": "sigmoid",
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
    },
    "qwen3-235b-a22b": {**_QWEN3, "hidden_size": 4096, "moe_intermediate_size": 1536},
    "qwen3-30b-a3b": {**_QWEN3, "hidden_size": 2048, "moe_intermediate_size": 768},
    "mixtral-8x7b": {**_MIXTRAL, "hidden_size": 4096, "intermediate_size": 14336},
    "mixtral-8x22b": {**_MIXTRAL, "hidden_size": 6144, "intermediate_size": 16384},
})  # fmt: skip


def of_model(name: str) -> ModelLayer:
    """Return the layer of a model by its name. Raise ValueError for an unknown name."""
    if name not in CONFIGS:
        raise ValueError(f"{name!r}: models are {', '.join(CONFIGS)}")
    return from_config(CONFIGS[name])


def from_config(config: Config) -> ModelLayer:
    """Return the layer that a config.json describes. Raise ValueError for an unknown family, and
    for a field that is missing or has a wrong type or size."""
    if not isinstance(config, Mapping):
        raise ValueError(f"a config is a {type(config).__name__}, expected an object")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in READERS:
        raise ValueError(f"model_type {family!r:.80}: one of {', '.join(READERS)}")
    try:
        layer = READERS[family](config)
    except KeyError as error:
        raise ValueError(f"a config of {family} lacks {error}") from error
    _check(family, layer)
    return layer


def _check(family: str, layer: ModelLayer) -> None:
    router, activation = layer.router, layer.activation
    counts = {
        "hidden size": layer.hidden, "intermediate size": layer.intermediate,
        "number of experts": layer.experts, "number of experts per token": router.top_k,
        "n_group": router.n_group, "topk_group": router.topk_group,
    }  # fmt: skip
    for name, value in {**counts, "number of shared experts": router.shared}.items():
        least = 1 if name in counts else 0
        if type(value) is not int or not least <= value <= MAX_NUMBER:
            raise ValueError(
                f"a config of {family} has {name} {value!r:.80}, expected an integer from {least} "
                f"to {MAX_NUMBER}"
            )
    if family in CLAMPED and activation.limit is None:
        raise ValueError(f"a config of {family} without 'swiglu_limit', which its experts have")
    limit = 1.0 if activation.limit is None else activation.limit
    for name, number in {"routed_scaling_factor": router.scale, "swiglu_limit": limit}.items():
        if type(number) not in (int, float) or not 0 < number < MAX_NUMBER:
            given = f"a config of {family} has {name} {number!r:.80}"
            raise ValueError(f"{given}, expected a number between 0 and {MAX_NUMBER}")
    if type(router.renormalize) is not bool or not isinstance(router.scoring, str):
        given = f"norm_topk_prob {router.renormalize!r:.80}, scoring_func {router.scoring!r:.80}"
        raise ValueError(f"a config of {family} has {given}, expected bool and str")
