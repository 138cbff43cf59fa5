"""The plugin, imported beside stand-ins of vLLM."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.integrations.vllm import stand_ins

PLUGIN = "integrations.vllm.backend"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`integrations.vllm.backend`."""
    for name, module in stand_ins.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop(PLUGIN, None)
    yield importlib.import_module(PLUGIN)
    sys.modules.pop(PLUGIN, None)
