"""The plugin, imported beside stand-ins of SGLang."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.integrations.sglang import stand_ins

PLUGIN = "integrations.sglang.backend"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`integrations.sglang.backend`."""
    for name, module in stand_ins.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop(PLUGIN, None)
    yield importlib.import_module(PLUGIN)
    sys.modules.pop(PLUGIN, None)
