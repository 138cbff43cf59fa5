"""Each house rule fails on the snippet that it was written against, and passes on its cure."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from textwrap import dedent
from unittest import mock

import pytest

from lab.house import dsl, imports, repository, size, tiers
from lab.house.source import ROOT, Source


def probe(rule, text: str, path: str = "kernelkit/probe.py") -> list[str]:
    return [finding.message for finding in rule(Source(PurePosixPath(path), dedent(text)))]


JIT = "import cutlass.cute as cute\n\n@cute.jit\n"
FUTURE = "from __future__ import annotations\n"
TYPE_CHECKING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cutlass"
EIGHT = "a, b, c, d, e, f, g, h"
NINE = f"{EIGHT}, i"


def function_of(lines: int, name: str = "step") -> str:
    return f"def {name}():\n" + "    pass\n" * (lines - 1)


def jit(text: str) -> str:
    return f"{JIT}def f{text}: ...\n"


# rule, a snippet that breaks it, one that does not
PROBES = [
    (size.file_length, "x = 1\n" * 801, "x = 1\n" * 800),
    (size.function_length, function_of(61), function_of(60)),
    (size.function_length, function_of(61, "run"), function_of(60, "run")),
    (size.function_length, JIT + function_of(121, "run"), JIT + function_of(120, "run")),
    (size.parameter_count, f"def f({NINE}): 0", f"def f({EIGHT}, *, i): 0"),
    (size.parameter_count, f"def _f({EIGHT}, *, i): 0", f"def _f({EIGHT}): 0"),
    (size.parameter_count, f"class A:\n    def f(self, {NINE}): ...",
     f"class A:\n    def f(self, {EIGHT}): ..."),
    (size.module_docstring, "import os", '"""Says its duty."""'),
    (size.jit_signature, jit("(x: tuple)"), jit("(x: tuple[Int32, ...])")),
    (size.jit_signature, jit("(x: tuple[Int32, Int32, Int32])"), jit("(x: tuple[Int32, Int32])")),
    (size.jit_signature, jit("(x: cutlass.Constexpr[tuple])"), jit("(x: cutlass.Constexpr[int])")),
    (size.jit_signature, jit("(x: tuple[tuple, ...] | None)"),
     jit("(x: tuple[Row, ...] | None)")),
    (size.parameter_count, jit(f"({NINE})"), jit(f"({EIGHT})")),
    (size.parameter_count, jit(f"({EIGHT}, *, i)"), jit("(a, *, i)")),
    (size.jit_signature, jit("(x: tuple)"), f"def f(x: tuple, {NINE}): ..."),
    (size.jit_signature, jit("() -> tuple"), jit("() -> tuple[A, B, C]")),
    (imports.plans_without_dsl, "import cutlass.cute as cute", TYPE_CHECKING),
    (imports.plans_without_dsl, "from cutlass import Float32", "import torch"),
    (dsl.advanced_state_returns, JIT + "def step(state, x):\n    state.advance()\n",
     JIT + "def step(state, x):\n    state.advance()\n    return state, x\n"),
    (dsl.advanced_state_returns, JIT + "def step(stages):\n    stages.kv.advance()\n    return 0\n",
     JIT + "def step(stages):\n    stages.kv.advance()\n    return stages\n"),
    (dsl.advanced_state_returns, JIT + "def step(self):\n    self.consumer.wait_and_advance()\n",
     JIT + "def run(self, state):\n    state.advance()\n"),
    (dsl.advanced_state_returns, JIT + "def step(cursor):\n    cursor.advance()\n",
     "def step(cursor):\n    cursor.advance()\n"),  # `advance` of another library
    (dsl.no_advance_on_exit, JIT + "def __exit__(self, *error):\n    self.state.advance()\n",
     JIT + "def __exit__(self, *error):\n    self.pipe.release(self.state)\n"),
    (dsl.no_nested_roles, JIT + "def kernel():\n    def load(): ...\n    load()\n",
     JIT + "def kernel():\n    load()\n"),
    (dsl.no_future_annotations, FUTURE + "@cute.struct\nclass A: ...", "@cute.jit\ndef f(): ..."),
    (dsl.no_future_annotations, FUTURE + "@cute.jit\ndef f(): ...",
     FUTURE + "@dataclass\nclass A: ..."),
    (dsl.no_traps_imported, "import cutlass\nfrom typing import NamedTuple",
     "import cutlass\nfrom dataclasses import dataclass"),
    (dsl.no_traps_imported, "import cutlass\nfrom typing import NamedTuple",
     "from typing import NamedTuple"),
    (dsl.no_traps_imported, "import cutlass\nfrom cutlass.utils import SmemAllocator",
     "import cutlass\nfrom cutlass.memory import SmemAllocator"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "bad", "good"), PROBES)
def test_rules_of_a_file(rule, bad, good):
    assert probe(rule, bad, "kernelkit/plan.py")
    assert not probe(rule, good, "kernelkit/plan.py")


@pytest.mark.parametrize(("rule", "path", "bad", "good"), [
    (imports.direction, "kernelkit/a.py", "import fmha", "import torch"),
    (imports.direction, "kvcache/a.py", "from gqa_lowlatency import split",
     "from kernelkit.tma import atoms"),
    (imports.direction, "fmha/a.py", "from moe import router", "from kernelkit.plan import hw"),
    (imports.direction, "moe/a.py", "import kvcache.layouts.layout", "from . import plan"),
    (imports.direction, "moe/sm100/a.py", "from fmha.config import C", "from ..plan import P"),
    (imports.direction, "fmha/api.py", "def f():\n    import ptxemu",
     "from kernelkit.call.launch import launch"),
    (imports.direction, "kernelkit/call/launch.py", "import ptxemu", "def f():\n    import ptxemu"),
    (imports.direction, "ptxemu/run.py", "def f():\n    from kernelkit import launch",
     "import ptxemu.report"),
    (imports.direction, "kernelkit/a.py", "from tests.compare import close",
     "from kernelkit import compare"),
    (imports.emulator_is_alone, "ptxemu/machine/a.py", "def f():\n    import torch",
     "import numpy as np\nimport struct"),
    (imports.emulator_is_alone, "ptxemu/host/a.py", "import torch", "def f():\n    import torch"),
    (imports.emulator_is_alone, "ptxemu/native/a.py", "import llvmlite",
     "def f():\n    import llvmlite"),
    (imports.emulator_is_alone, "ptxemu/codegen/a.py", "def f():\n    import llvmlite",
     "import numpy"),
])  # fmt: skip
def test_rules_of_a_place(rule, path, bad, good):
    assert probe(rule, bad, path)
    assert not probe(rule, good, path)


def test_plans_alone_do_without_the_dsl():
    assert not probe(imports.plans_without_dsl, "import cutlass", "fmha/args.py")


def test_plans_without_dsl_follows_our_modules(monkeypatch):
    modules = {
        "kernelkit.plan.edges": "from kernelkit.device import pipelines",
        "kernelkit.device.pipelines": "from kernelkit.plan import edges\nimport cutlass",
    }

    def own_source(module: str) -> Source | None:
        path = PurePosixPath(*module.split(".")).with_suffix(".py")
        return Source(path, modules[module]) if module in modules else None

    monkeypatch.setattr(imports, "own_source", own_source)
    messages = probe(imports.plans_without_dsl, "import kernelkit.plan.edges", "fmha/sm100/plan.py")
    assert messages == [
        "reaches the DSL: kernelkit.plan.edges -> kernelkit.device.pipelines -> cutlass"
    ]


def test_prose():
    readme = PurePosixPath("fmha/README.md")
    assert list(repository.no_machine_paths(readme, "see /" + "home/someone/x"))
    assert not list(repository.no_machine_paths(readme, "GET /api/home/x and docs/work/x"))
    assert list(repository.no_dumps(PurePosixPath("cutlass_kernel.ptx"), ""))
    assert list(repository.no_dumps(PurePosixPath("tests/cutlass_kernel.ptx"), ""))
    assert not list(repository.no_dumps(PurePosixPath("tests/ptxemu/ptx/add.ptx"), ""))
    assert list(repository.links_resolve(readme, "[a](no_such_file.md)"))
    assert not list(repository.links_resolve(readme, "[a](../LICENSE) [b](https://x.org) [c](#d)"))
    words = "word " * 30
    assert list(repository.markdown_line_length(readme, words))
    for free in (f"| {words}", f"    {words}", f"```\n{words}\n```", "x" * 150, "word " * 23):
        assert not list(repository.markdown_line_length(readme, free))
    assert list(repository.package_readme_length(readme, "x\n" * 161))
    assert not list(repository.package_readme_length(readme, "x\n" * 160))


def test_tree():
    kernel = Source(PurePosixPath("fmha/sm100/kernel.py"), "")
    assert not list(repository.kernels_have_a_matrix([kernel]))
    with mock.patch.object(tiers, "table", return_value=()):
        assert list(repository.kernels_have_a_matrix([kernel]))
    assert list(repository.folders_are_packages([kernel]))
    assert not list(
        repository.folders_are_packages([kernel, Source(kernel.path.with_name("__init__.py"), "")])
    )


@pytest.mark.parametrize(
    ("code", "bad"),
    [
        ("E501", f'NAME = "{"x" * 100}"\n'),
        ("ERA001", "# x = compute(1)\n"),
        ("FIX002", "# TO" + "DO: later\n"),
        ("FIX001", "# FIX" + "ME: later\n"),
        ("BLE001", "try:\n    pass\nexcept Exception:\n    pass\n"),
        ("ANN001", "def f(x) -> None: ...\n"),
        ("ANN201", "def f(x: int): ...\n"),
        ("F401", "import os\n"),
    ],
)
def test_ruff_holds_its_part(code, bad):
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    command = [ruff, "check", "--output-format=concise", "--stdin-filename=kernelkit/probe.py", "-"]
    result = subprocess.run(command, input=bad, cwd=ROOT, capture_output=True, text=True)
    assert code in result.stdout
