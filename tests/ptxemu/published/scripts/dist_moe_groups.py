"""dist-moe: the grouped product of 4 experts and RMSNorm, bf16, on one GPU."""

import torch
from dist_moe.kernels.grouped_gemm import grouped_gemm_fprop
from dist_moe.kernels.norm.rmsnorm import cute_rmsnorm_fwd
from judged import report

torch.manual_seed(0)
sizes = torch.tensor([128, 0, 40, 88], dtype=torch.int32, device="cuda")
x = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16)
weights = torch.randn(4, 256, 128, device="cuda", dtype=torch.bfloat16)
found = grouped_gemm_fprop(x, weights, sizes, num_sms=4)
parts = x.double().split(sizes.tolist())
right = torch.cat([part @ w.double().T for part, w in zip(parts, weights, strict=True)])

gain = torch.randn(128, device="cuda", dtype=torch.bfloat16)
norm, _ = cute_rmsnorm_fwd(x, gain, eps=1e-6)
wide = x.double()
scale = (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
report((found, right), (norm, wide * scale * gain.double()))
