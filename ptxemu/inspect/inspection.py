"""Inspection of one launch: listeners and probes, pictures, and explanations of faults."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ptxemu.check.barrier_names import Given
from ptxemu.codegen.program import Program
from ptxemu.inspect import files
from ptxemu.inspect.recent import Recent
from ptxemu.inspect.snapshot import Snapshot, Tiles, Write
from ptxemu.inspect.stops import Probes, Stops
from ptxemu.inspect.watchpoints import History, Watchpoints
from ptxemu.machine.listener import Listener
from ptxemu.request import Inspect

if TYPE_CHECKING:
    from ptxemu.machine.memory import GlobalMemory

_POINTER = 8  # bytes; the base address in a tensor map has as many


class Inspection:
    """Inspection of one launch.

    Args:
        params: Packed kernel parameters.
        names: Names of mbarriers, `Options.names`.

    Attributes:
        listeners: Listeners for the machine.
        snapshots: Pictures in the order in which they were taken.
        paths: Files to which they were written.
        notes: Hints to the user, such as a line without instructions.
    """

    def __init__(
        self,
        wanted: Inspect,
        program: Program,
        memory: GlobalMemory,
        params: np.ndarray,
        names: Given | None = None,
    ) -> None:
        self.wanted = wanted
        self.snapshots: list[Snapshot] = []
        self.paths: list[Path] = []
        self.notes: list[str] = []
        self._params = params
        self._program = program
        self._watchpoints = self._stops = self._recent = None
        listeners: list[Listener] = []
        if wanted.watches:
            self._watchpoints = Watchpoints(
                program, memory, wanted.watches, wanted.keep, self._pointer
            )
            listeners.append(self._watchpoints)
        if wanted.stops:
            tiles = Tiles()
            self._stops = self._stopping(wanted, tiles)
            listeners += [tiles, self._stops]
        if wanted.last:
            self._recent = Recent(program, wanted.last, names)
            listeners.append(self._recent)
        self.listeners = tuple(listeners)

    def _stopping(self, wanted: Inspect, tiles: Tiles) -> Stops:
        probes = self._program.probes
        if not isinstance(probes, Probes):
            probes = self._program.probes = Probes(self._program, wanted.stops)
        return Stops(self._program, wanted.stops, probes, tiles, self.histories, self._taken)

    def _pointer(self, parameter: int) -> int:
        places = self._program.layout.params
        if parameter >= len(places):
            raise ValueError(f"parameter {parameter}: the kernel has {len(places)} parameters")
        offset, nbytes = places[parameter]
        if nbytes < _POINTER:
            raise ValueError(f"parameter {parameter} has {nbytes} bytes, so it is not a pointer")
        return int.from_bytes(self._params[offset : offset + _POINTER].tobytes(), "little")

    # -- what was seen ----------------------------------------------------------------------

    def histories(self) -> dict[str, tuple[Write, ...]]:
        """The writes to each watch that saw any, by its title."""
        found = self._histories()
        return {history.title: tuple(history.writes) for history in found if history.writes}

    def _histories(self) -> list[History]:
        if self._watchpoints is None:
            return []
        self._watchpoints.settle()
        return self._watchpoints.histories

    def history_text(self) -> str:
        """Histories of all watches as text."""
        return "\n".join(line for history in self._histories() for line in history.lines())

    def last_events(self) -> str:
        """The last events as text, the newest at the end."""
        return "\n".join(self._recent.lines()) if self._recent else ""

    # -- events of the launch -----------------------------------------------------------------

    def _taken(self, picture: Snapshot) -> None:
        self.snapshots.append(picture)
        if self.wanted.folder:
            self.paths.append(files.save(picture, Path(self.wanted.folder)))
            self._say(f"{files.title(picture)} -> {self.paths[-1]}")

    def ended(self, *, failed: bool = False) -> None:
        """The launch is over; what was to be printed is."""
        if self._stops:
            self.notes += self._stops.summary()
        if self._watchpoints:
            self.notes += self._watchpoints.problems
        texts = [*self.notes, self.history_text()]
        if failed:
            texts.append(self.last_events())
        for text in filter(None, texts):
            self._say(text)

    def _say(self, text: str) -> None:
        if not self.wanted.quiet:
            print("\n".join(f"ptxemu: {line}" for line in text.splitlines()), file=sys.stderr)
