"""Notes on rules of the manual that kernels known to be right on hardware break; never errors.

Each note names the section with the rule. Rules in `_ALWAYS` are usually broken by mistake and are
always reported. The others are reported with `Options.strict`.
"""

from __future__ import annotations

import numpy as np

from ptxemu.check.agents import Ticket
from ptxemu.check.clocks import ASYNC_SHARED, COMPONENT_SHIFT, EXECUTED, STEP_MASK, STEP_SHIFT
from ptxemu.check.findings import Findings, line_of
from ptxemu.check.footprints import Cells
from ptxemu.check.state import PhaseClock, States
from ptxemu.findings import MANUAL, NOTE, Finding, place_of
from ptxemu.machine.state import Cta, Warp

_NOTES = {  # name -> (message, what is missing, manual section)
    # No error by itself: see `tensor_loads`, which knows when such a use is too late for a signal.
    "wait::ld": (
        "registers of tcgen05.ld are used before a tcgen05.wait::ld: only the hardware's scoreboard"
        " makes that wait, and a signal in between may come before the use",
        "tcgen05.wait::ld between the two",
        "tcgen05.wait",
    ),
    "wait::ld before": (
        "tcgen05.ld is not known to be complete when this signals it",
        "tcgen05.wait::ld",
        "tcgen05.wait",
    ),
    "before": (
        "tcgen05 operations of this thread come before a signal that orders them for others",
        "tcgen05.fence::before_thread_sync",
        "tcgen05.fence",
    ),
    "after": (
        "tcgen05 operations come after a wait that orders them after those of others",
        "tcgen05.fence::after_thread_sync",
        "tcgen05.fence",
    ),
    # A release is of one thread, "Release Pattern". In CUTLASS's tutorial_tma/tma_v2.py one thread
    # of a warp releases a stage that all of its lanes have read, without a bar.warp.sync.
    "lanes": (
        "an arrival covers only its own lanes: others have accessed memory since they converged",
        "bar.warp.sync before the arrival",
        "memory consistency model, release pattern; bar.warp.sync",
    ),
    "lanes written": (
        "an arrival covers only its own lanes: others have filled shared memory since",
        "bar.warp.sync before the arrival",
        "memory consistency model, release pattern; bar.warp.sync",
    ),
    "scope of arrival": (
        "an arrival at the mbarrier of a peer names no scope, and .cta is the default",
        ".release.cluster",
        "mbarrier.arrive",
    ),
    "scope of arrival, cta": (
        "an arrival at the mbarrier of a peer is of scope .cta: it orders no memory for the peer",
        ".release.cluster",
        "mbarrier.arrive",
    ),
    "scope of wait": (
        "a wait for what a peer has signalled names no scope, and .cta is the default",
        ".acquire.cluster",
        "mbarrier.test_wait / try_wait",
    ),
    "scope of wait, cta": (
        "a wait for what a peer has signalled is of scope .cta: it orders no memory of the peer",
        ".acquire.cluster",
        "mbarrier.test_wait / try_wait",
    ),
    # No error: the manual defines when the source may be written again, but says nothing of an
    # exit. The CUDA C++ Programming Guide waits in its examples of bulk stores. Every CTA of
    # CUTLASS's tutorial_tma/tma_v0.py exits with its last store in progress, and its results are
    # right. An H100 was tested (conformance/questions.py): 1,056 CTAs fill 192 KiB each, store them
    # (one copy, 32 pieces, or 4 boxes) and exit at once. None left a wrong word in 3 launches per
    # way, 156 million words, though the next CTAs fill the same shared memory.
    "exit": (
        "the CTA may exit while its bulk copies still read its shared memory",
        "cp.async.bulk.wait_group.read",
        "cp.async.bulk.wait_group; CUDA C++ Programming Guide, Using TMA to transfer arrays",
    ),
    # cp.async is of the generic proxy ("Async proxy" names those of the other one). CUTLASS's
    # sm100_mma_cpasync_warpspecialized.hpp and sm90_mma_multistage_gmma_ss_warpspecialized.hpp, and
    # FlashAttention-4's pages, go from cp.async.mbarrier.arrive to the tensor core without a fence;
    # its flash_bwd_mla_dq_dqv_sm100.py waits for groups and has one.
    "copied": (
        "the async proxy reads or overwrites what cp.async has written in the generic proxy",
        "fence.proxy.async after the wait for the copies",
        "async proxy; membar / fence",
    ),
    # CUTLASS and examples of the CUDA C++ Programming Guide have one of the two fences. Triton and
    # Gluon have a bar.sync alone between mbarrier.init and TMA loads on Hopper, or tcgen05.commit
    # on Blackwell, and so has cuda::memcpy_async with a cuda::barrier. Triton's TLX dropped the
    # proxy fence after a test on hardware (facebookexperimental/triton #1553).
    "init": (
        "the async proxy signals an mbarrier whose mbarrier.init no fence has made visible to it:"
        " a barrier orders threads, hardware needs no more, the manual asks for a proxy fence",
        "fence.mbarrier_init or fence.proxy.async after mbarrier.init, by the thread that executes"
        " it, before the barrier",
        "membar / fence; async proxy",
    ),
    # FlashAttention-4's head_dim 256 allocates first, as CUTLASS's examples do not.
    "pair": (
        "tensor memory of a pair is allocated by a warp that cannot know that its peer runs",
        "a cluster barrier before tcgen05.alloc",
        "tcgen05, CTA pair: the issuing thread makes sure that the peer CTA is launched",
    ),
}

