"""Looking inside a launch: dumps at a line, watchpoints, the last events, first differences.

`Options(inspect=Inspect(...))` asks for it, and `LaunchReport.inspection` holds what was seen; the
flags of a command are in `command_line`. Nothing of it changes what a kernel computes, and a launch
that asks for nothing has no listener and no other code than before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptxemu.difference import Difference, first_difference, first_tile_difference
    from ptxemu.inspect.snapshot import Register, Snapshot, Tile, Write
    from ptxemu.request import Inspect, Region, Stop, Watch

_HOMES = {
    "ptxemu.difference": ("Difference", "first_difference", "first_tile_difference"),
    "ptxemu.request": ("Inspect", "Region", "Stop", "Watch"),
    "ptxemu.inspect.snapshot": ("Register", "Snapshot", "Tile", "Write"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import on first use: a command's `--help` needs this package's flags, but not numpy."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


__all__ = [
    "Difference",
    "Inspect",
    "Region",
    "Register",
    "Snapshot",
    "Stop",
    "Tile",
    "Watch",
    "Write",
    "first_difference",
    "first_tile_difference",
]
