"""mjolnir-kernel: decoding of two requests of 40 and 100 tokens over a paged FP8 cache."""

import torch
from judged import report
from mjolnir.runner import T5DecodeRunner

HEADS, KV_HEADS, DIM, PAGE, LENGTHS = 8, 2, 128, 16, [40, 100]

torch.manual_seed(0)
k, v = (
    torch.randn(16, PAGE, KV_HEADS, DIM, device="cuda").to(torch.float8_e4m3fn) for _ in range(2)
)
tables = torch.arange(16, dtype=torch.int32, device="cuda").view(2, 8)
lengths = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
q = torch.randn(2, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
out, one = torch.empty_like(q), torch.ones(1, device="cuda")

runner = T5DecodeRunner(
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_size=DIM,
    page_size=PAGE,
    out_dtype=torch.bfloat16,
    max_num_seqs=2,
    q_mode="bf16",
)
runner.run(runner.plan(LENGTHS, 2, 1, tables, lengths), q, out, k, v, one, one, DIM**-0.5)


def rows_of(cache: torch.Tensor, request: int) -> torch.Tensor:
    rows = cache[tables[request].long()].double().reshape(-1, KV_HEADS, DIM)[: LENGTHS[request]]
    return rows.repeat_interleave(HEADS // KV_HEADS, 1)


pairs = []
for request in range(2):
    keys, values = rows_of(k, request), rows_of(v, request)
    scores = torch.einsum("hd,nhd->hn", q[request].double(), keys) * DIM**-0.5
    pairs.append((out[request], torch.einsum("hn,nhd->hd", scores.softmax(-1), values)))
report(*pairs)
