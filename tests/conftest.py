"""Shared by every test session: the `--hw` switch, tiers, and which tests share a worker.

Compiling a kernel takes seconds, so the tests of one file run in one worker and can share compiled
kernels; `@pytest.mark.xdist_group(name)` on a test puts it in another group. A worker soon keeps
millions of objects, which garbage collection should not scan again and again. Kernels of a group
are released after its last test, or a worker of the matrix would grow to 13 GB.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import pytest

from kernelkit.compile import compiler as kernel_compile
from kernelkit.compile.trace import PTXAS_VARIABLE
from lab.house import tiers
from lab.tools import place
from tests.support.bindings import Bindings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hw", action="store_true", help="run the tests that need a GPU, too")
    words = "bind every launched kernel to its machine code, a line of JSON for each"
    parser.addoption("--bindings", metavar="FILE", help=words)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[tiers.DECIDED] = tiers.assign(items)
    off = pytest.mark.skip(reason="needs a GPU; run with --hw")
    for item in items:
        if item.get_closest_marker("hw") and not config.getoption("--hw"):
            item.add_marker(off)
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(
                pytest.mark.xdist_group(item.path.relative_to(config.rootpath).as_posix())
            )


class Garbage:
    """Garbage that tests leave; it is collected once it includes many kernels of finished
    groups.
    """

    MANY = 64

    def __init__(self) -> None:
        self.kernels = 0
        gc.disable()  # imports and collection make next to no garbage

    def pytest_collection_finish(self) -> None:
        gc.freeze()
        gc.enable()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if nextitem is None or _group(nextitem) != _group(item):
            self.kernels += kernel_compile.forget()
        everything = self.kernels >= self.MANY
        if everything:
            self.kernels = 0
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        if everything:
            _release_free_memory()


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., CompletedProcess[str]]:
    """run("bench.py gqa", "--json", path): the result of `python scripts/bench.py gqa ...`, run in
    the process of the tests, which has imported torch and the DSL already.

    The first string is split as a command line; the following ones are passed as they are.
    """
    monkeypatch.setenv("COLUMNS", "200")

    def call(command: str, *more: object) -> CompletedProcess[str]:
        script, *words = [*shlex.split(command), *map(str, more)]
        monkeypatch.setattr(sys, "argv", [f"scripts/{script}", *words])
        try:
            code = importlib.import_module(script.removesuffix(".py")).main(words)
        except SystemExit as left:
            code = left.code or 0
        return CompletedProcess(script, code, *capsys.readouterr())

    return call


@pytest.fixture
def printed(run) -> Callable[..., str]:
    """Return the output of a command, which must succeed."""

    def call(command: str, *more: object) -> str:
        result = run(command, *more)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return call


@pytest.fixture
def whole_ptxas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile kernels as for a GPU: for tests that read machine code."""
    monkeypatch.delenv(PTXAS_VARIABLE, raising=False)


@pytest.fixture
def no_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget all kernels in memory, and fail if one is compiled."""

    def refuse(*_: object) -> None:
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr(kernel_compile, "_compiled", {})
    monkeypatch.setattr(kernel_compile, "_make", refuse)


@pytest.fixture
def poisoned_outputs() -> Iterator[None]:
    """torch.empty returns NaN and large integers, so that elements that a kernel does not write are
    noticed.
    """
    with place.poisoned_outputs():
        yield


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """changed(module, users, name, (old, new), ...): copy `module`, replace each old text by the
    new one, and set `name` of each of `users` to that of the copy. Each old text occurs once.
    """
    serial = itertools.count()

    def change(
        module: ModuleType, users: Sequence[object], name: str, *replacements: tuple[str, str]
    ) -> None:
        source = Path(module.__file__).read_text(encoding="utf-8")
        for old, new in replacements:
            assert source.count(old) == 1, f"the cure is not where it was: {old}"
            source = source.replace(old, new)
        path = tmp_path / f"changed_{next(serial)}.py"  # the DSL reads functions from their files
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        for user in users:
            monkeypatch.setattr(user, name, getattr(copy, name))
        monkeypatch.setattr(kernel_compile, "_compiled", {})

    return change


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--bindings"):
        config.pluginmanager.register(Bindings(config.getoption("--bindings")))
    elif not config.getoption("--hw"):
        os.environ.setdefault(PTXAS_VARIABLE, "-O1")  # saves a tenth of a compilation's time
    config.pluginmanager.register(Garbage())


def _group(item: pytest.Item) -> str:
    return item.get_closest_marker("xdist_group").args[0]


def _release_free_memory() -> None:
    """Return the free pages that malloc holds to the system; only glibc has a call for it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
