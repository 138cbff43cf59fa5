"""Packed experts as plain tensors: state dicts, and safetensors files of many layers.

Every packed layer has these names after a prefix: `w13.data`, `w13.scales` and, in a format with
global scales, `w13.encode_scale` and `w13.decode_scale` (fp32); likewise of `w2`; `bias13` and
`bias2` (fp32) if there are biases; and `layout`. Elements, scale factors and `layout`, a JSON text
that describes the bytes, are stored as uint8, which every version of torch and of safetensors
supports. Loaded experts are packed already. Readers without support for biases refuse version 2,
which has them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import product
from math import prod
from os import PathLike
from types import ModuleType
from typing import Any

import torch

from kernelkit.call.tensors import device_of, require_memory
from kernelkit.compile.outside import FileError, json_of, require_fields
from kernelkit.plan import hw
from moe.formats import format_of
from moe.packing import PackedExperts, require_kind
from moe.quantized import Quantized, of_bytes

# ---- Files: the header is checked before the library reads it, whose errors then name the file

MAX_HEADER = 100_000_000  # bytes, the library's limit
_LENGTH = 8  # bytes of the header's length
_METADATA = "__metadata__"
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64), **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16), **dict.fromkeys(("I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
}  # fmt: skip


def open_file(path: str | PathLike[str]) -> Any:
    """Open a checked file by `safetensors.safe_open`. Raise FileError that names the field."""
    with _named(path):
        check(path)
        return safetensors_of("safetensors").safe_open(path, framework="pt")


def load_file(path: str | PathLike[str], device: str) -> dict[str, torch.Tensor]:
    """Load all tensors of a checked file. Raise FileError that names the field."""
    with _named(path):
        check(path)
        found: dict[str, torch.Tensor] = safetensors_of("safetensors.torch").load_file(path, device)
        return found


def check(path: str | PathLike[str]) -> None:
    """Raise FileError unless the header is JSON of tensors that are within the file. The library
    checks the rest, and dtypes that are unknown here."""
    size = os.stat(path).st_size
    with open(path, "rb") as file:
        nbytes = int.from_bytes(file.read(_LENGTH), "little")
        if not 2 <= nbytes <= min(size - _LENGTH, MAX_HEADER):
            raise FileError(f"{path} of {size} bytes cannot have a header of {nbytes} bytes")
        header = json_of(file.read(nbytes), f"the header of {path}")
    if not isinstance(header, dict):
        raise FileError(f"the header of {path} is a {type(header).__name__}, expected an object")
    for name, item in header.items():
        if name != _METADATA:
            _check_tensor(f"{path}: tensor {name!r:.80}", item, size - _LENGTH - nbytes)


def _check_tensor(name: str, item: Any, room: int) -> None:
    if not isinstance(item, dict) or not {"dtype", "shape", "data_offsets"} <= item.keys():
        raise FileError(f"{name} has no dtype, shape and data_offsets")
    shape, offsets, dtype = item["shape"], item["data_offsets"], item["dtype"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        given = f"shape {shape!r:.80} and data_offsets {offsets!r:.80}"
        raise FileError(f"{name} has {given}, expected lists of integers, the latter of two")
    first, end = offsets
    if not first <= end <= room:
        raise FileError(f"{name} has data_offsets {offsets}, the file has {room} bytes of data")
    bits = _BITS.get(dtype) if isinstance(dtype, str) else 0
    if bits is not None and prod(shape) * bits != (end - first) * 8:
        raise FileError(
            f"{name} has {end - first} bytes for dtype {dtype!r:.80} and shape {shape!r:.80}"
        )


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in values)


@contextmanager
def _named(path: str | PathLike[str]) -> Iterator[None]:
    """Convert errors of the library to FileError with the name of the file."""
    error_of_library = safetensors_of("safetensors").SafetensorError
    try:
        yield
    except error_of_library as error:
        raise FileError(f"{path} is not a safetensors file: {error}") from error


def safetensors_of(module: str) -> ModuleType:
    """A module of safetensors, which only files need."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError("files need safetensors: pip install safetensors") from error


# ---- State dicts

PLAIN, BIASED = 1, 2  # versions
LAYOUT = "layout"
MAX_LAYOUT = 1 << 16  # bytes
WEIGHTS = ("w13", "w2")
FIELDS = ("data", "scales", "encode_scale", "decode_scale")
BIASES = ("bias13", "bias2")
NUMBERS = ("encode_scale", "decode_scale", *BIASES)  # stored as fp32
Layout = dict[str, Any]


def state_dict(packed: PackedExperts, prefix: str = "") -> dict[str, torch.Tensor]:
    """Tensors by name, which share memory with `packed`."""
    require_kind("packed", packed, PackedExperts)
    require_kind("prefix", prefix, str)
    text = json.dumps(layout_of(packed)).encode()
    tensors = {prefix + LAYOUT: torch.tensor(list(text), dtype=torch.uint8)}
    for name, field in product(WEIGHTS, FIELDS):
        tensor = getattr(getattr(packed, name), field)
        if tensor is not None:
            is_bytes = tensor.dtype != torch.float32
            tensors[f"{prefix}{name}.{field}"] = tensor.view(torch.uint8) if is_bytes else tensor
    biases = zip(BIASES, packed.biases, strict=True)
    return tensors | {prefix + name: bias for name, bias in biases if bias is not None}


