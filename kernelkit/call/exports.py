"""Names of a package that are imported when they are first asked for (PEP 562).

A package then costs nothing by itself: `fmha.config` is imported in milliseconds, what
`fmha.attention` needs, torch among it, in seconds. Each package also has the `__version__` of them
all. Type checkers read the imports under `TYPE_CHECKING` instead. They see no `__getattr__`, so a
name that a package does not have is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any


def exports(package: str, homes: Mapping[str, str]) -> None:
    """Give `package` its `__getattr__` and `__dir__`. homes: module -> names, in words."""
    home = {name: module for module, names in homes.items() for name in names.split()}
    home["__version__"] = "kernelkit.compile.version"
    target: Any = sys.modules[package]

    def from_home(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        setattr(target, name, value)  # the next time nobody asks here
        return value

    def names() -> list[str]:
        return sorted({*vars(target), *home})

    target.__getattr__, target.__dir__ = from_home, names
