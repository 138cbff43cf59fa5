"""flash-msa: which two blocks of 128 keys each of 384 queries attends to."""

import torch
from flash_msa.msa_select_cutedsl import select_blocks
from judged import report

HEADS, TOKENS, DIM, BLOCK = 2, 384, 128, 128

torch.manual_seed(0)
q = torch.randn(1, HEADS, TOKENS, DIM, device="cuda", dtype=torch.bfloat16)
k = torch.randn(1, 1, TOKENS, DIM, device="cuda", dtype=torch.bfloat16)
blocks = TOKENS // BLOCK
found = select_blocks(q, k, scale=DIM**-0.5, num_blocks=blocks, top_k_blocks=2)

scores = q.float() @ k.float().transpose(-1, -2) * DIM**-0.5
future = torch.ones(TOKENS, TOKENS).triu(1).bool().to(q.device)
best = scores.masked_fill(future, float("-inf")).view(1, HEADS, TOKENS, blocks, BLOCK).amax(-1)
query = torch.arange(TOKENS)
best[:, :, query, query // BLOCK] = float("inf")  # a query's own block is always among them
values, indices = best.topk(2)
right = torch.where(values > float("-inf"), indices, blocks)  # one block is no block: the count
report((found.long().sort(-1).values, right.sort(-1).values))
