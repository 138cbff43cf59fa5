"""`Activations`: rows of numbers rounded to int8 in blocks of 32, as integer products take them.

ggml calls the format Q8_1. Its blocks also hold s = d * sum(q), which serves weights with a
minimum; Q8_0 has none, so that no s is stored here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernelkit.call.tensors import require_memory, require_strided, require_tensors
from q8_0.blocks import ALIGN, BLOCK, blocks_of


@dataclass(frozen=True, eq=False)
class Activations:
    """Numbers d * q of `tokens` rows, as `q8_0.quantise` returns them.

    quants: int8 [tokens, cols], contiguous, aligned to 16 bytes
    scales: fp16 [tokens, cols // 32], contiguous

    Raises TypeError or ValueError for other tensors.
    """

    quants: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        require_tensors(quants=self.quants, scales=self.scales)
        if self.quants.is_nested or self.scales.is_nested:
            require_strided(quants=self.quants, scales=self.scales)
        sizes = (*self.quants.shape, *self.scales.shape)
        if any(isinstance(size, torch.SymInt) for size in sizes):
            return  # a tracer's: its sizes are symbolic and cannot be checked
        if self.quants.dtype != torch.int8 or self.quants.ndim != 2:
            raise ValueError(
                f"quants is {self.quants.dtype} {tuple(self.quants.shape)}, expected torch.int8 "
                "[tokens, cols]"
            )
        wanted = (self.tokens, blocks_of(self.cols))
        if self.scales.dtype != torch.float16 or tuple(self.scales.shape) != wanted:
            raise ValueError(
                f"scales is {self.scales.dtype} {tuple(self.scales.shape)}, expected torch.float16 "
                f"{wanted}, one for {BLOCK} of {self.cols} columns"
            )

    @property
    def tokens(self) -> int:
        """Rows."""
        return self.quants.shape[0]

    @property
    def cols(self) -> int:
        """Numbers of a row."""
        return self.quants.shape[1]

    def require_place(self, name: str = "activations") -> None:
        """TypeError or ValueError unless both tensors lie as kernels read them."""
        for part, tensor in (("quants", self.quants), ("scales", self.scales)):
            require_memory(**{f"{name}.{part}": tensor})
            if not tensor.is_contiguous():
                raise ValueError(f"{name}.{part} has strides {tensor.stride()}: not contiguous")
        address = 0 if self.quants.device.type == "meta" else self.quants.data_ptr()
        if address % ALIGN:
            raise ValueError(f"{name}.quants at address {address:#x}: a multiple of {ALIGN}")
