"""FlashInfer: RMSNorm by its kernels in CuTe DSL, rows of 512 in bf16."""

import torch
from flashinfer.norm import rmsnorm
from judged import report

torch.manual_seed(0)
x = torch.randn(16, 512, device="cuda", dtype=torch.bfloat16)
weight = torch.randn(512, device="cuda", dtype=torch.bfloat16)
wide = x.double()
right = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
report((rmsnorm(x, weight, 1e-6), right))
