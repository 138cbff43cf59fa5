"""What every test session shares: the `--hw` switch, and which tests share a worker.

Compiling a kernel takes seconds, so the tests of one file run in one worker and can share what they
compiled; a test that says `@pytest.mark.xdist_group(name)` chooses its own company. What a worker
keeps soon are millions of objects, which garbage collection had better not look at again and again.
"""

from __future__ import annotations

import gc

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hw", action="store_true", help="run the tests that need a GPU, too")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    off = pytest.mark.skip(reason="needs a GPU; run with --hw")
    for item in items:
        if item.get_closest_marker("hw") and not config.getoption("--hw"):
            item.add_marker(off)
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(
                pytest.mark.xdist_group(item.path.relative_to(config.rootpath).as_posix())
            )


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    gc.collect()
    gc.freeze()
