"""What the manual's text asks for and kernels known right on hardware do without: notes of
`Options.strict`, never errors. Each names the section that asks for it.
"""

from __future__ import annotations

from ptxemu.report import Finding, place_of

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
    "exit": (
        "the CTA may exit while its bulk copies still read its shared memory",
        "cp.async.bulk.wait_group.read",
        "cp.async.bulk.wait_group",
    ),
}


class Manual:
    """The part of the checker that goes by the manual alone. Does nothing unless `strict`, but that
    tcgen05.fence completes a relaxed wait."""

    machine: object
    sites: list
    strict: bool

    def tensor_used(self, w: object) -> None:
        """A tcgen05 operation is issued."""
        if self.strict:
            if w.clock.woken_at is not None:
                self._note("after", w.at)
                w.clock.woken_at = None
            w.clock.tensor_at = w.at

    def tensor_fence(self, w: object, before: bool) -> None:
        """tcgen05.fence."""
        if before:
            w.clock.tensor_at = None
        else:
            w.clock.woken_at = None
            w.clock.fence_tensor()

    def told_others(self, w: object) -> None:
        """An arrival of any kind."""
        if self.strict:
            if w.clock.tensor_at is not None:
                self._note("before", w.at)
            if w.clock.issued.get("tcgen05.ld", 0) > w.clock.waited_loads:
                self._note("wait::ld", w.at)

    def heard_others(self, w: object) -> None:
        """The end of a wait of any kind."""
        if self.strict:
            w.clock.woken_at = w.at

    def scope_of_arrival(self, w: object, cta: object, how: tuple[str, ...]) -> None:
        if self.strict and cta is not w.cta and "cluster" not in how:
            self._note("scope of arrival", w.at)

    def scope_of_wait(self, w: object, barrier: object, how: tuple[str, ...]) -> None:
        if self.strict and barrier.clock_of.from_peers and "cluster" not in how:
            self._note("scope of wait", w.at)

    def copies_at_exit(self, w: object) -> None:
        """A warp ends."""
        if self.strict:
            component = w.clock.streams.get("bulk read")
            if component is not None and not w.clock.knows(component, w.clock.issued["bulk read"]):
                self._note("exit", w.at)

    def _note(self, name: str, site: int) -> None:
        if (name, site) in self._known:
            return
        self._known.add((name, site))
        message, missing, rule = _NOTES[name]
        instr = self.sites[site]
        finding = Finding(
            "manual",
            message,
            severity="note",
            **place_of(instr),
            missing=missing,
            rule=rule,
        )
        self.machine.report(finding)
