"""Snapshot of a machine in which no warp can go on, as plain data: each waiting warp, and for what.

`observe` looks at the resident CTAs when the scheduler gives up. Its result keeps neither the
machine nor its program alive; `ptxemu.check.deadlock` turns it into text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ptxemu.codegen.program import Program
from ptxemu.machine.fragment import Fragment
from ptxemu.machine.mbarrier import MBarrier, Signal
from ptxemu.machine.state import Cluster, Cta, NamedBarrier, Warp
from ptxemu.syntax.tree import Instr

Key = tuple[str, str, int]  # 'mbarrier', 'barrier' or 'cluster'; name of a CTA; offset or number
_POLLS = ("ld", "atom", "mbarrier", "ldu", "red")


@dataclass(frozen=True)
class Who:
    """A warp. `cluster` counts them in the order of their launch."""

    index: int
    cta: str
    cluster: int

    @property
    def name(self) -> str:
        return f"warp {self.index} of {self.cta}"


@dataclass(frozen=True)
class Waiting:
    """Lanes of a warp that cannot go on.

    lanes: bit mask.
    block: index of the block in the program where the lanes are.
    kind: 'mbarrier', 'barrier', 'cluster', 'lanes' (the other lanes of the warp), 'memory' (a
        loop that reads it) or 'other' (described by `text`).
    on: the object of that kind.
    polls: whether the lanes test the object in a loop instead of waiting.
    """

    who: Who
    lanes: int
    block: int
    instr: Instr | None
    kind: str
    on: Key | None = None
    parity: int = 0
    polls: bool = False
    text: str = ""


@dataclass(frozen=True)
class Signalled:
    """A `machine.mbarrier.Signal`, its instruction looked up; `now`: in the present phase."""

    kind: str
    agent: str
    instr: Instr | None
    times: int
    amount: int
    now_times: int
    now_amount: int
    last_phase: int


@dataclass(frozen=True)
class Barrier:
    """An mbarrier, a named barrier or a cluster barrier that a warp waits for.

    phase: number of completed phases.
    expected: number of arrivals of a phase; of threads, except for mbarriers.
    pending: number of these arrivals that are missing.
    tx: announced bytes that have not landed; negative if more landed than were announced.
    arrived: names of the warps that have arrived, unless `signals` has them.
    seen: number of phases that each warp last found complete.
    elsewhere: signals of mbarriers at the same offset in other CTAs of the cluster, with the CTA.
    """

    key: Key
    phase: int
    expected: int
    pending: int
    tx: int = 0
    signals: tuple[Signalled, ...] = ()
    arrived: tuple[str, ...] = ()
    seen: dict[str, int] = field(default_factory=dict[str, int], compare=False)
    elsewhere: tuple[tuple[str, Signalled], ...] = ()


@dataclass(frozen=True)
class Slip:
    """A successful wait that was not for the next phase, as a checker has seen it.

    on: the mbarrier.
    before, now: completed phases when the warp last waited there with success, and at this wait.
    """

    who: Who
    on: Key
    instr: Instr
    before: int
    now: int


@dataclass(frozen=True)
class Stall:
    """All lanes that cannot go on, the barriers they wait for, and the warps that have exited.

    exited: warps that have exited in CTAs that still run.
    executed: blocks that some warp of these CTAs has executed.
    ctas: number of CTAs that still run.
    opcodes: what each warp of a CTA has executed.
    inits: the mbarrier.init of each address.
    overdrawn: mbarriers on which more bytes have landed than were announced.
    ran: blocks that each warp has executed, by the name of the warp.
    slips: by name of a warp, the first of its waits that were not for the next phase.
    """

    waiting: tuple[Waiting, ...]
    barriers: dict[Key, Barrier]
    exited: tuple[Who, ...]
    executed: frozenset[int]
    ctas: int
    opcodes: dict[int, Counter[str]]
    inits: dict[int, Instr] = field(default_factory=dict[int, Instr])
    overdrawn: tuple[Barrier, ...] = ()
    ran: dict[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    slips: dict[str, Slip] = field(default_factory=dict[str, Slip], compare=False)

    @property
    def headline(self) -> str:
        polls = any(w.polls and w.instr and "try_wait" not in w.instr.text for w in self.waiting)
        return "warps poll without end" if polls else "no warp can go on"


def observe(program: Program, clusters: Iterable[Cluster]) -> Stall:
    """Return what the warps of the resident clusters wait for."""
    ctas = [cta for cluster in clusters for cta in cluster.ctas]
    warps = [warp for cta in ctas for warp in cta.warps]
    waiting, barriers = [], {}
    opcodes: dict[int, Counter[str]] = {}
    for warp in warps:
        done = opcodes.setdefault(warp.index, Counter())
        for pc, times in enumerate(warp.counts):
            done.update(program.opcode_counts(pc) if times else ())
        runnable = warp.live and warp.runnable_now()
        for frag in warp.frags if warp.live else ():
            one, target = _waiting(program, warp, frag, runnable=bool(runnable))
            waiting.append(one)
            if one.on is not None and one.on not in barriers:
                barriers[one.on] = _barrier(program, one.on, target, warp.cluster)
    return Stall(
        tuple(waiting),
        barriers,
        tuple(_who(warp) for warp in warps if not warp.live),
        frozenset(pc for warp in warps for pc, count in enumerate(warp.counts) if count),
        len(ctas),
        opcodes,
        {offset: instr for cta in ctas for offset, instr in inits_of(program, cta)},
        tuple(
            _barrier(program, ("mbarrier", cta.name(), offset), barrier, cta.cluster)
            for cta in ctas
            for offset, barrier in sorted(cta.mbarriers.items())
            if barrier.tx < 0
        ),
        {
            _who(warp).name: frozenset(pc for pc, count in enumerate(warp.counts) if count)
            for warp in warps
        },
    )


def inits_of(program: Program, cta: Cta) -> Iterator[tuple[int, Instr]]:
    """The mbarrier.init of each address, where it is known."""
    for offset, barrier in cta.mbarriers.items():
        for signal in barrier.signals.values():
            instr = _site(program, signal) if signal.kind == "init" else None
            if instr is not None:
                yield offset, instr


def _who(warp: Warp) -> Who:
    return Who(warp.index, warp.cta.name(), warp.cluster.index)


def _waiting(
    program: Program, warp: Warp, frag: Fragment, *, runnable: bool
) -> tuple[Waiting, Any]:
    """Return how the lanes of `frag` wait, and the object they wait for."""
    who, target = _who(warp), frag.wait
    pc, parity, polls = frag.pc, 0, False
    kind, on, text = "other", None, ""
    if target is None and runnable and warp.together(frag):
        polls = True
        if frag.polls is not None and not frag.polls[0].done(frag.polls[1]):
            target = frag.polls[:2]
            pc = frag.polls[2]
        else:
            kind = "memory"
    elif target is None:
        kind = "lanes"
    if isinstance(target, tuple):
        target, parity = target
        kind, on = "mbarrier", ("mbarrier", *_address(target))
    elif isinstance(target, NamedBarrier):
        kind, on = "barrier", ("barrier", target.cta.name(), target.ident)
    elif isinstance(target, Cluster):
        kind, on = "cluster", ("cluster", target.ctas[0].name(), target.index)
    elif target is not None:
        text = str(target)
    instr = _instruction(program, pc, polls)
    return Waiting(who, frag.mask, pc, instr, kind, on, parity, polls, text), target


def _address(barrier: MBarrier) -> tuple[str, int]:
    return barrier.owner, barrier.offset


def _instruction(program: Program, pc: int, polls: bool) -> Instr | None:
    """Return the first instruction of a block; in a polling block the first that may read shared
    state."""
    steps = [step.instr for step in program.blocks[pc].steps]
    looks = [instr for instr in steps if polls and instr.root in _POLLS]
    found = looks or steps
    return found[0] if found else None


def _barrier(program: Program, key: Key, target: Any, cluster: Cluster) -> Barrier:
    if isinstance(target, MBarrier):
        counts = target.phase, target.expected, target.pending, target.tx
        others = [(cta.name(), cta.mbarriers.get(key[2])) for cta in cluster.ctas]
        elsewhere = tuple(
            (cta, signal)
            for cta, other in others
            if other is not None and cta != key[1]
            for signal in _all_signals(program, other)
        )
        signals = tuple(_all_signals(program, target))
        return Barrier(key, *counts, signals, seen=dict(target.seen), elsewhere=elsewhere)
    if isinstance(target, NamedBarrier):
        expected = target.expected()
        return Barrier(key, 0, expected, expected - target.arrived, arrived=tuple(target.agents))
    threads = target.live_threads()
    arrived = tuple(w.label for cta in target.ctas for w in cta.warps if w.live & w.cluster_lanes)
    return Barrier(key, target.phase, threads, threads - target.arrived, arrived=arrived)


def _all_signals(program: Program, barrier: MBarrier) -> Iterator[Signalled]:
    return (_signalled(program, each, barrier) for each in barrier.signals.values())


def _signalled(program: Program, signal: Signal, barrier: MBarrier) -> Signalled:
    now = signal.phase == barrier.phase
    return Signalled(
        signal.kind,
        signal.agent,
        _site(program, signal),
        signal.times,
        signal.amount,
        signal.now_times if now else 0,
        signal.now_amount if now else 0,
        signal.phase,
    )


def _site(program: Program, signal: Signal) -> Instr | None:
    return program.sites[signal.site] if signal.site >= 0 else None
