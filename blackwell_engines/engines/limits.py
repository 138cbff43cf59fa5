"""Check a layer with the kernels' argument checks before an engine begins."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from blackwell_engines.engines.attend import decodes
from fmha.arguments import Arguments
from fmha.choose import check_config, choose_config
from fmha.launch import ARCHS as ATTENTION_ARCHS
from gqa_lowlatency.arguments import Arguments as DecodeArguments
from gqa_lowlatency.launch import prepare
from kernelkit.call.launch import choose_target
from kernelkit.compile.arch import ARCH_OF_CAPABILITY

META = torch.device("meta")


@dataclass(frozen=True)
class Layer:
    """Properties of an attention layer.

    dtype: dtype of Q
    kv_dtype: dtype of K and V
    group: query heads per KV head
    window: keys seen before the query's position, None for all
    causal: False: also keys behind the position, as many as before it
    head_scales: each KV head of a cache in e4m3 has scales of its own
    out_dtype: dtype of O, None for that of Q; e4m3 is divided by a scale
    """

    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    group: int = 1
    window: int | None = None
    sinks: bool = False
    softcap: bool = False
    causal: bool = True
    head_scales: bool = False
    out_dtype: torch.dtype | None = None

    @property
    def decode_masks(self) -> dict[str, Any]:
        """Arguments of `decode` that mask keys."""
        return {"causal": self.causal, "window_left": self.window}

    @property
    def masks(self) -> dict[str, Any]:
        """Arguments of `attention` that mask keys."""
        return (
            self.decode_masks if self.causal else self.decode_masks | {"window_right": self.window}
        )

    def decodes(self, tokens: int) -> bool:
        """Whether `decode` knows such a layer, and so many tokens."""
        dims = self.head_dim, self.head_dim
        return decodes(tokens, *dims, causal=self.causal, window=self.window)


def arch_of(capability: tuple[int, int]) -> str:
    """The architecture of a compute capability; NotImplementedError for one without kernels."""
    if capability not in ARCH_OF_CAPABILITY:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCH_OF_CAPABILITY)
        found = ".".join(map(str, capability))
        raise NotImplementedError(f"compute capability {found}: supported are {known}")
    return ARCH_OF_CAPABILITY[capability]


@cache
def why_not(layer: Layer, arch: str, *, side_by_side: bool = False) -> str:
    """Why no kernel takes the layer, '' if both decoding and prompts have one.

    side_by_side: whether prompts read keys that lie side by side, and not in pages.
    """
    try:
        if layer.decodes(1):
            prepare(DecodeArguments(**_shared(layer, arch), **layer.decode_masks))
        else:
            _check_attention(Arguments(**_shared(layer, arch), **layer.masks), arch)
        given = _shared(layer, arch)
        given["q"] = given["q"][0]
        if side_by_side:
            given |= {name: given[name][0] for name in ("k", "v")}
            given |= {"cu_seqlens_k": _table(2), "kv_lens": None, "page_table": None}
        starts = _table(2)
        _check_attention(Arguments(**given, **layer.masks, cu_seqlens_q=starts), arch)
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    return ""


def _check_attention(arguments: Arguments, arch: str) -> None:
    """Raise what a call of `attention` would."""
    arguments.check()
    target = choose_target(META, "auto", arch, ATTENTION_ARCHS)
    check_config(choose_config(arguments, target.arch), target.arch)


def _shared(layer: Layer, arch: str) -> dict[str, Any]:
    """Arguments of a request with one new token, without memory."""
    pages = (1, layer.page_size, 1, layer.head_dim)
    return {
        "q": torch.empty((1, 1, layer.group, layer.head_dim), dtype=layer.dtype, device=META),
        "k": torch.empty(pages, dtype=layer.kv_dtype, device=META),
        "v": torch.empty(pages, dtype=layer.kv_dtype, device=META),
        "kv_lens": _table(1),
        "page_table": _table(1, 1),
        "softcap": 30.0 if layer.softcap else 0.0,
        "sinks": _table(layer.group, dtype=torch.float32) if layer.sinks else None,
        "out_dtype": layer.out_dtype,
        "arch": arch,
    }


def _table(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)
