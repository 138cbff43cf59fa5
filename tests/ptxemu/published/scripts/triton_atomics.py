"""Triton: a histogram, a sum, a maximum and a lock of 8 blocks, by atomics."""

import torch
import triton
import triton.language as tl
from judged import report


@triton.jit
def counts(x, bins, total, largest, lock, guarded, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + place, mask=place < n, other=0)
    tl.atomic_add(bins + values, 1, mask=place < n)
    tl.atomic_add(total, tl.sum(values.to(tl.float32)))
    tl.atomic_max(largest, tl.max(values))
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    before = tl.load(guarded, volatile=True)  # by all warps, while one of them stores
    tl.debug_barrier()
    tl.store(guarded, before + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


torch.manual_seed(0)
x = torch.randint(0, 16, (1000,), device="cuda", dtype=torch.int32)
bins, largest, lock, guarded = (
    torch.zeros(size, device="cuda", dtype=torch.int32) for size in (16, 1, 1, 1)
)
total = torch.zeros(1, device="cuda")
counts[(8,)](x, bins, total, largest, lock, guarded, 1000, BLOCK=128)
report(
    (bins, x.long().bincount(minlength=16)),
    (total, x.sum().view(1)),
    (largest, x.max().view(1)),
    (guarded, torch.tensor([8])),
)
