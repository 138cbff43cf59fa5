"""What the manual's text asks for and kernels known right on hardware do without: notes of
`Options.strict`, never errors. Each names the section that asks for it.
"""

from __future__ import annotations

from ptxemu.check.clocks import EXECUTED
from ptxemu.check.findings import Findings
from ptxemu.check.state import States
from ptxemu.machine.cta import Cta
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.warp import Warp
from ptxemu.report import NOTE, Finding, place_of

_NOTES = {  # name -> (what is said, what is missing, manual section)
    "wait::ld": (
        "tcgen05.ld is complete by a use of its registers only when this tells of it",
        "tcgen05.wait::ld",
        "tcgen05.wait",
    ),
    "before": (
        "tcgen05 operations of this thread come before a signal that orders them for others",
        "tcgen05.fence::before_thread_sync",
        "tcgen05.fence",
    ),
    "after": (
        "tcgen05 operations come after a wait that orders them behind those of others",
        "tcgen05.fence::after_thread_sync",
        "tcgen05.fence",
    ),
    # A release is of one thread, "Release Pattern". In CUTLASS's tutorial_tma/tma_v2.py one thread
    # of a warp releases a stage that all of its lanes have read, without a bar.warp.sync.
    "lanes": (
        "an arrival tells of its own lanes: others of the warp have accessed memory since they met",
        "bar.warp.sync before the arrival",
        "memory consistency model, release pattern; bar.warp.sync",
    ),
    "lanes written": (
        "an arrival tells of its own lanes: others of the warp have filled shared memory since",
        "bar.warp.sync before the arrival",
        "memory consistency model, release pattern; bar.warp.sync",
    ),
    "scope of arrival": (
        "an arrival at the mbarrier of a peer names no scope, and .cta is the default",
        ".release.cluster",
        "mbarrier.arrive",
    ),
    "scope of wait": (
        "a wait for what a peer has signalled names no scope, and .cta is the default",
        ".acquire.cluster",
        "mbarrier.test_wait / try_wait",
    ),
    # No error: the manual says when the source may be written again, and of an exit nothing. The
    # CUDA C++ Programming Guide waits in its examples of bulk stores; every CTA of CUTLASS's
    # tutorial_tma/tma_v0.py exits with its last store under way, and its results are right.
    "exit": (
        "the CTA may exit while its bulk copies still read its shared memory",
        "cp.async.bulk.wait_group.read",
        "cp.async.bulk.wait_group; CUDA C++ Programming Guide, Using TMA to transfer arrays",
    ),
    # FlashAttention-4's head_dim 256 allocates first, as CUTLASS's examples do not.
    "pair": (
        "tensor memory of a pair is allocated by a warp that does not know its peer to be running",
        "a cluster barrier before tcgen05.alloc",
        "tcgen05, CTA pair: the issuing thread makes sure that the peer CTA is launched",
    ),
}


class Manual:
    """Does nothing unless `strict`, but that tcgen05.fence completes a relaxed wait, and that bulk
    copies under way at an exit are told of: most authors forget the wait, few mean to."""

    def __init__(self, states: States, findings: Findings, strict: bool) -> None:
        self._states = states
        self._findings = findings
        self._strict = strict

    def tensor_used(self, w: Warp) -> None:
        """A tcgen05 operation is issued."""
        if self._strict:
            clock = self._states.clocks[w]
            if clock.woken_at is not None:
                self._note("after", w.at)
                clock.woken_at = None
            clock.tensor_at = w.at

    def fence_tensor(self, w: Warp, before: bool) -> None:
        """tcgen05.fence."""
        clock = self._states.clocks[w]
        if before:
            clock.tensor_at = None
        else:
            clock.woken_at = None
            clock.fence_tensor()

    def accessed(self, w: Warp, filled: bool) -> None:
        """Ordinary shared memory, or a write to global memory, by the lanes that are executing;
        filled: shared memory is written."""
        if self._strict:
            clock, mask = self._states.clocks[w], w.frag.mask
            clock.touched |= mask
            clock.stored = clock.stored | mask if filled else clock.stored

    def told_others(self, w: Warp) -> None:
        """An arrival of any kind."""
        if self._strict:
            clock = self._states.clocks[w]
            others = w.live & ~w.frag.mask
            if clock.touched & others:
                self._note("lanes written" if clock.stored & others else "lanes", w.at)
            elif not others:
                clock.touched = clock.stored = 0
            if clock.tensor_at is not None:
                self._note("before", w.at)
                clock.tensor_at = None  # one fence here would do for later signals, too
            if clock.issued.get("tcgen05.ld", 0) > clock.waited_loads:
                self._note("wait::ld", w.at)

    def heard_others(self, w: Warp) -> None:
        """The end of a wait of any kind."""
        if self._strict:
            self._states.clocks[w].woken_at = w.at

    def scope_of_arrival(self, w: Warp, cta: Cta, how: tuple[str, ...]) -> None:
        if self._strict and cta is not w.cta and "cluster" not in how:
            self._note("scope of arrival", w.at)

    def scope_of_wait(self, w: Warp, barrier: MBarrier, how: tuple[str, ...]) -> None:
        if self._strict and self._states.phases[barrier].from_peers and "cluster" not in how:
            self._note("scope of wait", w.at)

    def allocated(self, w: Warp, pair: bool) -> None:
        """tcgen05.alloc. A warp knows its peer to be running if anything of it has been told."""
        if self._strict and pair:
            clocks, rows = self._states.clocks, self._states.clocks[w].rows
            peer = w.cluster.ctas[w.cta.rank ^ 1] if len(w.cluster.ctas) > w.cta.rank ^ 1 else None
            owns = [clock.own for each, clock in clocks.items() if each.cta is peer]
            if not any(own < rows.shape[1] and rows[EXECUTED, own] for own in owns):
                self._note("pair", w.at)

    def copies_at_exit(self, w: Warp) -> None:
        """A warp ends."""
        clock = self._states.clocks[w]
        component = clock.streams.get("bulk read")
        if component is not None and not clock.knows(component, clock.issued["bulk read"]):
            self._note("exit", clock.issued_at["bulk read"])

    def _note(self, name: str, site: int) -> None:
        if self._findings.new(name, site):
            message, missing, rule = _NOTES[name]
            place = place_of(self._findings.sites[site])
            found = Finding("manual", message, NOTE, **place, missing=missing, rule=rule)
            self._findings.report(found)
