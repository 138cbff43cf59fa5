"""Names of a package that are imported when they are first asked for (PEP 562).

A package then costs nothing by itself: `fmha.config` is imported in milliseconds, what
`fmha.attention` needs, torch among it, in seconds. Each package also has the `__version__` of them
all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def exports(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package`. homes: module -> what it exports, in words."""
    home = {name: module for module, names in homes.items() for name in names.split()}
    home["__version__"] = "kernelkit.compile.version"

    def from_home(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)  # the next time nobody asks here
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    return from_home, names
