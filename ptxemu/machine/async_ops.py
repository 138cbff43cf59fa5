"""Work that completes later than it was issued: bulk copies, tensor-core operations, cp.async.

Everything asynchronous is a `Work` in some queue. A queue completes in order; different queues are
independent. Under round-robin a work runs when it is issued; under the other policies the scheduler
runs queue heads when it sees fit, and waits (`wait_group`, mbarriers) force what they wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ptxemu.errors import PtxEmuError
from ptxemu.syntax.tree import Instr


class Work:
    """Asynchronous operation of one unit.

    unit: where the operation runs ("tma", "tensor core").
    steps: functions called with the work itself. A store has a second step, which writes what
        the first one read.
    stream: the group of operations of the warp that a wait counts this one with; "" if mbarriers
        signal its completion.
    """

    __slots__ = (
        *("unit", "label", "steps", "size", "stream", "releases", "queue", "instr", "warp"),
        "site",
    )

    def __init__(
        self,
        unit: str,
        label: str,
        *steps: Callable[[Work], None],
        size: int = 0,
        stream: str = "",
        releases: bool = False,
    ) -> None:
        self.unit = unit
        self.label = label
        self.steps = list(steps)
        self.stream = stream
        self.releases = releases  # with it, what its thread did before is told to others
        self.size = size  # bytes, or floating-point operations
        self.queue: WorkQueue | None = None
        self.instr: Instr | None = None  # who issued it, where it can outlive the instruction
        self.warp = ""
        self.site = -1  # the number of that instruction

    def advance(self) -> None:
        try:
            self.steps.pop(0)(self)
        except PtxEmuError as error:
            if self.instr is not None:
                line, text, source = self.instr.line, self.instr.text, self.instr.source
                error.at(line=line, text=text, where=self.warp, source=source)
            raise


@dataclass(eq=False, slots=True)
class WorkQueue:
    """Queue of asynchronous work that runs in order, such as the tcgen05 pipe of a CTA."""

    works: deque[Work] = field(default_factory=deque)


@dataclass(eq=False)
class AsyncUnits:
    """All outstanding work of a launch. `eager` runs everything at issue."""

    eager: bool
    note: Callable[[], None]
    listeners: tuple[Any, ...] = ()  # `ptxemu.machine.listener.Listener`, which stands above
    open: list[WorkQueue] = field(default_factory=list)  # with outstanding work, oldest first
    acting: Work | None = None  # whose step runs now

    def at_once(self, queue: WorkQueue | None) -> bool:
        """Whether work that is issued to the queue now runs now."""
        return self.eager and not (queue and queue.works)

    def issue(self, work: Work, queue: WorkQueue | None = None) -> Work:
        if self.at_once(queue):
            while work.steps:
                self._advance(work)
            self.note()
            return work
        queue = queue or WorkQueue()
        work.queue = queue
        queue.works.append(work)
        if len(queue.works) == 1:
            self.open.append(queue)
        return work

    def _advance(self, work: Work) -> None:
        for each in self.listeners:
            each.step_began(work)
        outer, self.acting = self.acting, work
        try:
            work.advance()
        finally:
            self.acting = outer
        for each in self.listeners:
            each.step_ended(work)

    def run_one(self, position: int = -1) -> None:
        """Run the next step of the head of one open queue."""
        self.run_head(self.open[position])

    def run_starving(self, unit: str) -> None:
        """Run one step, newest queue first, of any unit but `unit` while there is one."""
        others = [queue for queue in self.open if queue.works[0].unit != unit]
        self.run_head(others[-1] if others else self.open[-1])

    def run_head(self, queue: WorkQueue) -> None:
        work = queue.works[0]
        self._advance(work)
        self.note()
        if not work.steps:
            queue.works.popleft()
            if not queue.works:
                self.open.remove(queue)

    def force(self, work: Work, steps_left: int = 0) -> None:
        """Run until `work` has at most `steps_left` steps outstanding."""
        while work.queue is not None and len(work.steps) > steps_left:
            self.run_head(work.queue)


@dataclass(eq=False, slots=True)
class BulkGroups:
    """The async-groups of a thread: commit_group closes one, wait_group waits for old ones.

    PTX ISA "cp.async.bulk.commit_group / wait_group". Kept per warp: one elected lane issues.
    """

    units: AsyncUnits
    current: list[Work] = field(default_factory=list)
    groups: deque[list[Work]] = field(default_factory=deque)

    def add(self, work: Work) -> None:
        if work.steps:
            self.current.append(work)

    def commit(self) -> None:
        self.groups.append(self.current)
        self.current = []

    def wait(self, allowed: int, read_only: bool) -> None:
        """All but the newest `allowed` groups: sources read, or complete."""
        oldest = len(self.groups) - allowed
        for group in list(self.groups)[: max(oldest, 0)]:
            for work in group:
                self.units.force(work, steps_left=1 if read_only else 0)
        while self.groups and not any(work.steps for work in self.groups[0]):
            self.groups.popleft()
