"""What every test session shares: the `--hw` switch, tiers, and which tests share a worker.

Compiling a kernel takes seconds, so the tests of one file run in one worker and can share what they
compiled; a test that says `@pytest.mark.xdist_group(name)` chooses its own company. What a worker
keeps soon are millions of objects, which garbage collection had better not look at again and again.
Kernels of a group go with its last test, or a worker of the matrix would grow to 13 GB.
"""

from __future__ import annotations

import ctypes
import gc
import os

import pytest

from kernelkit.compile import forget
from kernelkit.trace import PTXAS_VARIABLE
from tests.durations import Durations
from workbench.house import tiers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hw", action="store_true", help="run the tests that need a GPU, too")
    parser.addoption("--durations-json", metavar="FILE", help="seconds of each package and tier")


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
    """What tests leave behind, until many kernels of groups that are over are among it."""

    MANY = 32

    def __init__(self) -> None:
        self.kernels = 0

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if nextitem is None or _group(nextitem) != _group(item):
            self.kernels += forget()
        everything = self.kernels >= self.MANY
        if everything:
            self.kernels = 0
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        if everything:
            _release_free_memory()


@pytest.fixture
def whole_ptxas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled as for a GPU: for tests that read machine code."""
    monkeypatch.delenv(PTXAS_VARIABLE, raising=False)


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hw"):
        os.environ.setdefault(PTXAS_VARIABLE, "-O1")  # a tenth of a compile less
    config.pluginmanager.register(Garbage())
    config.pluginmanager.register(Durations(config.getoption("--durations-json")))


def _group(item: pytest.Item) -> str:
    return item.get_closest_marker("xdist_group").args[0]


def _release_free_memory() -> None:
    """Pages that malloc holds between objects, to the system; glibc alone has a call for it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
