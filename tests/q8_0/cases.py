"""Matrices in Q8_0 that are hostile by default, the same one in both layouts.

The kinds of blocks alternate: random, scales of 0 of both signs, subnormal, the largest and, unless
the matrix is calm, infinities and NaN with several payloads; quants of -128, of 0, of both ends.
Interleaved data lie in a wider tensor of 0xFF, every row at an odd multiple of 2 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from q8_0 import Activations, Weights, reference
from q8_0.blocks import BLOCK, INTERLEAVED, SOA

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BESIDE = 6  # bytes of 0xFF before a row: rows begin at odd multiples of 2 bytes
# Bits of fp16: infinities, quiet and signalling NaN, with payloads.
ODD_SCALES = (0x7C00, 0xFC00, 0x7E00, 0x7D01, 0xFE5A, 0x7FFF)
EDGE_SCALES = (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x7BFF, 0xFBFF)


@dataclass(frozen=True)
class Matrix:
    """A matrix of rows x cols.

    calm: every scale is an ordinary number, so that sums can be compared with fp64.
    place: 'apart' if rows of interleaved data are not contiguous.
    """

    rows: int
    cols: int
    calm: bool = True
    place: str = "apart"

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}{'' if self.calm else '-odd'}-{self.place}"

    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (quants, scales)."""
        generator = torch.Generator().manual_seed(self.rows * 1000 + self.cols)
        shape = self.rows, self.cols // BLOCK
        quants = torch.randint(-128, 128, (*shape, BLOCK), generator=generator, dtype=torch.int8)
        scales = (torch.randn(shape, generator=generator) * 0.02).half()
        kinds = torch.randint(12, shape, generator=generator)
        quants[kinds == 1] = -128
        quants[kinds == 2] = 0
        quants[kinds == 3] = torch.tensor([-128, 127], dtype=torch.int8).repeat(BLOCK // 2)
        bits = scales.view(torch.int16)
        for kind, choices in ((4, EDGE_SCALES[:5] if self.calm else EDGE_SCALES), (5, ODD_SCALES)):
            if kind == 5 and self.calm:
                continue
            picks = torch.tensor(choices)[torch.randint(len(choices), shape, generator=generator)]
            bits[kinds == kind] = picks[kinds == kind].short()
        return quants.view(self.rows, self.cols), scales

    def both(self, device: str = "cpu") -> dict[str, Weights]:
        """Return the same weights by layout."""
        quants, scales = (part.to(device) for part in self.parts())
        blocks = reference.packed(quants, scales, INTERLEAVED)
        if self.place == "apart":
            blocks = apart(blocks)
        return {INTERLEAVED: blocks, SOA: reference.packed(quants, scales, SOA)}

    def numbers(self, tokens: int, dtype: str, device: str = "cpu") -> torch.Tensor:
        """Activations, a view of a wider tensor of NaN; magnitudes differ from block to block."""
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, self.cols, generator=generator)
        x *= torch.exp2(torch.randint(-6, 6, (1, self.cols // BLOCK), generator=generator)
                        .float()).repeat_interleave(BLOCK, 1)  # fmt: skip
        wide = torch.full((tokens, self.cols + 32), torch.nan, dtype=DTYPES[dtype], device=device)
        wide[:, 16:-16] = x.to(device)
        return wide[:, 16:-16]

    def activations(self, tokens: int, device: str = "cpu") -> Activations:
        """Activations in Q8_1."""
        return reference.quantise(self.numbers(tokens, "fp32", device))


def apart(weights: Weights) -> Weights:
    """Copy interleaved weights into rows of a wider tensor."""
    rows, nbytes = weights.data.shape
    wide = weights.data.new_full((rows, nbytes + 2 * BESIDE), 0xFF)
    inner = wide[:, BESIDE : BESIDE + nbytes]
    inner.copy_(weights.data)
    return Weights(inner, weights.rows, weights.cols, INTERLEAVED)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View as integers, so that NaN and zeros of both signs compare."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are equal; any NaN equals any other."""
    nan = one.isnan() & other.isnan() if one.is_floating_point() else torch.zeros_like(one).bool()
    return one.dtype == other.dtype and bool(((bits(one) == bits(other)) | nan).all())
