"""The last events of a launch, as text: what happened right before a fault or a deadlock.

An event costs an entry of a ring; words are made only when somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ptxemu.check.barrier_names import BarrierNames, Given
from ptxemu.inspect.snapshot import short_text
from ptxemu.machine.deadlock import inits_of
from ptxemu.machine.fragment import Waiters
from ptxemu.machine.listener import How, Listener

if TYPE_CHECKING:
    from ptxemu.codegen.program import Program
    from ptxemu.machine.async_ops import Work
    from ptxemu.machine.mbarrier import MBarrier
    from ptxemu.machine.state import Cluster, Cta, NamedBarrier, Warp
    from ptxemu.machine.tmem import Move, PendingLoad
    from ptxemu.syntax.tree import Instr

Words = Callable[[], str]


class _Run:
    """Blocks that a warp ran one after the other; `waits`: the last one has not ended."""

    __slots__ = ("name", "first", "last", "blocks", "waits")

    def __init__(self, name: str, block: int) -> None:
        self.name = name
        self.first = self.last = block
        self.blocks = 1
        self.waits = True


class Recent(Listener):
    """Keeps the newest `size` events; blocks that one warp runs without another event are one.

    names: of mbarriers, `Options.names`.
    """

    every_block = True

    def __init__(self, program: Program, size: int, names: Given | None = None) -> None:
        self._program = program
        self._names = names
        self._inits: dict[int, Instr] = {}
        self._events: deque[tuple[int, _Run | Words]] = deque(maxlen=size)
        self._count = 0

    def lines(self) -> list[str]:
        """Oldest first, numbered since the launch began."""
        if not self._events:
            return []
        head = f"the last {len(self._events)} of {self._count} events"
        told = BarrierNames(self._names, self._program.layout, self._inits).text
        return [
            head,
            *(f"  {number:>6} {told(self._words(event))}" for number, event in self._events),
        ]

    def _words(self, event: _Run | Words) -> str:
        if not isinstance(event, _Run):
            return event()
        blocks = f"{event.blocks} blocks" if event.blocks > 1 else "1 block"
        verb = "stands in the last of" if event.waits else "ran"
        return f"{event.name}: {verb} {blocks}, {self._place(event)}"

    def _place(self, run: _Run) -> str:
        """Describe a run from its first line on; a wait is at the beginning of a block."""
        first, last = self._program.blocks[run.first].steps, self._program.blocks[run.last].steps
        if not (first and last):
            return f"from block {run.first} to {run.last}"
        end = (last[0] if run.waits else last[-1]).instr
        lines = f"PTX lines {first[0].instr.line}..{end.line}"
        return f"{lines} `{short_text(end)}` {end.source}".rstrip()

    def _put(self, event: _Run | Words) -> None:
        self._count += 1
        self._events.append((self._count, event))

    # -- warps ------------------------------------------------------------------------------

    def block_began(self, w: Warp) -> None:
        last = self._events[-1][1] if self._events else None
        name, block = w.label, w.frag.pc
        if isinstance(last, _Run) and last.name == name:
            if not (last.waits and last.last == block):
                last.blocks += 1
            last.last, last.waits = block, True
            return
        self._put(_Run(name, block))

    def block_ended(self, w: Warp, instructions: int) -> None:
        for _, event in reversed(self._events):
            if isinstance(event, _Run) and event.name == w.label:
                event.waits = False
                return

    def warp_ended(self, w: Warp) -> None:
        self._put(lambda: f"{w.label}: exited")

    def cta_started(self, cta: Cta) -> None:
        self._put(lambda: f"{cta.name()}: started")

    def cta_ended(self, cta: Cta) -> None:
        self._put(lambda: f"{cta.name()}: ended")

    # -- synchronisation ----------------------------------------------------------------------

    def mbarrier_initialised(self, w: Warp, cta: Cta, barrier: MBarrier) -> None:
        self._inits |= dict(inits_of(self._program, cta))
        text = f"{w.label}: initialises mbarrier {barrier.where} for {barrier.expected} arrivals"
        self._put(lambda: text)

    def mbarrier_arrival(
        self, w: Warp, cta: Cta, barrier: MBarrier, how: How, count: tuple[int, int] = (1, 1)
    ) -> None:
        pending, phase, tx = barrier.pending, barrier.phase, barrier.tx
        self._put(
            lambda: (
                f"{w.label}: arrives {count[0] * count[1]} x at mbarrier {barrier.where},"
                f" phase {phase}, before it {pending} arrivals and {tx} bytes outstanding"
            )
        )

    def mbarrier_completed(self, barrier: MBarrier) -> None:
        phase = barrier.phase - 1
        self._put(lambda: f"mbarrier {barrier.where}: phase {phase} complete")

    def mbarrier_waited(self, w: Warp, cta: Cta, barrier: MBarrier, parity: int, how: How) -> None:
        self._put(
            lambda: f"{w.label}: passes its wait for parity {parity} of mbarrier {barrier.where}"
        )

    def barrier_arrival(self, w: Warp, barrier: NamedBarrier) -> None:
        arrived = barrier.arrived
        self._put(
            lambda: f"{w.label}: arrives at barrier {barrier.ident}, {arrived} threads before it"
        )

    def barrier_completed(self, barrier: NamedBarrier, waiters: Waiters) -> None:
        self._put(lambda: f"barrier {barrier.ident} of {barrier.cta.name()}: complete")

    def cluster_arrival(self, w: Warp, relaxed: bool) -> None:
        self._put(lambda: f"{w.label}: arrives at the cluster barrier")

    def cluster_completed(self, cluster: Cluster) -> None:
        phase = cluster.phase
        self._put(lambda: f"cluster barrier: phase {phase} complete")

    # -- asynchronous work --------------------------------------------------------------------

    def issued(self, w: Warp, work: Work) -> None:
        self._put(lambda: f"{w.label}: issues {_unit(work)} {work.label}")

    def step_ended(self, work: Work) -> None:
        what = "completes" if not work.steps else "has read its source"
        self._put(lambda: f"{_unit(work)}: {work.label} {what}")

    # -- tensor memory ------------------------------------------------------------------------

    def columns_allocated(self, w: Warp, column: int, count: int, pair: bool, told: int) -> None:
        self._put(lambda: f"{w.label}: allocates {count} TMEM columns at {column}")

    def columns_freed(self, w: Warp, column: int, count: int, pair: bool) -> None:
        self._put(lambda: f"{w.label}: frees {count} TMEM columns at {column}")

    def tensor_load(self, w: Warp, load: PendingLoad) -> None:
        self._put(lambda: f"{w.label}: issues tcgen05.ld of column {load.address & 0xFFFF}")

    def tensor_store(self, w: Warp, address: int, move: Move) -> None:
        self._put(lambda: f"{w.label}: issues tcgen05.st to column {address & 0xFFFF}")


def _unit(work: Work) -> str:
    return {"tma": "TMA"}.get(work.unit, work.unit)
