"""QuACK: RMSNorm with a weight, softmax and the largest 8 of each row, rows of 1,024 in bf16."""

import torch
from judged import report
from quack import rmsnorm, softmax
from quack.topk import topk

torch.manual_seed(0)
x = torch.randn(16, 1024, device="cuda", dtype=torch.bfloat16)
weight = torch.randn(1024, device="cuda")
wide = x.double()
norm = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
values, indices = topk(x, 8)
report(
    (rmsnorm(x, weight, eps=1e-6), norm),
    (softmax(x), wide.softmax(-1)),
    (values, wide.topk(8).values),
    (wide.gather(-1, indices.long()), values),
)
