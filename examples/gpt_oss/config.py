"""Sizes of gpt-oss as data: the fields of its config.json, for 20b, 120b, and a tiny one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from kernelkit.compile.outside import json_file
from kvcache import Layout, gqa
from moe.models import ModelLayer
from moe.models import from_config as experts_of

SLIDING, FULL = "sliding_attention", "full_attention"
BLOCK_TOKENS = 128  # of a block of the cache, at most; a page of keys that every kernel reads
ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 4096, "truncate": False, "rope_theta": 150000.0,
}  # fmt: skip
# What the released models share.
_RELEASED = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4,
    "vocab_size": 201088, "sliding_window": 128, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "eos_token_id": 200002, "rope_parameters": ROPE,
}  # fmt: skip
_TINY = {
    **_RELEASED, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "vocab_size": 96, "sliding_window": 16,
    "num_hidden_layers": 2, "num_local_experts": 4, "max_position_embeddings": 4096,
    "eos_token_id": None,
}  # fmt: skip
CONFIGS: MappingProxyType[str, Mapping[str, Any]] = MappingProxyType(
    {
        "20b": {**_RELEASED, "num_hidden_layers": 24, "num_local_experts": 32},
        "120b": {**_RELEASED, "num_hidden_layers": 36, "num_local_experts": 128},
        "tiny": _TINY,
    }
)


@dataclass(frozen=True)
class Config:
    """A gpt-oss. values: the fields of its config.json, as transformers names them."""

    name: str
    values: Mapping[str, Any]

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return self.values["num_hidden_layers"]

    @property
    def hidden(self) -> int:
        """Columns of the residual stream."""
        return self.values["hidden_size"]

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.values["vocab_size"]

    @property
    def q_heads(self) -> int:
        """Query heads."""
        return self.values["num_attention_heads"]

    @property
    def kv_heads(self) -> int:
        """Key heads, and as many of values."""
        return self.values["num_key_value_heads"]

    @property
    def head_dim(self) -> int:
        """Head dim of queries, keys and values."""
        return self.values["head_dim"]

    @property
    def window(self) -> int:
        """Number of keys that a token of a sliding layer sees, including its own."""
        return self.values["sliding_window"]

    @property
    def eps(self) -> float:
        """Epsilon of the norms."""
        return self.values["rms_norm_eps"]

    @property
    def positions(self) -> int:
        """The longest context."""
        return self.values["max_position_embeddings"]

    @property
    def stop(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        ids = self.values.get("eos_token_id")
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    @property
    def rope(self) -> Mapping[str, Any]:
        """YaRN's parameters and `rope_theta`, under either of the names that config.json has had
        for them."""
        given = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        theta = self.values.get("rope_theta", ROPE["rope_theta"])
        return {"rope_theta": theta, **given}

    @property
    def sliding(self) -> tuple[bool, ...]:
        """Whether each layer is a sliding one; by default they alternate, beginning with a
        sliding one."""
        types = self.values.get("layer_types") or [SLIDING, FULL] * self.layers
        return tuple(each == SLIDING for each in types[: self.layers])

    @property
    def experts(self) -> ModelLayer:
        """Sizes, router and activation of the experts of a layer."""
        return experts_of(self.values)

    def layout(self, dtype: torch.dtype = torch.bfloat16) -> Layout:
        """Return the cache layout: pages for full layers, rings of a window for sliding ones.

        A ring is read as one page of `window` rows, so a block has at most `window` tokens.
        """
        return gqa(
            self.layers, self.kv_heads, self.head_dim, element_bytes=dtype.itemsize,
            block_tokens=min(BLOCK_TOKENS, self.window), window=self.window,
            windowed=self.sliding, name=self.name,
        )  # fmt: skip


def named(name: str) -> Config:
    """A config by its name; ValueError for another name."""
    if name not in CONFIGS:
        raise ValueError(f"{name!r}: models are {', '.join(CONFIGS)}")
    return Config(name, CONFIGS[name])


def of_folder(folder: str | PathLike[str]) -> Config:
    """The config.json of a checkpoint; ValueError for another model's."""
    path = Path(folder)
    values = json_file(path / "config.json")
    if values.get("model_type") != "gpt_oss":
        raise ValueError(f"{path} is a model of type {values.get('model_type')!r}, not 'gpt_oss'")
    return Config(path.name, values)
