"""Helion: an addition and a product of bf16 matrices, untuned."""

import helion
import helion.language as hl
import torch
from judged import report


@helion.kernel(autotune_effort="none")
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(out.size()):
        out[tile] = x[tile] + y[tile]
    return out


@helion.kernel(autotune_effort="none")
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    m, k = a.size()
    k, n = b.size()
    out = torch.empty([m, n], dtype=torch.float32, device=a.device)
    for rows, columns in hl.tile([m, n]):
        sums = hl.zeros([rows, columns], dtype=torch.float32)
        for part in hl.tile(k):
            sums = torch.addmm(sums, a[rows, part], b[part, columns])
        out[rows, columns] = sums
    return out


torch.manual_seed(0)
x, y = (torch.randn(64, 128, device="cuda") for _ in range(2))
a, b = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
report((add(x, y), x + y), (product(a, b), a.double() @ b.double()))
