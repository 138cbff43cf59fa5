"""QuACK: a product of bf16 matrices of 256 x 128 x 192, without autotuning."""

import torch
from judged import report
from quack.gemm_interface import gemm

torch.manual_seed(0)
a = torch.randn(256, 192, device="cuda", dtype=torch.bfloat16)
b = torch.randn(192, 128, device="cuda", dtype=torch.bfloat16)
out = gemm(a, b, out_dtype=torch.float32, tuned=False)
report((out, a.double() @ b.double()))
