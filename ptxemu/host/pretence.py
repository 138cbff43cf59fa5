"""The launcher of a script that is run as if there were a GPU, by `python -m ptxemu`."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptxemu.host.runtime_symbols import Launcher

pretended: ContextVar[Launcher | None] = ContextVar("pretended", default=None)
