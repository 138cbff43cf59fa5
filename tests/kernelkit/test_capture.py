"""The first call of a process may be captured: an engine captures steps that it never ran."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lab.house.source import ROOT

CODE = """
import torch
from fmha import attention
from gqa_lowlatency import decode
from kvcache import append_pages

torch.manual_seed(0)
def pages(dtype):
    return torch.randn(64, 16, 8, 64, device="cuda").to(dtype)

q = torch.randn(4, 1, 64, 64, device="cuda").bfloat16()
k, v = pages(torch.bfloat16), pages(torch.bfloat16)
new = torch.randn(4, 8, 64, device="cuda").bfloat16()
table = torch.arange(64, device="cuda", dtype=torch.int32).view(4, 16)
lens = torch.full((4,), 200, device="cuda", dtype=torch.int32)
slots = torch.arange(4, device="cuda") * 256 + 199
starts = torch.arange(5, device="cuda", dtype=torch.int32)

def step():
    append_pages(k, v, new, new, slots)
    o = decode(q, k, v, kv_lens=lens, page_table=table, max_kv_len=256)
    packed = attention(q[:, 0], k, v, causal=True, kv_lens=lens, page_table=table,
                       cu_seqlens_q=starts, max_seqlen_q=1)
    return o, packed

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = step()
graph.replay()
torch.cuda.synchronize()
for eager, replayed in zip(step(), captured, strict=True):
    assert torch.equal(eager, replayed)
print("replayed")
"""


@pytest.mark.hw
@pytest.mark.parametrize("order", ["first", "again"])
def test_a_first_call_in_a_capture(order):
    """Once with kernels that are compiled within the capture, once with those on disk."""
    said = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, env=os.environ, capture_output=True, text=True
    )
    assert "replayed" in said.stdout, said.stderr[-3000:]
