"""nsight.py from outside, times and the names in profilers; tests that need a GPU are marked
`hw`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from examples.gpt_oss import __main__ as gpt_oss
from fmha import AttentionConfig
from fmha.launch import ARCHS, compile_attention
from gqa_lowlatency.config import DecodeConfig
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.names import kernel_name
from lab.commands import RUN
from lab.house.source import ROOT
from lab.measure.timing import cold_and_warm, figures, setting
from lab.problems.steps import problems_of
from lab.verbs import nsight
from lab.verbs.nsight import EXAMPLE, HEADLINES, KERNELS, LINE_INFO, NAMES, OURS, SECTIONS
from moe.config import GroupedConfig
from moe.mixed.config import MixedConfig


@pytest.mark.parametrize("tool", ["ncu", "nsys"])
def test_profile_prints_what_to_run_elsewhere(tool, monkeypatch, run, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(ROOT)
    shape = ("--shape", "1,128,128,1,1")
    result = run("nsight.py", "fmha", "--tool", tool, "--", *shape)
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("env "))
    command = shlex.split(line)
    assert command[:4] == ["env", "CUTE_DSL_LINEINFO=1", "BLACKWELL_KERNELS_NVTX=1", tool]
    assert command[-4:] == ["--backend", "cuda", *shape]
    assert command[-6:-4] == ["scripts/run.py", "fmha"]
    if tool == "ncu":
        assert f"regex:{KERNELS['fmha']}" in command
        assert command.count("--section") >= 10
        assert "--import-source" in command
        details, source = result.stdout.splitlines()[-2:]
        assert "--import out/profile/fmha.ncu-rep --page details" in details
        assert "--page source" in source
    else:
        assert "--trace=cuda,nvtx,osrt" in command


@pytest.mark.parametrize("kernel", [name for name in NAMES if name != EXAMPLE])
def test_profile_gives_flags_that_exist(kernel):
    parser = RUN[kernel].parser("run.py")
    flags = [*shlex.split(HEADLINES.get(kernel, "")), "--backend", "cuda"]
    options = parser.parse_args(flags)
    assert options.backend == "cuda"
    if "family" in options:  # refuses a command without a problem as well as one that is too large
        problems_of(options.family, options.steps, options.rows, options.hidden, options.names)


def test_a_headline_of_the_example_is_one_of_its_own(capsys, monkeypatch, tmp_path):
    """The default headline applies without flags; given flags replace it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    wanted = shlex.split(HEADLINES[EXAMPLE])
    assert gpt_oss.parser().parse_args(wanted).model == "20b"
    for given, flags in ([], wanted), (["--", "--model", "tiny"], ["--model", "tiny"]):
        assert nsight.main([EXAMPLE, *given]) == 0
        (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("env "))
        assert line.endswith(shlex.join(["-m", "examples.gpt_oss", *flags]))
        assert f"regex:{OURS}" in shlex.split(line)


PAGE = (ROOT / "docs" / "profiling.md").read_text()


def test_the_page_on_profiling_names_kernels_as_they_are_called():
    names = re.findall(r"^    (\w+_sm\d+\w*_0)$", PAGE, re.MULTILINE)
    assert len(names) == 4
    for name in names:
        assert any(re.search(pattern, name) for pattern in KERNELS.values()), name
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {})


def test_commands_of_the_page_on_profiling(capsys):
    commands = re.findall(r"python scripts/nsight.py (?!table)([^#`\n]+)", PAGE)
    assert len(commands) == 7
    for command in commands:
        assert nsight.main(shlex.split(command.replace(" -- ", " --print -- ", 1))
                           + ["--print"] * (" -- " not in command)) == 0  # fmt: skip
    assert nsight.RANGES in PAGE
    assert capsys.readouterr().out


@dataclass(frozen=True)
class Plain:
    """A config without fields."""


def sources() -> list[str]:
    """List the modules that kernels are compiled from."""
    packages = ("fmha", "gqa_lowlatency", "kernelkit", "kvcache", "mla", "moe", "q8_0")
    files = [path for name in packages for path in (ROOT / name).rglob("*.py")]
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in files
        if re.search(r"^def host_function", path.read_text(), re.MULTILINE)
    ]


def test_a_profiler_knows_the_names_that_kernels_have():
    """Each pattern matches existing kernels."""
    configs = [AttentionConfig(), DecodeConfig(), MixedConfig(), GroupedConfig()]
    names = [kernel_name(KernelKey("a.kernel", config, "sm_90a")) for config in configs]
    labels = [("moe_route",), ("moe_route_tokens",), ("moe_combine",), ("fmha_merge",)]
    names += [f"{name}_sm90" for (name,) in labels]
    names += [kernel_name(KernelKey(source, Plain(), "sm_100a")) for source in sources()]
    for pattern in KERNELS.values():
        assert any(re.search(pattern, name) for name in names), pattern


@pytest.mark.parametrize("arch", ARCHS)
def test_the_profiled_name_is_in_the_symbol_of_the_kernel(arch):
    ptx = compile_attention(AttentionConfig(), arch).ptx
    (symbol,) = re.findall(r"\.entry (\w+)", ptx)
    assert re.search(KERNELS["fmha"], symbol)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_profiled_kernel_knows_its_lines_of_python(arch, tmp_path, whole_ptxas):
    """The test runs in a fresh process, since the DSL reads the setting when it is imported."""
    flags = ("--head-dim", "64", "--arch", arch, "--out", str(tmp_path))
    name, _, value = LINE_INFO.partition("=")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), name: value}
    command = [sys.executable, "scripts/dump.py", "fmha", *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (ptx,) = (path.read_text() for path in tmp_path.glob("*.ptx"))
    files = dict(re.findall(r'^\s*\.file\s+(\d+) "([^"]+)"', ptx, re.MULTILINE))
    named = {files[number] for number in re.findall(r"^\s*\.loc\s+(\d+)", ptx, re.MULTILINE)}
    assert any(path.endswith("softmax.py") for path in named)
    assert all(Path(path).is_file() for path in named)


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
