"""Reasons why two accesses are not ordered, as far as the launch shows them.

The evidence is the waits, commits and signals between them, and why they are not sufficient.
`missing` depends on the kinds of the two accesses alone and follows the PTX manual. `Evidence` adds
what was executed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ptxemu.check.agents import Agent, Ticket, WarpClock, foreign_seen
from ptxemu.check.clocks import ASYNC_GLOBAL, ASYNC_SHARED, EXECUTED, ORDERED
from ptxemu.check.findings import Side, line_of, short
from ptxemu.check.state import PhaseClock, States
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.syntax.tree import Instr

# kind of the earlier access's component -> what makes it known to others, and the manual section
MISSING = {
    "warp": ("a barrier, or an mbarrier arrival and a wait, between the two", "mbarrier, barrier"),
    "mbarrier": (
        "mbarrier.try_wait on the mbarrier that it completes on (consumer_wait of a pipeline)",
        "mbarrier.try_wait",
    ),
    "tensor core": (
        "tcgen05.commit to an mbarrier after it, and a wait on that mbarrier (of a pipeline:"
        " release or commit, and producer_acquire or consumer_wait)",
        "tcgen05.commit",
    ),
    "wgmma": (
        "wgmma.wait_group, and an arrival or a barrier after it, before its operands are"
        " overwritten",
        "wgmma.wait_group",
    ),
    "tcgen05.alloc": (
        "a barrier between the access and the allocation or deallocation",
        "tcgen05.alloc",
    ),
    "tcgen05.ld": (
        "tcgen05.wait::ld before the arrival, after which ptxas may move uses of the registers; in"
        " CuTe DSL cute.arch.fence_view_async_tmem_load()",
        "tcgen05.wait",
    ),
    "tcgen05.st": (
        "tcgen05.wait::st before the arrival; in CuTe DSL cute.arch.fence_view_async_tmem_store()",
        "tcgen05.wait",
    ),
    "bulk read": (
        "cp.async.bulk.wait_group.read before the source is overwritten",
        "cp.async.bulk.wait_group",
    ),
    "bulk write": ("cp.async.bulk.wait_group (not .read)", "cp.async.bulk.wait_group"),
    "cp.async": (
        "cp.async.wait_group, or cp.async.mbarrier.arrive and a wait",
        "cp.async.wait_group",
    ),
}
PEER = (
    "a cluster barrier, or an mbarrier arrival and a wait of scope .cluster, between the two",
    "mbarrier, barrier.cluster",
)
FLAG = (
    "a release by the other cluster and an acquire of it, at one address of global memory",
    "memory consistency model, release and acquire patterns",
)
FLAG_RELEASE = (
    "a release of the flag, or a fence between the access and the flag, of scope .gpu: what is"
    " relaxed, volatile or of scope .cta orders no memory for another cluster",
    FLAG[1],
)
FLAG_ACQUIRE = (
    "an acquire of the flag, or a fence after the load that saw it, of scope .gpu: what is relaxed,"
    " volatile or of scope .cta orders no memory of another cluster",
    FLAG[1],
)
FLAG_BOTH = (
    "a release of the flag and an acquire of it, or fences, of scope .gpu: what is relaxed,"
    " volatile or of scope .cta orders no memory between clusters",
    FLAG[1],
)
FLAG_BARRIER = (
    "a barrier of the CTA after the acquire of the flag: another warp has acquired it",
    "barrier; " + FLAG[1],
)
BARRIER_FLAG = (
    "a barrier of the other CTA between the access and the release of its flag, which another warp"
    " executes; else a release by the other cluster and an acquire of it",
    "barrier; " + FLAG[1],
)
WARP_SYNC = (
    "a barrier between the two (bar.warp.sync will do if it is among the lanes of this warp alone)",
    "bar.warp.sync",
)
OVERLAP = (
    "separate columns for what the instruction reads and what it writes: they overlap",
    "tcgen05.mma",
)
PROXY_FENCE = (
    "fence.proxy.async between the write and the operation; in CuTe DSL, for shared memory,"
    " cute.arch.fence_view_async_shared()",
    "membar / fence",
)
RELEASE = (
    "a barrier, or release and acquire semantics, of a scope that holds both (what is relaxed or "
    ".cta orders no memory for the other)",
    "memory consistency model, causality order",
)


def missing(before: Side, by: Agent) -> tuple[str, str]:
    """(likely missing instruction, manual section) where `by`, a warp or an asynchronous operation
    of one, is not ordered after the access `before` of its cluster."""
    earlier, clock = before.stamp, by.rows
    component = before.component
    if isinstance(by, Ticket) and (earlier.component, earlier.step) == by.position:
        return OVERLAP
    if not _heard(component.owner, component.kind, earlier.step, clock[EXECUTED]):
        return MISSING["warp"]
    if earlier.component >= clock.shape[1]:
        return MISSING[component.kind]
    known = clock[:, earlier.component]
    proxy = ASYNC_GLOBAL if before.space.startswith("global") else ASYNC_SHARED
    unfenced = by.asynchronous and known[proxy] < earlier.step
    copied = earlier.component == by.copied and known[ORDERED] >= earlier.step
    if copied or (earlier.component == by.own and not unfenced):
        return WARP_SYNC
    if known[ORDERED] >= earlier.step and unfenced and not component.asynchronous:
        return PROXY_FENCE
    if known[EXECUTED] >= earlier.step > known[ORDERED] and component.kind == "warp":
        return RELEASE
    return MISSING[component.kind]


def missing_abroad(before: Side, by: Agent, cluster: int) -> tuple[str, str]:
    """Return the missing edge, as `missing`, if `before` is of another cluster."""
    earlier, component = before.stamp, before.component
    seen = foreign_seen(by, cluster, False)
    if (
        by.asynchronous
        and earlier.component < len(seen)
        and seen[earlier.component] >= earlier.step
    ):
        return PROXY_FENCE
    if component.owner is not None and _heard(component.owner, component.kind, earlier.step, seen):
        return MISSING[component.kind]
    return _of_flag(before, by, cluster)


def _of_flag(before: Side, by: Agent, cluster: int) -> tuple[str, str]:
    """Return what is missing between an access of another cluster, `before`, and `by`.

    The flags whose values came from one side to the other may be too weak, or a barrier between
    one of them and the access may be missing.
    """
    number, step = before.stamp.component, before.stamp.step
    heard = _warp_of(by).heard_foreign.get(cluster)
    if heard is not None and number < heard.shape[1]:
        if heard[ORDERED, number] >= step:
            return FLAG_ACQUIRE
        if heard[EXECUTED, number] >= step:
            return FLAG_BOTH
    here, told = _flags_known(by, cluster)
    if any(number < rows.shape[1] and rows[EXECUTED, number] >= step for rows in here):
        return FLAG_RELEASE
    if any(number < rows.shape[1] and rows[ORDERED, number] >= step for rows in told):
        return FLAG_BARRIER
    return BARRIER_FLAG if here and _of_another(here[-1], before) else FLAG


def _of_another(told: np.ndarray, before: Side) -> bool:
    """Whether a flag was released by another warp than that of `before`: it knew more of itself."""
    own = told[ORDERED, before.stamp.component : before.stamp.component + 1].sum()
    count = min(len(before.known), told.shape[1])
    warps = [n for n in range(count) if before.known[n].kind == "warp"]
    return bool(told[ORDERED, warps].max(initial=0) > own)


def _flags_known(by: Agent, cluster: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return what flags of another cluster have told `by`, and what they have told other warps of
    its own CTA."""
    here: list[np.ndarray] = []
    others: list[np.ndarray] = []
    for known, since, told in by.components.foreign.get(cluster, ()):
        aware = known < by.rows.shape[1] and by.rows[ORDERED, known] >= since
        (here if aware else others).append(told)
    return here, others


