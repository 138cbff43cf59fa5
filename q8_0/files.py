"""GGUF files: matrices in Q8_0 by name, mapped into memory, and the plain numbers beside them.

Every size and offset of the table of contents is checked before it is used; values of metadata
are skipped, but for general.alignment. Names of formats and sizes of their blocks are those of
the package gguf (`pip install gguf`, the extra `gguf`), which is imported here, when a file is
opened. Tensors are views of the mapped file: what is not asked for is not read, and the file must
stay as it is while they live. They are copied when they are written to.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from kernelkit.call.tensors import device_of, require_type
from kernelkit.compile.outside import FileError
from q8_0.api import repack
from q8_0.blocks import INTERLEAVED, blocks_of
from q8_0.launch import require_layout
from q8_0.weights import Weights

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4  # as ggml has it
MAX_NAME = 1 << 16  # bytes
_ALIGNMENT, _LEAST_ALIGNMENT, _ALIGNMENT_KEY = 32, 8, "general.alignment"
_U32, _STRING, _ARRAY = 4, 8, 9  # types of values
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of the others
_MAX_DEPTH = 4  # arrays in arrays

Formats = Mapping[int, tuple[str, int, int]]  # code -> name, elements of a block, bytes of a block


@dataclass(frozen=True)
class Entry:
    """A tensor of a file.

    format: GGUF's name
    dims: sizes, the contiguous dimension first
    start, nbytes: position and size in the file
    """

    format: str
    dims: tuple[int, ...]
    start: int
    nbytes: int


class _Cursor:
    """A place in the bytes of a file, which only moves within them."""

    def __init__(self, file: str, data: memoryview) -> None:
        self.file, self.data, self.at = file, data, 0

    def fail(self, reason: str) -> FileError:
        return FileError(f"{self.file} is not a GGUF file: {reason}")

    def skip(self, what: str, nbytes: int) -> int:
        """Go on behind so many bytes; where they began."""
        start, left = self.at, len(self.data) - self.at
        if nbytes > left:
            raise self.fail(f"{what} at byte {start} takes {nbytes} bytes, {left} are left")
        self.at += nbytes
        return start

    def u32(self, what: str) -> int:
        (value,) = struct.unpack_from("<I", self.data, self.skip(what, 4))
        return int(value)

    def u64(self, what: str) -> int:
        (value,) = struct.unpack_from("<Q", self.data, self.skip(what, 8))
        return int(value)

    def name(self, what: str) -> str:
        nbytes = self.u64(f"the length of {what}")
        if nbytes > MAX_NAME:
            raise self.fail(f"{what} has {nbytes} bytes, at most {MAX_NAME}")
        start = self.skip(what, nbytes)
        try:
            return str(self.data[start : self.at], "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error}") from error


def read_table(file: str, data: memoryview, formats: Formats) -> dict[str, Entry]:
    """Return the tensors of a file by name, in its order. Raises FileError that names the file and
    the field."""
    cursor = _Cursor(file, data)
    _check_version(cursor)
    tensors, values = cursor.u64("the number of tensors"), cursor.u64("the number of values")
    alignment, keys = _ALIGNMENT, set()
    for number in range(values):
        key = cursor.name(f"the key of value {number}")
        if key in keys:
            raise cursor.fail(f"key {key!r:.80} appears twice")
        keys.add(key)
        kind = cursor.u32(f"the type of {key!r:.80}")
        if key == _ALIGNMENT_KEY:
            alignment = _alignment(cursor, kind)
        else:
            _skip_value(cursor, f"value {key!r:.80}", kind, 0)
    found: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for number in range(tensors):
        name = cursor.name(f"the name of tensor {number}")
        if name in found:
            raise cursor.fail(f"tensor {name!r:.80} appears twice")
        found[name] = _tensor(cursor, f"tensor {name!r:.80}", formats, alignment)
    base = cursor.at + -cursor.at % alignment
    for name, (_, _, offset, nbytes) in found.items():
        cursor.at = min(base + offset, len(data))
        cursor.skip(f"tensor {name!r:.80}", nbytes)
    return {
        name: Entry(kind, dims, base + offset, nbytes)
        for name, (kind, dims, offset, nbytes) in found.items()
    }


def _check_version(cursor: _Cursor) -> None:
    if bytes(cursor.data[cursor.skip("the magic", 4) : cursor.at]) != MAGIC:
        raise cursor.fail("GGUF magic invalid")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version:
        raise FileError(f"{cursor.file} is big-endian, only little-endian files are supported")
    if version not in VERSIONS:
        raise cursor.fail(f"version {version}, expected one of {VERSIONS}")


def _alignment(cursor: _Cursor, kind: int) -> int:
    value = cursor.u32(_ALIGNMENT_KEY) if kind == _U32 else 0
    if value < _LEAST_ALIGNMENT or value & (value - 1):
        wanted = f"a power of two from {_LEAST_ALIGNMENT} on"
        raise cursor.fail(f"{_ALIGNMENT_KEY} is {value} of type {kind}, expected {wanted}")
    return value


def _skip_value(cursor: _Cursor, what: str, kind: int, depth: int) -> None:
    if kind in _SIZES:
        cursor.skip(what, _SIZES[kind])
    elif kind == _STRING:
        cursor.skip(what, cursor.u64(f"the length of {what}"))
    elif kind == _ARRAY and depth < _MAX_DEPTH:
        inner, count = cursor.u32(f"the type of {what}"), cursor.u64(f"the length of {what}")
        if inner in _SIZES:
            cursor.skip(what, count * _SIZES[inner])
            return
        for _ in range(count):  # each takes at least the 8 bytes of its length
            _skip_value(cursor, what, inner, depth + 1)
    else:
        raise cursor.fail(f"{what} has type {kind} at depth {depth}, which is not supported")


def _tensor(
    cursor: _Cursor, what: str, formats: Formats, alignment: int
) -> tuple[str, tuple[int, ...], int, int]:
    """(format, dims, offset behind the table, bytes)."""
    rank = cursor.u32(f"the rank of {what}")
    if rank > MAX_DIMS:
        raise cursor.fail(f"{what} has {rank} dimensions, at most {MAX_DIMS}")
    dims = tuple(cursor.u64(f"the dimensions of {what}") for _ in range(rank))
    if 0 in dims:
        raise cursor.fail(f"{what} has dimensions {dims}, at least 1 each")
    code = cursor.u32(f"the format of {what}")
    if code not in formats:
        raise cursor.fail(f"{what} has unknown format {code}")
    kind, block, nbytes = formats[code]
    if dims and dims[0] % block:
        raise cursor.fail(f"{what} has rows of {dims[0]} elements, {kind} has blocks of {block}")
    offset = cursor.u64(f"the offset of {what}")
    if offset % alignment:
        raise cursor.fail(f"{what} has offset {offset}, not a multiple of {alignment}")
    return kind, dims, offset, prod(dims) // block * nbytes


FORMAT = "Q8_0"
PLAIN = {"F32": torch.float32, "F16": torch.float16}  # GGUF's name -> dtype


class NoSuchTensor(KeyError, ValueError):
    """A file has no tensor of that name."""

    __str__ = Exception.__str__


class GgufFile:
    """A GGUF file of this machine's byte order.

    ImportError without the package gguf; FileNotFoundError, and a ValueError that names the field
    for what is not a GGUF file, is damaged, or has the other byte order.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"path is {path!r}, expected str or os.PathLike")
        package = _gguf()
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: no such file")
        if not self.path.stat().st_size:
            raise FileError(f"{self.path} is not a GGUF file: it is empty")
        # A private mapping: torch wants memory that may be written to.
        self._data = np.memmap(self.path, mode="c")
        sizes = package.GGML_QUANT_SIZES.items()
        formats = {int(kind): (kind.name, *size) for kind, size in sizes}
        self._tensors = read_table(str(self.path), self._data.data, formats)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the file's order."""
        return tuple(self._tensors)

    def format_of(self, name: str) -> str:
        """Return GGUF's name of a tensor's format: 'Q8_0', 'F32', 'Q4_K', ..."""
        return self._find(name).format

    def weights(
        self,
        name: str,
        *,
        layout: str = INTERLEAVED,
        device: torch.device | str = "cpu",
        backend: str = "auto",
        arch: str | None = None,
    ) -> Weights:
        """A matrix [rows, cols] in Q8_0; rows are GGUF's second dimension.

        layout: 'interleaved' is the file's own, 'soa' is repacked on `device`, by one launch.
        backend, arch: of that launch. NoSuchTensor, a KeyError and a ValueError, for a name that
        the file does not have, NotImplementedError for another format, by its name, or another
        rank.
        """
        require_layout(layout)
        tensor = self._find(name)
        if tensor.format != FORMAT:
            raise NotImplementedError(
                f"{name} is in {tensor.format}: only {FORMAT} is read as weights"
            )
        if len(tensor.dims) != 2:
            shape = [*tensor.dims]
            raise NotImplementedError(f"{name} has dimensions {shape}, expected a matrix")
        cols, rows = tensor.dims
        blocks_of(cols)
        data = self._bytes(tensor).view(rows, -1).to(device_of(device))
        return repack(Weights(data, rows, cols, INTERLEAVED), layout, backend=backend, arch=arch)

    def numbers(self, name: str, *, device: torch.device | str = "cpu") -> torch.Tensor:
        """A tensor of plain numbers, a bias or a norm, in the file's dtype, dimensions as torch
        orders them. NotImplementedError for other formats."""
        tensor = self._find(name)
        if tensor.format not in PLAIN:
            formats = ", ".join(PLAIN)
            raise NotImplementedError(f"{name} is in {tensor.format}, expected one of {formats}")
        numbers = self._bytes(tensor).view(PLAIN[tensor.format])
        return numbers.view(tensor.dims[::-1]).to(device_of(device))

    def _bytes(self, tensor: Entry) -> torch.Tensor:
        """uint8, a view of the file."""
        return torch.from_numpy(self._data[tensor.start : tensor.start + tensor.nbytes])

    def _find(self, name: str) -> Entry:
        require_type("name", name, str)
        if name not in self._tensors:
            raise NoSuchTensor(
                f"{self.path} has no tensor {name!r}, it has {len(self._tensors)} others"
            )
        return self._tensors[name]


def _gguf() -> ModuleType:
    """The package gguf, which only files need."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError("GGUF files need gguf: pip install gguf") from error
    return gguf
