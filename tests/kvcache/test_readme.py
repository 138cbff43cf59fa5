"""kvcache/README.md is true: its example runs, its figures are those of the results."""

from __future__ import annotations

import json
import re

import torch

from kvcache import preset
from lab.house.source import ROOT

README = (ROOT / "kvcache" / "README.md").read_text(encoding="utf-8")
MIB = 1 << 20


def test_the_example_runs_and_is_right():
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    torch.manual_seed(0)
    exec(program, names)
    assert names["again"].hit == 32
    q, k, v = (names[name].double() for name in "qkv")
    scores = torch.einsum("hd,shd->hs", q[0, 0], k.repeat_interleave(4, 1)) / 8
    exact = torch.einsum("hs,shd->hd", scores.softmax(-1), v.repeat_interleave(4, 1))
    assert (names["o"][0, 0].double() - exact).abs().max() < 0.02


def test_files_that_it_names_exist():
    for name in re.findall(r"`([a-z0-9_/]+\.py|[a-z0-9_]+/)`", README):
        assert (ROOT / "kvcache" / name).exists() or (ROOT / "scripts" / name).exists(), name


def test_the_table_of_layouts_is_that_of_the_presets():
    rows = re.findall(r"^\| `(deepseek[^`]+)`,? ?([^|]*?) \| (.*) \|$", README, re.MULTILINE)
    assert len(rows) == 6
    for name, option, figures in rows:
        layout = preset(name, **eval(f"dict({option})"))
        sizes = (layout.state_bytes, layout.checkpoint_bytes)
        shown = [f"{layout.bytes_per_token:,.0f}", f"{layout.block_bytes:,}"]
        shown += [f"{size / MIB:.2f} MiB" if size else "-" for size in sizes]
        assert figures.split(" | ") == shown, name


def test_the_table_of_kernels_is_that_of_the_results(printed):
    (table,) = re.findall(r"^\| step \| 1 \|.*?\n\n", README, re.MULTILINE | re.DOTALL)
    results = ROOT / "results" / "kvcache_h100.json"
    shown = printed("bench.py kvcache --show", results, "--markdown")
    left_out = ("pinned", "fp8_656")
    rows = [r for r in shown.strip().splitlines() if not any(word in r for word in left_out)]
    assert rows == table.strip().splitlines()
    assert json.loads(results.read_text())[0]["date"] in README


def test_the_host_figures_are_those_of_the_results():
    rows = json.loads((ROOT / "results" / "kvcache_host.json").read_text())
    pools = {(row["peer"], row["batch"]): row for row in rows if row["kind"] == "pool"}
    one = {peer: pools[peer, 1]["take_us"] + pools[peer, 1]["give_us"] for peer, _ in pools}
    fast = {peer: pools[peer, 1000]["million_per_s"] for peer, _ in pools}
    text = " ".join(README.split())
    assert f"given back in {one['kvcache']:.2f} us (vLLM {one['vllm']:.2f})" in text
    assert f"at {fast['kvcache']:.1f} million blocks/s ({fast['vllm']:.1f})" in text
    assert f"registered and evicted {fast['kvcache, kept']:.1f}." in text
