"""Triton: a running sum and a sort of each row of 256."""

import torch
import triton
import triton.language as tl
from judged import report


@triton.jit
def rows(x, sums, ordered, N: tl.constexpr):
    place = tl.program_id(0) * N + tl.arange(0, N)
    values = tl.load(x + place)
    tl.store(sums + place, tl.cumsum(values, 0))
    tl.store(ordered + place, tl.sort(values))


torch.manual_seed(0)
x = torch.randn(8, 256, device="cuda")
sums, ordered = torch.empty_like(x), torch.empty_like(x)
rows[(8,)](x, sums, ordered, N=256)
report((sums, x.double().cumsum(-1)), (ordered, x.sort(-1).values))
