"""What the plugin needs of SGLang 0.5.23, in a few lines: the base class, pools, the registry."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.blackwell_engines.requests import Shape

BACKENDS: dict[str, Any] = {}
CHOICES = ["triton"]


class AttentionBackend:
    """With what the engine's own does of a forward."""

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_decode():
            return self.forward_decode(q, k, v, layer, batch, save_kv_cache=True, **kwargs)
        return self.forward_extend(q, k, v, layer, batch, save_kv_cache=True, **kwargs)


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    TARGET_VERIFY = auto()

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    is_decode_or_idle = is_decode

    def is_context_parallel_extend(self) -> bool:
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)


@dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: torch.Tensor | None

    @classmethod
    def for_batch(cls, batch: Any, swa_loc: torch.Tensor | None = None) -> KVWriteLoc:
        return cls(batch.out_cache_loc, swa_loc)


class Pool:
    """Slots of K and V of layer 0, NaN at first, which the engine writes itself. With windowed
    slots, layer 1 has a window and fewer slots, which `full_to_swa_index_mapping` names."""

    def __init__(self, shape: Shape, slots: int, windowed: int = 0, device: str = "cpu") -> None:
        dtype, row = shape.kv_dtype or shape.dtype, (shape.kv_heads, shape.head_dim)
        self.buffers = [
            [torch.full((n, *row), torch.nan, device=device).to(dtype) for _ in "kv"]
            for n in (slots, windowed)
        ]
        if windowed:
            self.full_to_swa_index_mapping = torch.full((slots,), -1, device=device)
            self.layers_mapping = {0: (0, False), 1: (0, True)}

    def get_kv_buffer(self, layer_id: int) -> list[torch.Tensor]:
        return self.buffers[layer_id]

    def set_kv_buffer(
        self, layer: Any, where: KVWriteLoc, k: Any, v: Any, k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:  # fmt: skip
        slots = where.swa_loc if layer.layer_id else where.loc
        for buffer, x, scale in zip(
            self.buffers[layer.layer_id], (k, v), (k_scale, v_scale), strict=True
        ):
            if buffer.dtype != x.dtype:
                x.div_(scale)  # in place, as the engine does it
            whole = torch.uint8 if buffer.itemsize == 1 else buffer.dtype
            buffer.view(whole)[slots] = x.to(buffer.dtype).view(whole)


def layer_of(shape: Shape, layer_id: int = 0, **changes: Any) -> SimpleNamespace:
    """The fields of a `RadixAttention` that the plugin reads."""
    window = shape.window if layer_id == 0 or shape.window is not None else None
    return SimpleNamespace(**{
        "layer_id": layer_id, "tp_q_head_num": shape.q_heads, "tp_k_head_num": shape.kv_heads,
        "qk_head_dim": shape.head_dim, "v_head_dim": shape.head_dim,
        "scaling": shape.head_dim**-0.5, "logit_cap": shape.softcap or 0.0,
        "logit_capping_method": "tanh", "sliding_window_size": -1 if window is None else window,
        "is_cross_attention": False, "attn_type": SimpleNamespace(value="decoder"),
        "xai_temperature_len": -1, "k_scale_float": shape.scales[0],
        "v_scale_float": shape.scales[1],
    } | changes)  # fmt: skip


def modules() -> dict[str, ModuleType]:
    """By the names under which the plugin imports them."""

    def register_attention_backend(name: str) -> Any:
        return lambda made: BACKENDS.setdefault(name, made)

    contents = {
        "layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "layers.attention.attention_registry": {
            "register_attention_backend": register_attention_backend
        },
        "mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
        "arg_groups.choices": {"ATTENTION_BACKEND_CHOICES": CHOICES},
    }
    found = {"sglang": ModuleType("sglang"), "sglang.srt": ModuleType("sglang.srt")}
    for path, names in contents.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(("sglang", "srt", *parts[:end]))
            found.setdefault(name, ModuleType(name))
        vars(found[f"sglang.srt.{path}"]).update(names)
    return found
