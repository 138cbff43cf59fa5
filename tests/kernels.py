"""Which kernels a run would compile: `pytest -p tests.kernels --kernels-json FILE`, which compiles
none of them.

A kernel that is asked for is noted and launches nothing, so that most tests go on to the next one
before they fail, as all that have a kernel do. A test of the sweep ends with its first kernel.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kernelkit.compile.compiler
import ptxemu
from lab.house.tiers import SWEEP, package_of, tier_of

_asked: list[str] = []
_of_sweep = False


class NotCompiled(Exception):
    """What a test gets in place of a kernel."""


class Kernel:
    """Takes any arguments and does nothing; has no text."""

    def __init__(self) -> None:
        self.ptx, self.cubin = "", b""

    def __call__(self, *_: Any, **__: Any) -> None:
        pass


def note(config: Hashable, arch: str, source: str | Callable) -> Kernel:
    """In place of `compile_once`."""
    where = source if isinstance(source, str) else source.__qualname__
    _asked.append(f"{where} {config!r} {arch}")
    if _of_sweep:
        raise NotCompiled
    return Kernel()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels-json", metavar="FILE", help="where the kernels are noted")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Kernels(config.getoption("--kernels-json")))


class Kernels:
    """Kernels by package and tier: a worker sends them with its reports, who gets all writes."""

    def __init__(self, file: str | None) -> None:
        self.file = file
        self.found: dict[str, dict[str, set[str]]] = {}

    def pytest_collection_finish(self) -> None:
        nothing = SimpleNamespace(launches=[], findings=[], counts={}, bytes={})
        ptxemu.run_host = lambda *_, **__: nothing

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        global _of_sweep
        _of_sweep = tier_of(item) == SWEEP

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report = yield
        report.kernels = package_of(item), tier_of(item), [*_asked]
        _asked.clear()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        package, tier, kernels = report.kernels
        self.found.setdefault(package, {}).setdefault(tier, set()).update(kernels)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.file and not hasattr(session.config, "workerinput"):
            found = {p: {t: len(k) for t, k in tiers.items()} for p, tiers in self.found.items()}
            Path(self.file).write_text(json.dumps(found), encoding="utf-8")


kernelkit.compile.compiler.compile_once = note  # before any module of a package has imported it
