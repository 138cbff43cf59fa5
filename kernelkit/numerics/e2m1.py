"""Numbers of 4 bits, e2m1, in plain torch: codes of fp32, and two of them to a byte."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGN = 8
NAN_CODE = 7  # what cvt makes of one; there is no NaN


def codes_of(x: torch.Tensor) -> torch.Tensor:
    """cvt.rn.satfinite.e2m1x2.f32, a code in each byte: as many as there are values below |x|."""
    code = torch.bucketize(x.abs().contiguous(), _middle(x.device), out_int32=True)
    code = code.to(torch.uint8)
    code = code | torch.signbit(x).to(torch.uint8) * SIGN
    return code.masked_fill(x.isnan(), NAN_CODE)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [..., K] as uint8 [..., K / 2], the even element in the low bits."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).contiguous()


def values_of(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of codes."""
    return _values(codes.device)[codes.long()]


def unpacked(data: torch.Tensor) -> torch.Tensor:
    """fp32 values [..., K] of `packed` ones."""
    return values_of(torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2))


# Made once for a device, so that a graph which captures the second use copies nothing.


@cache
def _middle(device: torch.device) -> torch.Tensor:
    """Return midpoints of neighbouring codes. Ties round to even, so the midpoint below an even
    code counts as above it."""
    between = [(low + high) / 2 for low, high in pairwise(VALUES)]
    middle = torch.tensor(between, dtype=torch.float32)
    middle[1::2] = torch.nextafter(middle[1::2], torch.zeros_like(middle[1::2]))
    return middle.to(device)


@cache
def _values(device: torch.device) -> torch.Tensor:
    every = [*VALUES, *(-v for v in VALUES)]
    return torch.tensor(every, dtype=torch.float32, device=device)
