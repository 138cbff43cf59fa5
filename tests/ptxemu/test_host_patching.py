"""Changes to modules when they are imported: `patching.on_arrival`."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import ExitStack
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

import pytest

from ptxemu.host.gpu_machine import _pretend_for_helion
from ptxemu.host.patching import on_arrival


@pytest.fixture
def arrives(tmp_path, monkeypatch):
    """Write a module that is awaited within the test; what arrived is in the list."""
    (tmp_path / "awaited_module.py").write_text("HERE = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    arrived = []
    with on_arrival({"awaited_module": lambda: arrived.append(sys.modules["awaited_module"].HERE)}):
        yield arrived
    sys.modules.pop("awaited_module", None)


def test_a_search_is_no_import(arrives):
    """torch asks for Triton in this way."""
    assert importlib.util.find_spec("awaited_module") is not None
    assert not arrives
    import awaited_module  # noqa: F401

    assert arrives == [True]


def test_finders_that_come_later_stay_behind(arrives):
    """pytest rewrites assertions in modules that its finder finds, in front of all others."""

    class First(MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            return PathFinder.find_spec(name, path)

    first = First()
    sys.meta_path.insert(0, first)
    try:
        import awaited_module  # noqa: F401
    finally:
        sys.meta_path.remove(first)
    assert arrives == [True]


def test_finders_of_the_block_remain(tmp_path):
    before, other = sys.meta_path, PathFinder()
    with on_arrival({}):
        sys.meta_path.append(other)
    assert sys.meta_path is before
    assert before.pop() is other


@pytest.mark.parametrize(("warning", "ignored"), [("WrongDevice", "A,WrongDevice"), ("Other", "A")])
def test_helion_does_not_warn_of_fake_tensors(warning, ignored, tmp_path, monkeypatch):
    package = tmp_path / "helion"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "exc.py").write_text(f"class {warning}: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HELION_IGNORE_WARNINGS", "A")
    for name in ("helion", "helion.exc"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with ExitStack() as stack:
        _pretend_for_helion(stack)
        assert os.environ["HELION_IGNORE_WARNINGS"] == ignored
    assert os.environ["HELION_IGNORE_WARNINGS"] == "A"
    for name in ("helion", "helion.exc"):
        del sys.modules[name]
