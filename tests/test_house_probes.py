"""Each house rule fails on the snippet it was written against, and stays silent on its cure."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from textwrap import dedent
from unittest import mock

import pytest

from workbench.house import dsl, imports, repository, size
from workbench.house.source import ROOT, Source


def probe(rule, text: str, path: str = "kernelkit/probe.py") -> list[str]:
    return [finding.message for finding in rule(Source(PurePosixPath(path), dedent(text)))]


JIT = "import cutlass.cute as cute\n\n@cute.jit\n"
EIGHT = "a, b, c, d, e, f, g, h"
NINE = f"{EIGHT}, i"


def function_of(lines: int, name: str = "step") -> str:
    return f"def {name}():\n" + "    pass\n" * (lines - 1)


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        (size.file_length, "x = 1\n" * 501, "x = 1\n" * 500),
        (size.function_length, function_of(61), function_of(60)),
        (size.function_length, function_of(61, "run"), function_of(60, "run")),
        (size.function_length, JIT + function_of(121, "run"), JIT + function_of(120, "run")),
        (size.parameter_count, f"def f({NINE}): 0", f"def f({EIGHT}, *, i): 0"),
        (size.parameter_count, f"def _f({EIGHT}, *, i): 0", f"def _f({EIGHT}): 0"),
        (
            size.parameter_count,
            f"class A:\n    def f(self, {NINE}): ...",
            f"class A:\n    def f(self, {EIGHT}): ...",
        ),
        (size.module_docstring, "import os", '"""Says its duty."""'),
    ],
)
def test_size(rule, bad, good):
    assert probe(rule, bad)
    assert not probe(rule, good)


@pytest.mark.parametrize(
    ("path", "bad", "good"),
    [
        ("kernelkit/a.py", "import fmha", "import torch"),
        ("kvcache/a.py", "from gqa_lowlatency import split", "from kernelkit.tma import atoms"),
        ("fmha/a.py", "from moe import router", "from gqa_lowlatency import decode"),
        ("moe/a.py", "import kvcache.layouts.layout", "from . import plan"),
        ("moe/sm100/a.py", "from fmha.config import C", "from ..plan import P"),
        ("fmha/api.py", "def f():\n    import ptxemu", "from kernelkit.launch import launch"),
        ("kernelkit/launch.py", "import ptxemu", "def f():\n    import ptxemu"),
        ("ptxemu/run.py", "def f():\n    from kernelkit import launch", "import ptxemu.report"),
        ("kernelkit/a.py", "from tests.compare import close", "from kernelkit import compare"),
    ],
)
def test_import_direction(path, bad, good):
    assert probe(imports.direction, bad, path)
    assert not probe(imports.direction, good, path)


@pytest.mark.parametrize(
    ("path", "bad", "good"),
    [
        ("ptxemu/machine/a.py", "def f():\n    import torch", "import numpy as np\nimport struct"),
        ("ptxemu/host/a.py", "import torch", "def f():\n    import torch"),
    ],
)
def test_emulator_is_alone(path, bad, good):
    assert probe(imports.emulator_is_alone, bad, path)
    assert not probe(imports.emulator_is_alone, good, path)


def test_plans_without_dsl():
    for bad in ("import cutlass.cute as cute", "from cutlass import Float32"):
        assert probe(imports.plans_without_dsl, bad, "fmha/plan.py")
    assert not probe(imports.plans_without_dsl, "import cutlass", "fmha/args.py")
    assert not probe(
        imports.plans_without_dsl,
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cutlass",
        "fmha/plan.py",
    )


def test_plans_without_dsl_follows_our_modules(monkeypatch):
    modules = {
        "kernelkit.edges": "from kernelkit import pipelines",
        "kernelkit.pipelines": "from kernelkit import edges\nimport cutlass",
    }

    def own_source(module: str) -> Source | None:
        path = PurePosixPath(*module.split(".")).with_suffix(".py")
        return Source(path, modules[module]) if module in modules else None

    monkeypatch.setattr(imports, "own_source", own_source)
    messages = probe(imports.plans_without_dsl, "import kernelkit.edges", "fmha/plan.py")
    assert messages == ["reaches the DSL: kernelkit.edges -> kernelkit.pipelines -> cutlass"]


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        (
            dsl.advanced_state_returns,
            "def step(state, x):\n    state.advance()\n",
            "def step(state, x):\n    state.advance()\n    return state, x\n",
        ),
        (
            dsl.advanced_state_returns,
            "def step(stages):\n    stages.kv.advance()\n    return 0\n",
            "def step(stages):\n    stages.kv.advance()\n    return stages\n",
        ),
        (
            dsl.advanced_state_returns,
            "def step(self):\n    self.consumer.wait_and_advance()\n",
            "def run(self, state):\n    state.advance()\n",
        ),
        (
            dsl.no_advance_on_exit,
            "def __exit__(self, *error):\n    self.state.advance()\n",
            "def __exit__(self, *error):\n    self.pipe.release(self.state)\n",
        ),
        (
            dsl.no_nested_roles,
            "def kernel():\n    def load(): ...\n    load()\n",
            "def kernel():\n    load()\n",
        ),
    ],
)
def test_dsl_state(rule, bad, good):
    assert probe(rule, JIT + bad)
    assert not probe(rule, JIT + good)


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ("x: tuple", "x: tuple[Int32, ...]"),
        ("x: tuple[Int32, Int32, Int32]", "x: tuple[Int32, Int32]"),
        ("x: cutlass.Constexpr[tuple]", "x: cutlass.Constexpr[int]"),
        ("x: tuple[tuple, ...] | None", "x: tuple[Row, ...] | None"),
        (NINE, EIGHT),
        (f"{EIGHT}, *, i", "a, *, i"),
    ],
)
def test_jit_signature(bad, good):
    for parameters, broken in ((bad, True), (good, False)):
        assert bool(probe(size.jit_signature, f"{JIT}def f({parameters}): ...\n")) == broken
        assert not probe(size.jit_signature, f"def f({parameters}): ...\n")


def test_a_jit_function_says_what_it_returns():
    assert probe(size.jit_signature, f"{JIT}def f() -> tuple: ...\n")
    assert not probe(size.jit_signature, f"{JIT}def f() -> tuple[A, B, C]: ...\n")


def test_advance_of_another_library_is_free():
    assert not probe(dsl.advanced_state_returns, "def step(cursor):\n    cursor.advance()\n")


@pytest.mark.parametrize("traced", ["@cute.struct\nclass A: ...", "@cute.jit\ndef f(): ..."])
def test_no_future_annotations(traced):
    future = "from __future__ import annotations\n"
    assert probe(dsl.no_future_annotations, future + traced)
    assert not probe(dsl.no_future_annotations, traced)
    assert not probe(dsl.no_future_annotations, future + "@dataclass\nclass A: ...")


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ("from typing import NamedTuple", "from dataclasses import dataclass"),
        ("from cutlass.utils import SmemAllocator", "from cutlass.memory import SmemAllocator"),
    ],
)
def test_no_traps_imported(bad, good):
    assert probe(dsl.no_traps_imported, f"import cutlass\n{bad}")
    assert not probe(dsl.no_traps_imported, f"import cutlass\n{good}")
    assert not probe(dsl.no_traps_imported, bad.replace("cutlass.", "other."))


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
    with mock.patch.object(repository, "table", return_value=()):
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
