"""Writes to a range, in order: listens to every way in which memory is written.

An event comes right before the write. The written value is therefore read back before the next
write to the range, or on request. A tcgen05.st of the adversarial policy lands later than its
event; its value is the content of the columns when it is requested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ptxemu.check.footprints import (
    GROUPS,
    Cells,
    accumulator_cells,
    column_cells,
    filled_cells,
    moved_cells,
    shifted_cells,
)
from ptxemu.errors import OutOfBounds
from ptxemu.inspect.snapshot import Write
from ptxemu.inspect.stops import is_cta
from ptxemu.machine.listener import Lanes, Listener, Place, Position, Rows, Signals, Starts
from ptxemu.machine.memory import FIRST_ADDRESS
from ptxemu.machine.tma_tile import box_rows
from ptxemu.request import Watch
from ptxemu.syntax.tree import Instr

if TYPE_CHECKING:
    from ptxemu.codegen.program import Program
    from ptxemu.machine.async_ops import Work
    from ptxemu.machine.mbarrier import MBarrier
    from ptxemu.machine.memory import GlobalMemory
    from ptxemu.machine.mma import Mma
    from ptxemu.machine.state import Cta, Warp
    from ptxemu.machine.tensor_map import TensorMap
    from ptxemu.machine.tmem import Move
    from ptxemu.machine.tmem_fill import Fill
    from ptxemu.machine.umma_desc import SmemDesc


@dataclass
class History:
    """Writes to one watch in one place: a CTA's memory, or global memory (cta None)."""

    watch: Watch
    low: int
    high: int  # behind the last
    cta: Cta | None
    writes: deque[Write]
    count: int = 0
    open: Write | None = None  # whose value is not known yet

    @property
    def title(self) -> str:
        return self.watch.title + (f" of {self.cta.name()}" if self.cta else "")

    def lines(self) -> list[str]:
        """Return the history as text, the newest write last."""
        head = f"writes to {self.title}: {self.count}"
        if self.count > len(self.writes):
            head += f", the last {len(self.writes)}"
        return [head, *(f"  {write}" for write in self.writes)]


