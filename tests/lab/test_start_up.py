"""Scripts and packages start at once: slow imports happen on first use."""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab import commands
from lab.flags import attention, bench, steps
from lab.house.source import ROOT
from lab.tools import groups

SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("[a-z]*.py"))
PACKAGES = ["fmha", "gqa_lowlatency", "kvcache", "moe", "q8_0"]
INNER = ["kernelkit.compile", "kernelkit.tune", "mla.compressor", "mla.indexer", "moe.routing"]
HEAVY = {
    "torch",
    "numpy",
    "cutlass",
    "ptxemu.module",
    "matplotlib",
    "rich",
    "kernelkit.call.launch",
}
SECONDS = 1.0  # of CPU; --help takes 0.05 to 0.15, importing torch 2.5


def started(*command: object) -> SimpleNamespace:
    """Run `python COMMAND` in a fresh process; return its code, stdout, stderr, CPU seconds, and
    the modules that it imported."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    lines = done.stderr.splitlines()
    times = [line for line in lines if line.startswith("import time:")]
    error = "\n".join(line for line in lines if not line.startswith("import time:"))
    modules = {line.rpartition("|")[2].strip() for line in times}
    assert "site" in modules  # the report exists, and was parsed
    return SimpleNamespace(
        code=done.returncode, out=done.stdout, err=error, seconds=seconds, modules=modules
    )


def subcommands() -> list[tuple[str, str]]:
    """List (script, name) for every script with subcommands."""
    named = {"run.py": commands.RUN, "bench.py": commands.BENCH, "dump.py": commands.DUMP,
             "explain.py": commands.EXPLAIN, "emulate.py": commands.EMULATE,
             "soak.py": commands.SOAK}  # fmt: skip
    return [
        (script, name)
        for script, names in named.items()
        for name in names
        if name not in steps.STEPS or name == "append"  # steps are alike: one is enough
    ]


@pytest.mark.parametrize("command", [*((name,) for name in SCRIPTS), *subcommands()], ids=" ".join)
def test_help_comes_at_once(command):
    script, *name = command
    found = started(f"scripts/{script}", *name, "--help")
    assert found.code == 0, found.err
    assert found.out.startswith(f"usage: {' '.join(command)}")
    assert not found.modules & HEAVY
    assert found.seconds < SECONDS


@pytest.mark.parametrize(("command", "words"), [
    ("run.py fmha --window x", "'x' is not L or L,R"),
    ("run_gqa.py --kvL many", "'many' is not a list"),
    ("run.py moe --x-scale none", "'none': expected a number, tensor or token"),
    ("run.py kvcache --policy lifo", "invalid choice: 'lifo'"),
    ("bench.py gqa --tune cluster", "'cluster': expected a number for one of"),
    ("plan.py --memory 80", "'80': expected a number with a unit"),
    ("check.py nowhere.py", "there is no file 'nowhere.py'"),
])  # fmt: skip
def test_so_does_a_refusal_of_flags(command, words):
    script, *flags = command.split()
    found = started(f"scripts/{script}", *flags)
    assert found.code == 2
    assert words in found.err.splitlines()[-1]
    assert not found.modules & HEAVY
    assert found.seconds < SECONDS


@pytest.mark.parametrize("package", [*PACKAGES, *INNER, "ptxemu"])
def test_a_package_alone_imports_next_to_nothing(package):
    found = started("-c", f"import {package}")
    assert found.code == 0, found.err
    assert package in found.modules
    assert not found.modules & HEAVY
    assert found.seconds < SECONDS


def test_functions_alone_import_torch_and_no_compiler():
    """The DSL and the emulator are imported by the first call. Of torch only what `import torch`
    loads is imported; its compiler is not."""
    code = f"""
import importlib, sys, torch
before = set(sys.modules)
for package in map(importlib.import_module, {PACKAGES}):
    for name in package.__all__:
        getattr(package, name)
print(*set(sys.modules) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    new = set(done.stdout.split())
    assert {"fmha.launch", "gqa_lowlatency.launch", "moe.fused", "kvcache.memory.cache"} <= new
    assert not {name.partition(".")[0] for name in new} & {"cutlass", "ptxemu", "sympy", "triton"}
    assert not [name for name in new if name.startswith(("torch._dynamo", "torch._inductor"))]


@pytest.mark.parametrize("package", [*PACKAGES, *INNER])
def test_exports_are_what_a_type_checker_sees(package):
    """An `__init__` lists modules and names twice: for tools, and for the first use."""
    module = import_module(package)
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert set(seen) == set(module.__all__) <= set(dir(module))
    for name, home in seen.items():
        assert getattr(module, name) is getattr(import_module(home), name)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_choices_are_those_of_what_imports_torch():
    """Flags list values that a module with torch defines."""

    from fmha.config import TUNABLE
    from gqa_lowlatency.launch import ARCHS
    from kernelkit.call.launch import EMULATED
    from kernelkit.compile.arch import PORTABLE
    from lab.bench import fmha_peers as _fmha_peers
    from lab.bench import gqa_peers as _gqa_peers
    from lab.flags import decode as _gqa_flags
    from lab.flags import moe as _moe_flags
    from lab.problems import gqa as _gqa_cases
    from lab.problems import moe as _moe_layers
    from moe import reference_routing

    assert (*_gqa_peers.PEERS,) == bench.PEERS
    assert (*_fmha_peers.ROWS,) == bench.ROWS
    assert {option.name for option in attention.OPTIONS} == set(TUNABLE)
    assert (*_fmha_peers.PEERS,) == bench.FMHA_PEERS
    assert (*_gqa_peers.DTYPES,) == bench.KV_DTYPES
    for name in ("IO_DTYPES", "KV_DTYPES", "OUT_DTYPES"):
        assert getattr(_gqa_flags, name) == (*getattr(_gqa_cases, name.removeprefix("IO_")),)
    assert {*groups.ARCHS, PORTABLE} == set(ARCHS)
    assert set(groups.ALL_ARCHS) == set(EMULATED)
    assert (*_moe_layers.DTYPES,) == _moe_flags.DTYPES
    assert _moe_flags.SCORINGS == reference_routing.SCORING
