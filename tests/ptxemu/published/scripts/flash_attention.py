"""FlashAttention 4: causal attention over 128 tokens, 2 heads of 64, bf16."""

import torch
from flash_attn.cute import flash_attn_func
from judged import report

torch.manual_seed(0)
q, k, v = (torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
out = flash_attn_func(q, k, v, causal=True)
out = out[0] if isinstance(out, tuple) else out
rows = (x.double().transpose(1, 2) for x in (q, k, v))
right = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True)
report((out, right.transpose(1, 2)))
