"""cuDNN's open kernels in CuTe DSL: a product of bf16 matrices with SwiGLU."""

import torch
from cudnn import gemm_swiglu_wrapper_sm100
from judged import report

M, N, K, BLOCK = 128, 256, 192, 32

torch.manual_seed(0)
a, b = (torch.randn(rows, K, 1, device="cuda", dtype=torch.bfloat16) for rows in (M, N))
a, b = (x.as_strided(x.shape, (K, 1, x.shape[0] * K)) for x in (a, b))
found = gemm_swiglu_wrapper_sm100(a, b)
product = a[..., 0].double() @ b[..., 0].double().T
up, gate = product.view(M, -1, 2, BLOCK).unbind(2)  # blocks of columns of both, alternately
activated = (up * gate * gate.sigmoid()).reshape(M, N // 2)
report(
    (found["ab12_tensor"][..., 0], product),
    (found["c_tensor"][..., 0], activated),
)