def layout_of(packed: PackedExperts) -> Layout:
    """Return the layout that describes `packed`."""
    layout = {"version": PLAIN, "fmt": packed.fmt, "granularity": packed.granularity}
    layout |= {"pairs": True} if packed.w13.has_pairs else {}
    names = [name for name in BIASES if getattr(packed, name) is not None]
    return layout | {"version": BIASED, "biases": names} if names else layout


def from_state_dict(tensors: Mapping[str, torch.Tensor], prefix: str = "") -> PackedExperts:
    """Build packed experts from a state dict, sharing memory. Other names are ignored."""
    require_kind("tensors", tensors, Mapping)
    require_kind("prefix", prefix, str)
    name = prefix + LAYOUT
    return of_layout(read_layout(name, _tensor(tensors, name)), tensors, prefix)


def of_layout(
    layout: Layout, tensors: Mapping[str, torch.Tensor], prefix: str = ""
) -> PackedExperts:
    """Build packed experts as `from_state_dict` does, with a known layout: no tensor is read."""
    w13, w2 = (_weight(tensors, f"{prefix}{name}.", layout["fmt"]) for name in WEIGHTS)
    names = layout.get("biases", ())
    bias13, bias2 = (_tensor(tensors, prefix + name) if name in names else None for name in BIASES)
    return PackedExperts(w13, w2, layout["granularity"], bias13, bias2)


def save(path: str | PathLike[str], layers: Mapping[str, PackedExperts]) -> None:
    """Write a safetensors file of layers by name, e.g. 'model.layers.3.mlp'. Its metadata has each
    layer's `model_type`, which a state dict lacks."""
    require_kind("layers", layers, Mapping)
    tensors: dict[str, torch.Tensor] = {}
    for name, packed in layers.items():
        tensors |= state_dict(packed, f"{name}.")
    models = {name: packed.model_type for name, packed in layers.items() if packed.model_type}
    safetensors_of("safetensors.torch").save_file(tensors, path, models or None)


def load(path: str | PathLike[str], device: str | torch.device = "cpu") -> dict[str, PackedExperts]:
    """All layers of a safetensors file by name, on `device`."""
    tensors = load_file(path, str(device_of(device)))
    for name, tensor in tensors.items():  # in a mapped file, which aligns data to 8 bytes
        if tensor.data_ptr() % hw.TMA_ALIGN_BYTES:
            tensors[name] = tensor.clone()
    ending = f".{LAYOUT}"
    names = [name.removesuffix(ending) for name in tensors if name.endswith(ending)]
    with open_file(path) as file:
        models = file.metadata() or {}
    found = {name: from_state_dict(tensors, f"{name}.") for name in names}
    return {name: replace(each, model_type=models.get(name)) for name, each in found.items()}


def _weight(tensors: Mapping[str, torch.Tensor], prefix: str, fmt: str) -> Quantized:
    fields = FIELDS if format_of(fmt).has_global else FIELDS[:2]
    return of_bytes(fmt=fmt, **{field: _tensor(tensors, prefix + field) for field in fields})


def read_layout(name: str, stored: torch.Tensor) -> Layout:
    """Decode the bytes of a `layout`. Raise ValueError if they are not a layout."""
    if stored.numel() > MAX_LAYOUT:
        raise ValueError(f"{name} has {stored.numel()} bytes, at most {MAX_LAYOUT}")
    try:
        layout = json_of(bytes(stored.tolist()), name)
        version, names = layout["version"], ["version", "fmt", "granularity"]
        names += ["biases"] if version == BIASED else []
        names += ["pairs"] if "pairs" in layout else []
        found = {field: layout[field] for field in names}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{name} is not JSON with version, fmt and granularity") from error
    if version not in (PLAIN, BIASED):
        raise ValueError(f"{name} has version {version!r:.80}, expected {PLAIN} or {BIASED}")
    require_fields(name, found, {"fmt": str, "granularity": int})
    biases = found.get("biases", [])
    if not isinstance(biases, list) or not all(each in BIASES for each in biases):
        raise ValueError(f"{name} has biases {biases!r:.80}, expected names of {BIASES}")
    return found


def _tensor(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise ValueError(f"no tensor {name!r}: packed experts have one")
    tensor = tensors[name]
    require_kind(name, tensor, torch.Tensor)
    require_memory(**{name: tensor})
    wanted = torch.float32 if name.endswith(NUMBERS) else torch.uint8
    if tensor.dtype != wanted:
        raise ValueError(f"{name} is {tensor.dtype}, expected {wanted}")
    return tensor
