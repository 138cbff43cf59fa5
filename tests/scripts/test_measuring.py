"""bench.py fmha and nsight.py from outside; what needs a GPU is marked `hw`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, tools_found
from fmha import AttentionConfig
from fmha.launch import ARCHS, compile_attention
from workbench.bench.fmha import Problem
from workbench.commands import RUN
from workbench.house.source import ROOT
from workbench.nsight import KERNELS, SECTIONS
from workbench.place import why_not_here
from workbench.timing import cold_and_warm, figures, setting


def test_bench_fmha_writes_static_figures(written, tmp_path, whole_ptxas):
    picture = tmp_path / "bench.png"
    flags = "--head-dim 64 --mask causal --shape 1,8,8,1,1 --plot"
    out, document = written(f"bench.py fmha {flags}", picture)
    assert document["setting"]["versions"]["torch"] == torch.__version__
    reason = why_not_here(ARCHS)
    assert reason is None or f"fmha is not timed: {reason}" in out
    if not tools_found():
        assert HOW_TO_GET_TOOLS in out
        return
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    (row,) = document["static"]
    assert row["config"]["right"]
    assert sorted(loop["masked"] for loop in row["loops"]) == [False, True]
    for loop in row["loops"]:
        assert sum(loop["kinds"].values()) == loop["total"]


def test_flops_of_visible_pairs():
    full = Problem(2, 3, 5, 4, 2, 192, 128, "bf16", causal=False)
    assert full.flop == 2 * 4 * 15 * 2 * (192 + 128)
    causal = Problem(2, 3, 5, 4, 2, 192, 128, "bf16", causal=True)
    assert causal.flop == 2 * 4 * (3 + 4 + 5) * 2 * (192 + 128)
    assert Problem(1, 5, 3, 1, 1, 64, 64, "bf16", causal=True).flop == (1 + 2 + 3) * 2 * 128


@pytest.mark.parametrize("tool", ["ncu", "nsys"])
def test_profile_prints_what_to_run_elsewhere(tool, monkeypatch, run, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(ROOT)
    shape = ("--shape", "1,128,128,1,1")
    result = run("nsight.py", "fmha", "--tool", tool, "--", *shape)
    assert result.returncode == 0, result.stderr
    command = shlex.split(result.stdout.splitlines()[-1])
    assert command[:3] == ["env", "CUTE_DSL_LINEINFO=1", tool]
    assert command[-4:] == ["--backend", "cuda", *shape]
    assert command[-6:-4] == ["scripts/run.py", "fmha"]
    if tool == "ncu":
        assert "regex:AttentionSm" in command
        assert command.count("--section") >= 10
    else:
        assert "--trace=cuda,nvtx,osrt" in command


@pytest.mark.parametrize("kernel", RUN)
def test_profile_gives_flags_that_exist(run, kernel):
    assert "--backend {auto,cuda,emulate}" in run("run.py", kernel, "--help").stdout


def test_the_profiled_name_is_in_the_symbol_of_the_kernel():
    ptx = compile_attention(AttentionConfig()).ptx
    (symbol,) = re.findall(r"\.entry (\w+)", ptx)
    assert re.search(KERNELS["fmha"], symbol)


def test_scripts_still_find_the_profile_of_the_standard_library():
    code = "import cProfile, profile; print(profile.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert not result.stdout.startswith(str(ROOT))


@pytest.mark.hw
def test_measure_times_a_product_on_any_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    found = figures(cold_and_warm([lambda: a @ a, lambda: a @ a]))
    assert 2 * 4096**3 / 3e9 < found["warm_us"] < 1e5  # no GPU multiplies bfloat16 at 3 PFLOP/s
    assert found["warm_us"] <= 1.5 * found["cold_us"]
    assert setting()["gpu"]["capability"]


@pytest.mark.hw
def test_ncu_knows_every_section():
    if not shutil.which("ncu"):
        pytest.skip("no ncu")
    listed = subprocess.run(["ncu", "--list-sections"], capture_output=True, text=True).stdout
    assert set(SECTIONS) <= {line.split()[0] for line in listed.splitlines() if line.strip()}
