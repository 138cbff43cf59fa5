"""fmha/README.md is true: its plan and its table are current, its examples run."""

from __future__ import annotations

import re

import torch

from fmha import reference
from fmha.config import HEAD_DIMS, SCHEDULES, AttentionConfig
from fmha.plan import make_plan
from lab.house.source import ROOT

README = (ROOT / "fmha" / "README.md").read_text(encoding="utf-8")


def test_readme_shows_the_live_plan(printed):
    headline, body = printed("explain.py").strip().split("\n\n", maxsplit=1)
    assert "head_dim 64" in headline
    assert body in README


def table_row(head_dim: int, v_dim: int) -> str:
    """K + V pieces in the rings, bytes of SMEM and columns of TMEM, in both schedules."""
    cells = []
    for schedule in SCHEDULES:
        config = AttentionConfig(head_dim, v_dim, schedule=schedule)
        try:
            plan = make_plan(config)
        except ValueError:
            cells.append("refused")
            continue
        k_stages, v_stages = plan.layout.stages
        columns = max(item.end for item in plan.tmem.ranges)
        cells.append(f"{k_stages} + {v_stages}, {plan.smem.bytes:,}, {columns}")
    name = f"{head_dim}" if head_dim == v_dim else f"{head_dim}, {v_dim}"
    return f"| {name} | {' | '.join(cells)} |"


def test_readme_shows_the_live_head_dims():
    assert "\n".join(table_row(*dims) for dims in HEAD_DIMS) in README


def test_examples_of_the_readme_run():
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(program, names)
    expected = reference.definition(names["q"], names["k"], names["v"])
    torch.testing.assert_close(names["o"].double(), expected.o, rtol=0, atol=0.02)
    torch.testing.assert_close(names["lse"].double(), expected.lse, rtol=0, atol=0.005)
