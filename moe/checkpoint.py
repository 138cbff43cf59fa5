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
from typing import Any

import torch

from kernelkit.tensors import device_of, require_memory
from moe.formats import format_of
from moe.packing import PackedExperts, require_kind
from moe.quantized import Quantized, of_bytes

VERSION = 1
LAYOUT = "layout"
WEIGHTS = ("w13", "w2")
FIELDS = ("data", "scales", "encode_scale", "decode_scale")


def state_dict(packed: PackedExperts, prefix: str = "") -> dict[str, torch.Tensor]:
    """Tensors by name, which share memory with `packed`."""
    require_kind("packed", packed, PackedExperts)
    require_kind("prefix", prefix, str)
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
    require_kind("tensors", tensors, Mapping)
    require_kind("prefix", prefix, str)
    layout = _layout(prefix + LAYOUT, _tensor(tensors, prefix + LAYOUT))
    w13, w2 = (_weight(tensors, f"{prefix}{name}.", layout["fmt"]) for name in WEIGHTS)
    return PackedExperts(w13, w2, layout["granularity"])


def save(path: str | PathLike[str], layers: Mapping[str, PackedExperts]) -> None:
    """Write a safetensors file of layers by name, e.g. 'model.layers.3.mlp'."""
    require_kind("layers", layers, Mapping)
    tensors: dict[str, torch.Tensor] = {}
    for name, packed in layers.items():
        tensors |= state_dict(packed, f"{name}.")
    _safetensors().save_file(tensors, path)


def load(path: str | PathLike[str], device: str | torch.device = "cpu") -> dict[str, PackedExperts]:
    """All layers of a safetensors file by name, on `device`."""
    tensors = _safetensors().load_file(path, device=str(device_of(device)))
    ending = f".{LAYOUT}"
    names = [name.removesuffix(ending) for name in tensors if name.endswith(ending)]
    return {name: from_state_dict(tensors, f"{name}.") for name in names}


def _weight(tensors: Mapping[str, torch.Tensor], prefix: str, fmt: str) -> Quantized:
    fields = FIELDS if format_of(fmt).has_global else FIELDS[:2]
    return of_bytes(fmt=fmt, **{field: _tensor(tensors, prefix + field) for field in fields})


def _layout(name: str, stored: torch.Tensor) -> dict[str, Any]:
    """What the bytes of a `layout` say; ValueError for bytes that say something else."""
    try:
        layout = json.loads(bytes(stored.tolist()))
        version, *rest = layout["version"], layout["fmt"], layout["granularity"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{name} is no JSON text of version, fmt and granularity") from error
    if version != VERSION:
        raise ValueError(f"{name} has version {version}, expected {VERSION}")
    return {"fmt": rest[0], "granularity": rest[1]}


def _tensor(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise ValueError(f"no tensor {name!r}: packed experts have one")
    tensor = tensors[name]
    require_kind(name, tensor, torch.Tensor)
    require_memory(**{name: tensor})
    wanted = torch.float32 if name.endswith("_scale") else torch.uint8
    if tensor.dtype != wanted:
        raise ValueError(f"{name} is {tensor.dtype}, stored as {wanted}")
    return tensor


def _safetensors() -> ModuleType:
    """safetensors.torch, which nothing else needs."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("files need safetensors: pip install safetensors") from error
    return safetensors.torch
