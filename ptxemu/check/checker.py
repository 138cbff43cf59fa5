"""The checker of a launch, put together."""

from __future__ import annotations

from ptxemu.check.edges import Edges
from ptxemu.check.lifetime import Lifetime
from ptxemu.check.manual import Manual
from ptxemu.check.taint_memory import TaintedMemory


class Checker(TaintedMemory, Edges, Lifetime, Manual):
    """What instructions call while a launch is checked; see `Options.check`."""
