"""GGUF files: matrices in Q8_0 by name, mapped into memory, and the plain numbers beside them.

`q8_0.gguf_table` reads the file's table of contents. Names of formats and sizes of their blocks are
those of the package gguf (`pip install gguf`, the extra `gguf`), which is imported here, when a
file is opened. Tensors are views of the mapped file: what is not asked for is not read, and the
file must stay as it is while they live. They are copied when they are written to.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from kernelkit.call.tensors import device_of, require_type
from kernelkit.compile.outside import FileError
from q8_0.api import repack
from q8_0.blocks import INTERLEAVED, blocks_of
from q8_0.gguf_table import Entry, read_table
from q8_0.launch import require_layout
from q8_0.weights import Weights

FORMAT = "Q8_0"
PLAIN = {"F32": torch.float32, "F16": torch.float16}  # GGUF's name -> dtype


class NoSuchTensor(KeyError, ValueError):
    """A file has no tensor of that name."""

    __str__ = Exception.__str__


class GgufFile:
    """A GGUF file of this machine's byte order.

    ImportError without the package gguf; FileNotFoundError, and a ValueError that names the field
    for what is no GGUF file, is damaged, or has the other byte order.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"path is {path!r}, expected str or os.PathLike")
        package = _gguf()
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: no such file")
        if not self.path.stat().st_size:
            raise FileError(f"{self.path} is no GGUF file: it is empty")
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
        """What GGUF calls a tensor's numbers: 'Q8_0', 'F32', 'Q4_K', ..."""
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
            raise NotImplementedError(f"{name} has dimensions {shape}: matrices alone are read")
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
            raise NotImplementedError(f"{name} is in {tensor.format}: plain numbers are {formats}")
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
