"""fast-trimul: the triangle multiplication of 16 residues, compared with its own form in torch."""

import torch
from fast_trimul import accelerated
from fast_trimul.nn import FastTriangleMultiplication
from judged import report

torch.manual_seed(0)
layer = FastTriangleMultiplication(32, 32).cuda()
pairs = torch.randn(1, 16, 16, 32, device="cuda")
mask = torch.ones(1, 16, 16, device="cuda")
with torch.no_grad():
    with accelerated("cuda"):
        out = layer(pairs, mask)
    with accelerated("torch"):
        right = layer(pairs, mask)
report((out, right))
