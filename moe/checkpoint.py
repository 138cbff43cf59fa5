"""Packed experts as plain tensors: state dicts, and safetensors files that hold many layers.

Of every packed layer there are, behind a prefix, `w13.data`, `w13.scales`, of a format with global
scales `w13.encode_scale` and `w13.decode_scale` (fp32), the same of `w2`, and `layout`. Elements,
scale factors and `layout`, a JSON text that says what the bytes are, are stored as uint8, which
every version of torch and of safetensors can hold. What is loaded is packed already.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from os import PathLike
from types import ModuleType

import torch

from moe.formats import format_of
from moe.packing import PackedExperts
from moe.quantized import Quantized, of_bytes

VERSION = 1
LAYOUT = "layout"
WEIGHTS = ("w13", "w2")
FIELDS = ("data", "scales", "encode_scale", "decode_scale")


def state_dict(packed: PackedExperts, prefix: str = "") -> dict[str, torch.Tensor]:
    """Tensors by name, which share memory with `packed`."""
    layout = {"version": VERSION, "fmt": packed.fmt, "granularity": packed.granularity}
    text = json.dumps(layout).encode()
    tensors = {prefix + LAYOUT: torch.tensor(list(text), dtype=torch.uint8)}
    for name, field in product(WEIGHTS, FIELDS):
        tensor = getattr(getattr(packed, name), field)
        if tensor is not None:
            is_bytes = tensor.dtype != torch.float32
            tensors[f"{prefix}{name}.{field}"] = tensor.view(torch.uint8) if is_bytes else tensor
    return tensors


def from_state_dict(tensors: Mapping[str, torch.Tensor], prefix: str = "") -> PackedExperts:
    """The inverse of `state_dict`; shares memory with the tensors. Other names are ignored."""
    layout = json.loads(bytes(_tensor(tensors, prefix + LAYOUT).tolist()))
    if layout["version"] != VERSION:
        raise ValueError(f"{prefix}{LAYOUT} has version {layout['version']}, expected {VERSION}")
    w13, w2 = (_weight(tensors, f"{prefix}{name}.", layout["fmt"]) for name in WEIGHTS)
    return PackedExperts(w13, w2, layout["granularity"])


def save(path: str | PathLike[str], layers: Mapping[str, PackedExperts]) -> None:
    """Write a safetensors file of layers by name, e.g. 'model.layers.3.mlp'."""
    tensors: dict[str, torch.Tensor] = {}
    for name, packed in layers.items():
        tensors |= state_dict(packed, f"{name}.")
    _safetensors().save_file(tensors, path)


def load(path: str | PathLike[str], device: str | torch.device = "cpu") -> dict[str, PackedExperts]:
    """All layers of a safetensors file by name, on `device`."""
    tensors = _safetensors().load_file(path, device=str(device))
    ending = f".{LAYOUT}"
    names = [name.removesuffix(ending) for name in tensors if name.endswith(ending)]
    return {name: from_state_dict(tensors, f"{name}.") for name in names}


def _weight(tensors: Mapping[str, torch.Tensor], prefix: str, fmt: str) -> Quantized:
    fields = FIELDS if format_of(fmt).has_global else FIELDS[:2]
    return of_bytes(fmt=fmt, **{field: _tensor(tensors, prefix + field) for field in fields})


def _tensor(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise ValueError(f"no tensor {name!r}: packed experts have one")
    return tensors[name]


def _safetensors() -> ModuleType:
    """safetensors.torch, which nothing else needs."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("files need safetensors: pip install safetensors") from error
    return safetensors.torch