class Watchpoints(Listener):
    """Watchpoints of one launch.

    Args:
        pointers: Returns the address at the beginning of a kernel parameter, or raises ValueError.

    Attributes:
        problems: Descriptions of watches whose memory this kernel does not have.
    """

    every_lane = True

    def __init__(
        self,
        program: Program,
        memory: GlobalMemory,
        watches: tuple[Watch, ...],
        keep: int,
        pointers: Callable[[int], int],
    ) -> None:
        self._program = program
        self._memory = memory
        self._keep = keep
        self._issuers: dict[Work, tuple[Instr | None, str]] = {}
        self._order = 0
        self.problems: list[str] = []
        self.histories: list[History] = []
        self._global: list[History] = []
        self._of: dict[tuple[str, Cta], list[History]] = {}
        self._watches = [watch for watch in watches if watch.space != "global"]
        for watch in watches:
            if watch.space == "global":
                try:
                    first = watch.first
                    first += 0 if watch.parameter is None else pointers(watch.parameter)
                    memory.check(first, first + watch.count, False)
                except (OutOfBounds, ValueError) as error:
                    self._refuse(watch, error)
                else:
                    self._global.append(self._history(watch, first, None))

    def _refuse(self, watch: Watch, error: Exception) -> None:
        problem = f"no watch of {watch.title}: {error}"
        if problem not in self.problems:
            self.problems.append(problem)

    def _history(self, watch: Watch, first: int, cta: Cta | None) -> History:
        found = History(watch, first, first + watch.count, cta, deque(maxlen=self._keep))
        self.histories.append(found)
        return found

    def cta_started(self, cta: Cta) -> None:
        for watch in self._watches:
            if is_cta(cta, watch.cta):
                if watch.space == "shared":
                    try:
                        cta.check(watch.first, watch.count)
                    except OutOfBounds as error:
                        self._refuse(watch, error)
                        continue
                history = self._history(watch, watch.first, cta)
                self._of.setdefault((watch.space, cta), []).append(history)

    def settle(self) -> None:
        """Read back what the newest writes wrote."""
        for history in self.histories:
            self._settle(history)

    def _settle(self, history: History) -> None:
        if history.open is not None:
            history.open.value = self._read(history)
            history.open = None

    def _read(self, history: History) -> np.ndarray:
        low, high = history.low, history.high
        if history.cta is None:
            return self._memory.views[1][low - FIRST_ADDRESS : high - FIRST_ADDRESS].copy()
        if history.watch.space == "tensor":
            return history.cta.tmem.cells[low:high].copy()
        return history.cta.smem[low:high].copy()

    def _add(
        self,
        history: History,
        who: tuple[str, Instr | None],
        span: tuple[int, int],
        lanes: tuple[int, ...] = (),
    ) -> None:
        """span: first and last that were reached, cut to the watch."""
        self._settle(history)
        agent, instr = who
        self._order += 1
        first, last = max(span[0], history.low), min(span[1], history.high - 1)
        write = Write(self._order, agent, instr, lanes, first, last, history.low)
        history.writes.append(write)
        history.count += 1
        history.open = write

    # -- who ------------------------------------------------------------------------------

    def _warp(self, w: Warp) -> tuple[str, Instr | None]:
        agent = f"{w.name()}, {w.how}" if w.how.startswith("atomic") else w.name()
        return agent.strip(), self._program.running_instruction()

    def _unit(self, work: Work) -> tuple[str, Instr | None]:
        instr, issuer = self._issuers.get(work, (work.instr, work.warp))
        unit = {"tma": "TMA"}.get(work.unit, work.unit)
        return f"{unit}, issued by {issuer}", instr

    def issued(self, w: Warp, work: Work) -> None:
        self._issuers[work] = self._program.running_instruction(), w.name()

    def step_ended(self, work: Work) -> None:
        if not work.steps:
            self._issuers.pop(work, None)

    # -- ranges of bytes --------------------------------------------------------------------

    def _bytes(
        self,
        histories: Sequence[History],
        starts: Starts,
        nbytes: int,
        who: Callable[[], tuple[str, Instr | None]],
        lanes: Lanes = None,
    ) -> None:
        for history in histories:
            first = np.atleast_1d(np.asarray(starts)).astype(np.int64)
            reached = (first < history.high) & (first + nbytes > history.low)
            if reached.any():
                hit = first[reached]
                whose = () if lanes is None else tuple(np.asarray(lanes)[reached].tolist())
                span = int(hit.min()), int(hit.max()) + nbytes - 1
                self._add(history, who(), span, whose)

    def _shared(self, cta: Cta) -> Sequence[History]:
        return self._of.get(("shared", cta), ())

    def shared_access(
        self, w: Warp, cta: Cta, starts: Starts, nbytes: int, lanes: Lanes, write: bool
    ) -> None:
        if write:
            self._bytes(self._shared(cta), starts, nbytes, lambda: self._warp(w), lanes)

    def global_write(
        self, w: Warp, starts: np.ndarray, size: int, values: np.ndarray, lanes: Lanes
    ) -> None:
        nbytes = size * len(values)
        self._bytes(self._global, starts, nbytes, lambda: self._warp(w), lanes)

    def copy(
        self, work: Work, cta: Cta, offsets: np.ndarray, lanes: np.ndarray, nbytes: int
    ) -> None:
        self._bytes(self._shared(cta), offsets, nbytes, lambda: self._unit(work), lanes)

    def land(
        self,
        work: Work,
        places: list[Place],
        nbytes: int,
        signals: Signals,
        *,
        atomic: bool = False,
    ) -> None:
        for cta, offset in places:
            self._bytes(self._shared(cta), offset, nbytes, lambda: self._unit(work))

    def load(
        self, work: Work, source: Rows, places: list[Place], nbytes: int, signals: Signals
    ) -> None:
        self.land(work, places, nbytes, signals)

    def send(
        self,
        work: Work,
        source: Place,
        target: Place,
        nbytes: int,
        signal: MBarrier,
        *,
        atomic: bool = False,
    ) -> None:
        self.land(work, [target], nbytes, [signal])

    def bulk_write(
        self, work: Work, starts: np.ndarray, nbytes: int, *, atomic: bool = False
    ) -> None:
        self._bytes(self._global, starts, nbytes, lambda: self._unit(work))

    def tile_write(self, work: Work, tm: TensorMap, position: Position, image: np.ndarray) -> None:
        self.tile_reduce(work, tm, position)

    def tile_reduce(self, work: Work, tm: TensorMap, position: Position) -> None:
        if self._global:
            self._bytes(self._global, *box_rows(tm, position), lambda: self._unit(work))

    # -- columns ----------------------------------------------------------------------------

    def _columns(
        self, cta: Cta, cells: Callable[[], Cells], who: Callable[[], tuple[str, Instr | None]]
    ) -> None:
        """cells: as `check.footprints` counts them."""
        for history in self._of.get(("tensor", cta), ()):
            touched = _columns_of(cells())
            hit = touched[(touched >= history.low) & (touched < history.high)]
            if len(hit):
                self._add(history, who(), (int(hit.min()), int(hit.max())))

    def multiply(self, work: Work, ctas: Sequence[Cta], mma: Mma) -> None:
        for cta in ctas:
            self._columns(
                cta,
                lambda: accumulator_cells(mma.d, mma.instr, len(ctas)),
                lambda: self._unit(work),
            )

    def fill(
        self, work: Work, ctas: Sequence[Cta], address: int, desc: SmemDesc, shape: Fill
    ) -> None:
        for cta in ctas:
            self._columns(cta, lambda: filled_cells(address, shape), lambda: self._unit(work))

    def shift(self, work: Work, ctas: Sequence[Cta], address: int) -> None:
        for cta in ctas:
            self._columns(cta, lambda: shifted_cells(address), lambda: self._unit(work))

    def tensor_store(self, w: Warp, address: int, move: Move) -> None:
        def cells() -> Cells:
            return moved_cells(move, address, w.index % 4)

        self._columns(w.cta, cells, lambda: self._warp(w))

    def columns_allocated(self, w: Warp, column: int, count: int, pair: bool, told: int) -> None:
        agent = f"{w.name()} (allocated, contents undefined)"

        def cells() -> Cells:
            return column_cells(column, count)

        self._columns(w.cta, cells, lambda: (agent, self._program.running_instruction()))
        self._bytes(self._shared(w.cta), told, 4, lambda: self._warp(w))

    def columns_freed(self, w: Warp, column: int, count: int, pair: bool) -> None:
        for history in self._of.get(("tensor", w.cta), ()):
            self._settle(history)


def _columns_of(cells: Cells) -> np.ndarray:
    where = cells.index()
    if isinstance(where, slice):
        return np.arange(where.start // GROUPS, -(-where.stop // GROUPS))
    return np.unique(where // GROUPS)
