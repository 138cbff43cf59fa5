"""The product's definition in torch, rounded as the kernel rounds: the same bits."""

from __future__ import annotations

import torch

from q8_0.activations import Activations
from q8_0.blocks import BLOCK
from q8_0.reference import unpacked
from q8_0.weights import Weights


def product(
    weights: Weights, x: Activations, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[tokens, rows], see `q8_0.product.launch.product`."""
    quants, scales = (part.double() for part in unpacked(weights))
    x_quants, x_scales = x.quants.double(), x.scales.double()
    x_scales = torch.where(x_scales.isinf(), torch.nan, x_scales)
    total = torch.zeros(x.tokens, weights.rows, device=x.quants.device)
    for block in range(weights.blocks):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        integers = x_quants[:, columns] @ quants[:, columns].T
        scaled = (integers * x_scales[:, block, None]).float()
        total = fused(scaled.double(), scales[None, :, block], total.double())
    return (total if bias is None else total + bias.float()).to(out_dtype)


def fused(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """x y + z, rounded to fp32 once. All are fp64 of fp32 numbers, x and y with few enough bits
    that fp64 has their product.

    The sum in fp64 may lie half-way between two fp32 numbers where the exact one does not. So it is
    rounded to odd first: where something was cut off, its last bit is 1.
    """
    product = x * y
    total = product + z
    shift = total - product
    lost = (product - (total - shift)) + (z - shift)
    even = total.view(torch.int64) & 1 == 0
    towards = torch.where(lost > 0, torch.inf, -torch.inf).double()
    inexact = (lost != 0) & lost.isfinite() & even
    return torch.where(inexact, torch.nextafter(total, towards), total).float()
