"""The checker of a launch, put together."""

from __future__ import annotations

from ptxemu.check.edges import Edges
from ptxemu.check.lifetime import Lifetime
from ptxemu.check.races import Races


class Checker(Races, Edges, Lifetime):
    """What instructions call while a launch is checked; see `Options.check`."""
