"""Products whose sums are made as tensor cores make them: for references, in torch, on any device.

A step takes 16 products of 16-bit numbers, which are exact, and what has been summed before. All of
these are cut off 25 bits below the largest exponent among them and added exactly, and the sum is
cut off to fp32. So every step errs towards zero, by bits of its largest term and not of the result,
which is several times what fp32 sums lose that round to nearest. Of e4m3 a step takes 32 products,
and both cuts leave 13 bits. An H100 was measured, of Blackwell 25 bits of all types are a claim of
MMA-Sim (docs/ptxemu/checker.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Sums(NamedTuple):
    """Rounding of sums of products in one dtype.

    step: elements of K of an MMA
    bits: bits that a term keeps below the largest exponent
    kept: bits of a sum below its leading bit
    least: exponent of the least normal number
    """

    step: int
    bits: int
    kept: int
    least: int


SUMS = {
    torch.bfloat16: Sums(16, 25, 23, -126),
    torch.float16: Sums(16, 25, 23, -14),
    torch.float8_e4m3fn: Sums(32, 13, 13, -6),
}
AT_ONCE = 1 << 24  # terms in memory
_BIAS, _FRACTION = 1023, 52  # of fp64
_MOST = 512  # an exponent beyond those of all products
_NOTHING = -2048  # the exponent of zero, which moves nobody


def aligned_product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A B, fp32 [.., m, n], of a [.., m, k] and b [.., k, n] whose numbers are of `dtype`, one of
    `SUMS`. Steps go along k. Bit for bit as measured, but below fp32's normal numbers."""
    by_column = a.double().movedim(-1, 0).contiguous()
    by_row = b.double().movedim(-2, 0).contiguous()
    most = max(AT_ONCE // max(SUMS[dtype].step * by_row[:1].numel(), 1), 1)
    parts = [_some_rows(part, by_row, dtype) for part in by_column.split(most, dim=-1)]
    return torch.cat(parts, dim=-2).float()


def _some_rows(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64 [.., m, n] with numbers of fp32, of a [k, .., m] and b [k, .., n]."""
    a, b = a[..., None], b[..., None, :]
    of_a, of_b = _exponents(a, dtype), _exponents(b, dtype)
    total = a.new_zeros(torch.broadcast_shapes(a.shape[1:], b.shape[1:]))
    how = SUMS[dtype]
    for first in range(0, len(a), how.step):
        step = slice(first, first + how.step)
        top = torch.maximum((of_a[step] + of_b[step]).amax(0), _stored_exponents(total) - _BIAS)
        shift = how.bits - top.clamp(-_MOST, _MOST)
        scale = _power(shift)
        whole = (a[step] * b[step]).mul_(scale).trunc_().sum(0) + (total * scale).trunc_()
        total = whole * _power(-shift)
        total = (total.view(torch.int64) & -1 << _FRACTION - how.kept).view(torch.float64)
    return total


def _exponents(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int16; subnormal numbers of `dtype` have its least one."""
    found = (_stored_exponents(values) - _BIAS).clamp_min(SUMS[dtype].least)
    return found.masked_fill(values == 0, _NOTHING).to(torch.int16)


def _stored_exponents(values: torch.Tensor) -> torch.Tensor:
    """Return the biased fp64 exponents; 0 for 0."""
    return values.view(torch.int64) >> _FRACTION & 2 * _BIAS + 1


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """2 to the power of each int64, fp64."""
    return (exponents + _BIAS << _FRACTION).view(torch.float64)
