"""The definition of everything here, in torch on the CPU or any device, without a kernel.

A weight is d * q, exactly representable in fp32. Products are defined in fp64, and with activations
in Q8_1 their inner sums are integers; `product` rounds as the kernel rounds, to the same bits. A
scale that is no number, or an infinity, makes numbers and sums that are none; which of NaN and the
infinities a sum then is, is not defined.
"""

from __future__ import annotations

import torch

from q8_0.activations import Activations
from q8_0.blocks import BLOCK, BLOCK_BYTES, INTERLEAVED, LEVELS, SCALE_BYTES, SOA
from q8_0.weights import Weights, empty

NAN_BITS = 0x7FFF  # of a scale that the quantiser makes


def unpacked(weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """(quants int8 [rows, cols], scales fp16 [rows, cols / 32]) of either layout."""
    if weights.layout == SOA:
        return weights.quants, weights.scales
    blocks = weights.data.reshape(weights.rows, weights.blocks, BLOCK_BYTES)
    scales = blocks[..., :SCALE_BYTES].contiguous().view(torch.float16).squeeze(-1)
    quants = blocks[..., SCALE_BYTES:].contiguous().view(torch.int8)
    return quants.reshape(weights.rows, weights.cols), scales


def packed(quants: torch.Tensor, scales: torch.Tensor, layout: str) -> Weights:
    """Weights of int8 [rows, cols] and fp16 [rows, cols / 32], bit for bit."""
    rows, cols = quants.shape
    made = empty(rows, cols, layout, quants.device)
    if layout == INTERLEAVED:
        blocks = made.data.view(rows, cols // BLOCK, BLOCK_BYTES)
        blocks[..., :SCALE_BYTES] = (
            scales.contiguous().view(torch.uint8).view(rows, -1, SCALE_BYTES)
        )
        blocks[..., SCALE_BYTES:] = quants.contiguous().view(torch.uint8).view(rows, -1, BLOCK)
    else:
        made.quants.copy_(quants)
        made.scales.view(torch.int16).copy_(scales.contiguous().view(torch.int16))
    return made


def repack(weights: Weights, layout: str) -> Weights:
    """Return the same weights in `layout`."""
    return packed(*unpacked(weights), layout)


def rounded(numbers: torch.Tensor, layout: str) -> Weights:
    """fp32 [rows, cols] in Q8_0 as ggml and the gguf package round: d = amax / 127 in fp32, q by
    1 / d before d is rounded, halves away from zero."""
    rows, cols = numbers.shape
    blocks = numbers.float().reshape(rows, cols // BLOCK, BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True) / LEVELS
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    scaled = blocks * inverse
    quants = (scaled.abs() + 0.5).floor().copysign(scaled)
    return packed(quants.to(torch.int8).reshape(rows, cols), scale.squeeze(-1).half(), layout)


def dequantise(weights: Weights, dtype: torch.dtype) -> torch.Tensor:
    """[rows, cols], each weight rounded once to `dtype`."""
    quants, scales = unpacked(weights)
    blocks = quants.float().reshape(weights.rows, -1, BLOCK) * scales.float()[..., None]
    return blocks.reshape(quants.shape).to(dtype)


def quantise(x: torch.Tensor) -> Activations:
    """[tokens, cols] to int8 in blocks of 32.

    d = amax / 127 in fp32, rounded to fp16; q = x * (1 / d) in fp32, with d as it is stored, to the
    nearest integer, of two to the even one, from -127 to 127. So d * q is as near to x as the
    stored scale allows, also where fp16 has few bits left. Where d is 0, an infinity or NaN, q = 0:
    a block with a NaN or an infinity, or one whose scale fp16 does not hold (amax above 127 *
    65504), makes every product NaN. NaN is 0x7FFF.
    """
    tokens, cols = x.shape
    blocks = x.float().reshape(tokens, cols // BLOCK, BLOCK)
    scales = (blocks.abs().amax(-1) / LEVELS).half()
    bits = torch.where(scales.isnan(), NAN_BITS, scales.view(torch.int16).int()).short()
    stored = scales.float()[..., None]
    held = stored.isfinite() & (stored != 0)
    inverse = torch.where(held, 1.0 / stored, 0.0)
    quants = (blocks * inverse).nan_to_num(0.0).round().clamp(-LEVELS, LEVELS)
    quants = torch.where(held, quants, 0.0)
    return Activations(quants.to(torch.int8).reshape(tokens, cols), bits.view(torch.float16))


def matvec(
    weights: Weights, x: torch.Tensor | Activations, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """fp64 [tokens, rows]: x W^T + bias, x of `Activations` being d * q."""
    quants, scales = unpacked(weights)
    w = (quants.double().reshape(weights.rows, -1, BLOCK) * scales.double()[..., None]).flatten(1)
    numbers = numbers_of(x) if isinstance(x, Activations) else x.double()
    found = numbers @ w.T
    return found if bias is None else found + bias.double()


def numbers_of(x: Activations) -> torch.Tensor:
    """fp64 [tokens, cols]: d * q."""
    blocks = x.quants.double().reshape(*x.scales.shape, BLOCK) * x.scales.double()[..., None]
    return blocks.flatten(1)


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


def product_of_numbers(
    weights: Weights, x: torch.Tensor, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[tokens, rows], with the rounding of `q8_0.numbers.launch.product_of_numbers`: of each weight
    to the dtype of x, and of the result. Its sums are in fp64."""
    found = x.double() @ dequantise(weights, x.dtype).double().T
    return (found if bias is None else found + bias.double()).to(out_dtype)


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
