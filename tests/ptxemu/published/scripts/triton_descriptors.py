"""Triton: a product of fp16 matrices through tensor descriptors made on the device."""

import torch
import triton
import triton.language as tl
from judged import report

M, N, K = tl.constexpr(128), tl.constexpr(64), tl.constexpr(32)  # of a tile


@triton.jit
def product(a, b, c, m, n, k):
    left = tl.make_tensor_descriptor(a, [m, k], [k, 1], [M, K])
    right = tl.make_tensor_descriptor(b, [k, n], [n, 1], [K, N])
    out = tl.make_tensor_descriptor(c, [m, n], [n, 1], [M, N])
    row, column = tl.program_id(0) * M, tl.program_id(1) * N
    sums = tl.zeros((M, N), tl.float32)
    for step in range(0, k, K):
        sums = tl.dot(left.load([row, step]), right.load([step, column]), sums)
    out.store([row, column], sums)


triton.set_allocator(
    lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda")
)
torch.manual_seed(0)
m, n, k = 200, 136, 160  # the last tile of each row and column is not full
a = torch.randn(m, k, device="cuda", dtype=torch.float16)
b = torch.randn(k, n, device="cuda", dtype=torch.float16)
c = torch.empty(m, n, device="cuda")
product[triton.cdiv(m, 128), triton.cdiv(n, 64)](a, b, c, m, n, k)
report((c, a.double() @ b.double()))
