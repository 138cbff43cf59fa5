"""Safetensors files: the header is checked before the library reads it, and its errors name the
file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from math import prod
from os import PathLike
from types import ModuleType
from typing import Any

import torch

from kernelkit.compile.outside import FileError, json_of

MAX_HEADER = 100_000_000  # bytes, the library's own limit
_LENGTH = 8  # bytes of the header's length
_METADATA = "__metadata__"
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64), **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16), **dict.fromkeys(("I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
}  # fmt: skip


def open_file(path: str | PathLike[str]) -> Any:
    """`safetensors.safe_open` of a file that is checked. Raises FileError that names the field."""
    with _named(path):
        check(path)
        return safetensors_of("safetensors").safe_open(path, framework="pt")


def load_file(path: str | PathLike[str], device: str) -> dict[str, torch.Tensor]:
    """All tensors of a file that is checked. Raises FileError that names the field."""
    with _named(path):
        check(path)
        found: dict[str, torch.Tensor] = safetensors_of("safetensors.torch").load_file(path, device)
        return found


def check(path: str | PathLike[str]) -> None:
    """Raise FileError unless the header is JSON of tensors that lie within the file; the library
    checks the rest. Formats that are not known here are left to it."""
    size = os.stat(path).st_size
    with open(path, "rb") as file:
        nbytes = int.from_bytes(file.read(_LENGTH), "little")
        if not 2 <= nbytes <= min(size - _LENGTH, MAX_HEADER):
            raise FileError(f"{path} has {size} bytes and a header of {nbytes}, which cannot be")
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
        raise FileError(f"{name} has shape {shape!r:.80} and data_offsets {offsets!r:.80}")
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
    """Errors of the library as FileError with the name of the file."""
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
