"""Plugins of engines, imported beside stand-ins of the engines' modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType

import pytest


def beside(
    stand_ins: Mapping[str, ModuleType], plugin: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """The module `plugin` as it is imported where the stand-ins are; what a fixture yields."""
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop(plugin, None)
    yield importlib.import_module(plugin)
    sys.modules.pop(plugin, None)