_ALWAYS = {
    *("wait::ld", "lanes written", "scope of arrival, cta", "scope of wait, cta", "exit", "init"),
}


class Manual:
    """Tracks what the notes concern and reports them according to `strict`.

    tcgen05.fence completes a relaxed wait in any case.
    """

    def __init__(self, states: States, findings: Findings, strict: bool) -> None:
        self._states = states
        self._findings = findings
        self.strict = strict

    def tensor_used(self, w: Warp) -> None:
        """A tcgen05 operation is issued."""
        if self.strict:
            clock = self._states.clocks[w]
            if clock.woken_at is not None:
                self._note("after", w.at)
                clock.woken_at = None
            clock.tensor_at = w.at

    def used(self, w: Warp, load_site: int) -> None:
        """Called when a register of the tcgen05.ld at `load_site` is used before a wait."""
        use = self._findings.sites[w.at]
        self._note("wait::ld", load_site, f"the first use is {use.opcode} at {line_of(use)}")

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
        clock, mask = self._states.clocks[w], w.frag.mask
        clock.touched |= mask
        clock.stored = clock.stored | mask if filled else clock.stored

    def told_others(self, w: Warp) -> None:
        """An arrival of any kind, by the lanes that are executing."""
        clock, mask = self._states.clocks[w], w.frag.mask
        others = w.live & ~mask
        if clock.touched & others:
            self._note("lanes written" if clock.stored & others else "lanes", w.at)
        clock.touched &= ~mask
        clock.stored &= ~mask
        if clock.tensor_at is not None:
            self._note("before", w.at)
            clock.tensor_at = None  # one fence here would do for later signals, too
        if clock.open_loads:
            self._note("wait::ld before", w.at)

    def heard_others(self, w: Warp) -> None:
        """The end of a wait of any kind."""
        if self.strict:
            self._states.clocks[w].woken_at = w.at

    def scope_of_arrival(self, w: Warp, cta: Cta, how: tuple[str, ...]) -> None:
        if cta is not w.cta and "cluster" not in how:
            self._note("scope of arrival, cta" if "cta" in how else "scope of arrival", w.at)

    def scope_of_wait(self, w: Warp, how: tuple[str, ...]) -> None:
        """A wait for an mbarrier at which threads of other CTAs arrive."""
        narrow = "cta" in how
        if "cluster" not in how and (narrow or self.strict):
            self._note("scope of wait, cta" if narrow else "scope of wait", w.at)

    def allocated(self, w: Warp, pair: bool) -> None:
        """Check tcgen05.alloc. A warp knows its peer runs if it has learned anything of it."""
        if self.strict and pair:
            clocks, rows = self._states.clocks, self._states.clocks[w].rows
            peer = w.cluster.ctas[w.cta.rank ^ 1] if len(w.cluster.ctas) > w.cta.rank ^ 1 else None
            owns = [clock.own for each, clock in clocks.items() if each.cta is peer]
            if not any(own < rows.shape[1] and rows[EXECUTED, own] for own in owns):
                self._note("pair", w.at)

    def touched(self, ticket: Ticket, last: np.ndarray, cells: Cells) -> None:
        """An asynchronous operation reads or overwrites cells of shared memory; `last`: the last
        writes of all of it."""
        if self.strict and ticket.asynchronous:
            seen, last = ticket.rows[ASYNC_SHARED], last[cells.index()]
            for number, component in enumerate(ticket.components.known[: len(seen)]):
                if component.kind == "cp.async":
                    steps = np.where(last >> COMPONENT_SHIFT == number, last >> STEP_SHIFT, 0)
                    if (steps & STEP_MASK).max(initial=0) > seen[number]:
                        self._note("copied", ticket.site)

    def unfenced_init(self, ticket: Ticket, phases: PhaseClock) -> None:
        """An operation of the async proxy signals an mbarrier without a fence after its init."""
        init = line_of(self._findings.sites[phases.init_site])
        self._note("init", ticket.site, f"mbarrier.init of {phases.agent} is at {init}")

    def copies_at_exit(self, w: Warp) -> None:
        """A warp ends."""
        clock = self._states.clocks[w]
        component = clock.streams.get("bulk read")
        if component is not None and not clock.knows(component, clock.issued["bulk read"]):
            self._note("exit", clock.issued_at["bulk read"])

    def _note(self, name: str, site: int, why: str = "") -> None:
        if (self.strict or name in _ALWAYS) and self._findings.new(name, site):
            message, missing, rule = _NOTES[name]
            place = place_of(self._findings.sites[site])
            found = Finding(MANUAL, message, NOTE, **place, missing=missing, rule=rule, why=why)
            self._findings.report(found)
