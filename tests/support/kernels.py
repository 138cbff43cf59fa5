"""Print how many kernels each test needs, and compile none: `pytest -p tests.support.kernels`.

A requested kernel is recorded and launches nothing. Most tests request all of their kernels before
they fail, but not all do, so the numbers are lower bounds. A tier costs about as much as its
kernels; a kernel that several functions share is counted for the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import pytest

import kernelkit.compile.compiler
import ptxemu

_functions: dict[str, int] = {}  # name of a test function -> kernels that nothing before it needed
_seen: set[str] = set()
_now = ""


def _note(config: Hashable, arch: str, source: str | Callable) -> Any:
    """Stand in for `compile_once`; the kernel accepts any arguments and does nothing."""
    kernel = f"{source if isinstance(source, str) else source.__qualname__} {config!r} {arch}"
    if kernel not in _seen:
        _seen.add(kernel)
        _functions[_now] = _functions.get(_now, 0) + 1
    return _Kernel()


class _Kernel:
    ptx, cubin = "", b""

    def __call__(self, *_: Any, **__: Any) -> None:
        pass


def pytest_collection_finish() -> None:
    nothing = SimpleNamespace(launches=[], findings=[], counts={}, bytes={})
    ptxemu.run_host = lambda *_, **__: nothing


def pytest_runtest_setup(item: pytest.Item) -> None:
    global _now
    _now = item.nodeid.partition("[")[0]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section(f"{len(_seen)} kernels")
    for name, count in sorted(_functions.items(), key=lambda pair: -pair[1]):
        terminalreporter.line(f"{count:5} {name}")


kernelkit.compile.compiler.compile_once = _note  # before any package has imported it
