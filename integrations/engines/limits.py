"""What a layer may be, by the checks of the kernels themselves, before an engine begins."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from fmha.arguments import Arguments
from fmha.choose import choose_config
from fmha.launch import ARCHS as ATTENTION_ARCHS
from fmha.launch import check_config
from gqa_lowlatency.arguments import Arguments as DecodeArguments
from gqa_lowlatency.launch import prepare
from integrations.engines.attend import decodes
from kernelkit.arch import ARCH_OF_CAPABILITY
from kernelkit.launch import choose_target

META = torch.device("meta")


@dataclass(frozen=True)
class Layer:
    """dtype: of Q; kv_dtype: of K and V; group: query heads of a KV head; page_size: 0 where keys
    of prompts lie side by side."""

    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    group: int = 1
    window: bool = False
    sinks: bool = False
    softcap: bool = False


def arch_of(capability: tuple[int, int]) -> str:
    """The architecture of a compute capability; NotImplementedError for one without kernels."""
    if capability not in ARCH_OF_CAPABILITY:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCH_OF_CAPABILITY)
        found = ".".join(map(str, capability))
        raise NotImplementedError(f"compute capability {found}: kernels are there for {known}")
    return ARCH_OF_CAPABILITY[capability]


@cache
def why_not(layer: Layer, arch: str, *, prompts: bool = True) -> str:
    """Why no kernel takes the layer, '' if both decoding and prompts have one.

    prompts: whether prompts are asked for, too; those in pages, unless page_size is 0.
    """
    try:
        if decodes(1, layer.head_dim, layer.head_dim) and layer.page_size:
            prepare(_decode_arguments(layer, arch))
        else:
            _check_attention(layer, arch, packed=False)
        if prompts:
            _check_attention(layer, arch, packed=True)
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    return ""


def _check_attention(layer: Layer, arch: str, *, packed: bool) -> None:
    """Raise what a call of `attention` would."""
    given = _shared(layer, arch)
    q = given.pop("q")
    if packed:
        given |= {"cu_seqlens_q": _table(2), "max_seqlen_q": q.shape[1]}
        q = q[0]
    arguments = Arguments(q=q, causal=True, **given)
    arguments.check()
    target = choose_target(META, "auto", arch, ATTENTION_ARCHS)
    check_config(choose_config(arguments, target.arch), target.arch)


def _decode_arguments(layer: Layer, arch: str) -> DecodeArguments:
    return DecodeArguments(**_shared(layer, arch))


def _shared(layer: Layer, arch: str) -> dict:
    """Arguments of a request with one new token, without memory."""
    pages = (1, layer.page_size or 128, 1, layer.head_dim)
    given = {
        "q": torch.empty((1, 1, layer.group, layer.head_dim), dtype=layer.dtype, device=META),
        "k": torch.empty(pages, dtype=layer.kv_dtype, device=META),
        "v": torch.empty(pages, dtype=layer.kv_dtype, device=META),
        "kv_lens": _table(1),
        "page_table": _table(1, 1),
        "window_left": 127 if layer.window else None,
        "softcap": 30.0 if layer.softcap else 0.0,
        "sinks": _table(layer.group, dtype=torch.float32) if layer.sinks else None,
        "arch": arch,
    }
    if not layer.page_size:
        given |= {"page_table": None}
    return given


def _table(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)