def _heard(owner: Any, kind: str, step: int, seen: np.ndarray) -> bool:
    """The warp has told something after it issued this operation: what is missing is not that, but
    that it was told of the completion, too."""
    if owner is None or kind == "tensor core":
        return True
    if kind == "bulk write":
        kind = "bulk read"  # its two halves were issued as one
    told = seen[owner.own] if owner.own < len(seen) else 0
    return bool(told >= owner.begun[kind][step - 1])


_BY_OTHERS = {  # what is missing where another warp has issued the operation
    "cp.async": "cp.async.wait_group by each warp for its own copies and a barrier after it, or"
    " cp.async.mbarrier.arrive and a wait",
    "bulk read": "cp.async.bulk.wait_group.read by whoever stores and a barrier after it, before"
    " the source is overwritten",
}
_LONGEST = 40  # characters of an instruction that is shown whole
_COMMITS = {
    "cp.async": "cp.async.commit_group",
    "bulk read": "cp.async.bulk.commit_group",
    "bulk write": "cp.async.bulk.commit_group",
    "wgmma": "wgmma.commit_group",
}


class Reason(NamedTuple):
    """missing, rule, why: as in `Finding`."""

    missing: str
    rule: str
    why: str = ""


class Evidence:
    """sites: the instructions of the program."""

    def __init__(self, states: States, sites: list[Instr]) -> None:
        self._states = states
        self._sites = sites

    def reason(self, before: Side, by: Agent) -> Reason:
        """Return the reason why `by` is not ordered after access `before` of its cluster."""
        usual = Reason(*missing(before, by))
        kind = before.component.kind
        if usual[:2] == PROXY_FENCE:
            return usual
        if kind in _COMMITS:
            found = self._waiter(before, by)
            return self.of_group(kind, before.stamp.step, *found, by, usual) if found else usual
        if kind == "mbarrier":
            return self._of_phase(before, by, usual)
        if kind == "warp" and usual[:2] == MISSING["warp"]:
            cta = before.component.agent.partition(" of ")[2]
            usual = usual if cta == _warp_of(by).cta.name() else Reason(*PEER)
            return usual._replace(why=self._last_heard(before, by))
        return usual

    def words(self, site: int) -> str:
        """Return an instruction, whole if it is short, and its place."""
        instr = self._sites[site]
        text = " ".join(instr.text.split()).rstrip(" ;")
        text = short(instr.opcode) if len(text) > _LONGEST else text
        return f"`{text}` at {line_of(instr)}"

    # -- groups -------------------------------------------------------------------------------

    def of_group(
        self, kind: str, step: int, owner: WarpClock, groups: list[int], by: Agent, usual: Reason
    ) -> Reason:
        """Operation `step` of `kind`, for which `owner` waits; groups: the last one of each."""
        if owner is not _warp_of(by) and kind in _BY_OTHERS and usual[:2] == MISSING[kind]:
            usual = usual._replace(missing=_BY_OTHERS[kind])
        wait = owner.group_waits.get(kind)
        if wait is None or wait.issued < step:
            own = _warp_of(by).group_waits.get(kind)
            if own is None or owner is _warp_of(by):
                return usual
            why = f"{_name(by)} has waited, {self.words(own.site)}, only for its own operations"
            return usual._replace(why=why)
        agent = owner.agent
        if wait.covered >= step:
            if owner is _warp_of(by):
                return usual
            missing = f"a barrier, or an arrival and a wait, after {self.words(wait.site)}"
            why = f"{agent} has waited there for its own part, but does not signal {_name(by)}"
            return Reason(missing, "mbarrier, barrier", why)
        if not groups or groups[-1] < step:
            why = f"{agent} waits, {self.words(wait.site)}, but it is in no group"
            return Reason(f"{_COMMITS[kind]} after it, before the wait", _COMMITS[kind], why)
        why = f"the last wait of {agent}, {self.words(wait.site)}, leaves its group open"
        return usual._replace(why=why)

    def _waiter(self, before: Side, by: Agent) -> tuple[WarpClock, list[int]] | None:
        """Return the warp that has to wait, and the last operation of each of its groups."""
        component = before.component
        if component.kind != "wgmma":
            owner = component.owner
            return owner, owner.groups.get(component.kind, [])
        warp = _warp_of(by).warp
        group = self._states.warpgroups.get((warp.cluster.index, before.stamp.component))
        if group is None:
            return None
        if warp.cta is not group.cta or not 0 <= warp.index - group.first < len(group.progress):
            warp = group.cta.warps[group.first]
        return self._states.clocks[warp], group.of(warp).groups

    # -- mbarriers ----------------------------------------------------------------------------

    def _of_phase(self, before: Side, by: Agent, usual: Reason) -> Reason:
        """Bytes that have landed in a phase of an mbarrier."""
        found = self._barrier(before, by)
        if found is None:
            return usual
        barrier, phases = found
        phase = before.stamp.step - 1
        waiter = _warp_of(by)
        wait = waiter.phase_waits.get(phases.component)
        if barrier.phase == phase and barrier.tx < 0 and wait and wait[2] == phase:
            why = (
                f"{-barrier.tx} bytes more than were announced have landed on {phases.agent} in its"
                f" phase {phase}; phase {phase - 1}, which was waited for, was complete without"
            )
            missing = "expect_tx of all bytes that the copies of a phase bring"
            return Reason(missing, "mbarrier, expect-tx operation", why)
        if wait is None:
            if self._unheeded(waiter, phases):
                why = f"{waiter.agent} does not use what {self._unheeded(waiter, phases)} returns"
                return usual._replace(why=why)
            why = f"{waiter.agent} has not waited on {phases.agent}"
            other = self._same_ring(waiter, phases)
            if other is not None:
                why = f"{why}, but on {other.agent}, of the same ring: is it the right stage?"
            return usual._replace(why=why)
        site, parity, known = wait
        why = (
            f"the bytes land in phase {phase} of {phases.agent}; the last wait of {waiter.agent}"
            f" there, {self.words(site)} with parity {parity}, is sure of {_phases(known)}"
        )
        return usual._replace(why=why)

    def _barrier(self, before: Side, by: Agent) -> tuple[MBarrier, PhaseClock] | None:
        for barrier, phases in self._states.phases.items():
            same = phases.component == before.stamp.component
            if same and phases.components is by.components:
                return barrier, phases
        return None

    def _same_ring(self, waiter: WarpClock, phases: PhaseClock) -> PhaseClock | None:
        """The barrier of those from the same line of Python for which the warp waited last."""
        ring = self._sites[phases.init_site].source
        for component in reversed(waiter.phase_waits):
            for other in self._states.phases.values():
                same = other.component == component and other.components is phases.components
                if same and ring and self._sites[other.init_site].source == ring:
                    return other
        return None

    def _unheeded(self, waiter: WarpClock, phases: PhaseClock) -> str:
        site = waiter.unheeded.get(phases.component)
        return "" if site is None else self.words(site)

    # -- warps --------------------------------------------------------------------------------

    def _last_heard(self, before: Side, by: Agent) -> str:
        """The last signal of the earlier warp that is known."""
        number, agent = before.stamp.component, before.component.agent
        known = int(by.rows[EXECUTED, number]) if number < by.rows.shape[1] else 0
        clocks = (c for c in self._states.clocks.values() if c.components is by.components)
        owner = next((clock for clock in clocks if clock.own == number), None)
        if owner is None or owner is _warp_of(by):
            return ""
        signals = [site for step, site in owner.signals.items() if step <= known]
        if not signals:
            return f"{_name(by)} is not ordered after anything that {agent} has done"
        return f"the last event of {agent} before {_name(by)} is {self.words(signals[-1])}"


def _warp_of(by: Agent) -> WarpClock:
    return by if isinstance(by, WarpClock) else by.agent


def _name(by: Agent) -> str:
    return _warp_of(by).agent


def _phases(known: int) -> str:
    return "no phase" if known <= 0 else f"phase {known - 1} and those before"
