"""What the plugin needs of vLLM 0.33.0, in a few lines: base classes, metadata, the registry."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, EnumMeta
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class AttentionBackend:
    """With the methods that the plugin inherits."""

    forward_includes_kv_cache_update = True

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in cls.supported_dtypes


class AttentionCGSupport(Enum):
    UNIFORM_BATCH = 2


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class AttentionImpl(Generic[T]):
    pass


class AttentionMetadataBuilder(Generic[T]):
    """With what the engine's own does for drafts of tokens."""

    reorder_batch_threshold = None

    def __init__(self, spec: Any, layer_names: list, vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    def _init_reorder_batch_threshold(self, least: int, supports_spec_as_decode: bool) -> None:
        drafts = getattr(self.vllm_config, "drafts", 0) if supports_spec_as_decode else 0
        self.reorder_batch_threshold = max(least, 1 + drafts)


@dataclass
class CommonAttentionMetadata:
    """The fields that the plugin reads."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True


class _Named(EnumMeta):
    def register(cls, name: str, path: str) -> None:
        member = object.__new__(cls)
        member._name_, member._value_ = name, path
        cls._member_map_[name] = member


class AttentionBackendEnum(Enum, metaclass=_Named):
    FLASH_ATTN = "flash"


def register_backend(name: str, path: str) -> None:
    """As for a name that is new."""
    AttentionBackendEnum.register(name, path)


def modules() -> dict[str, ModuleType]:
    """By the names under which the plugin imports them."""
    names = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends")
    found = {name: ModuleType(name) for name in names}
    backend = ModuleType("vllm.v1.attention.backend")
    for kind in (AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder,
                 AttentionType, CommonAttentionMetadata):  # fmt: skip
        setattr(backend, kind.__name__, kind)
    registry = ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = AttentionBackendEnum
    registry.register_backend = register_backend
    return {**found, backend.__name__: backend, registry.__name__: registry}
