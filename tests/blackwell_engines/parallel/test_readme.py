"""blackwell_engines/parallel/README.md tells the truth: its example runs."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

from fmha import attention
from lab.house.source import ROOT

README = (ROOT / "blackwell_engines" / "parallel" / "README.md").read_text(encoding="utf-8")


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    torch.manual_seed(0)
    try:
        exec(example, names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    q, k, v, whole = (names[name] for name in ("q", "k", "v", "whole"))
    assert torch.equal(whole, attention(q, k, v, causal=True))
    assert names["positions"].tolist() == list(range(40))
