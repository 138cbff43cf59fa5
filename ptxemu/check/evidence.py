"""Why two accesses are not ordered, as far as the launch itself shows it: which waits, commits and
signals there were between them, and why they do not do.

`explain` says what is missing by the kinds of the two accesses alone; where what was executed tells
more, this says it instead.
"""

from __future__ import annotations

from typing import NamedTuple

from ptxemu.check import explain
from ptxemu.check.agents import Agent, WarpClock
from ptxemu.check.clocks import EXECUTED
from ptxemu.check.findings import Side, line_of, short
from ptxemu.check.phases import PhaseClock
from ptxemu.check.state import States
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.syntax.tree import Instr

_BY_OTHERS = {  # what is missing where another warp has issued the operation
    "cp.async": "cp.async.wait_group by each warp for its own copies and a barrier behind it, or"
    " cp.async.mbarrier.arrive and a wait",
    "bulk read": "cp.async.bulk.wait_group.read by whoever stores and a barrier behind it, before"
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
        """Why `by` is not ordered after the access `before` of its own cluster."""
        usual = Reason(*explain.missing(before, by))
        kind = before.component.kind
        if usual[:2] == explain.PROXY_FENCE:
            return usual
        if kind in _COMMITS:
            found = self._waiter(before, by)
            return self.of_group(kind, before.stamp.step, *found, by, usual) if found else usual
        if kind == "mbarrier":
            return self._of_phase(before, by, usual)
        if kind == "warp" and usual[:2] == explain.MISSING["warp"]:
            return usual._replace(why=self._last_heard(before, by))
        return usual

    def words(self, site: int) -> str:
        """An instruction, whole if it is short, and where it stands."""
        instr = self._sites[site]
        text = " ".join(instr.text.split()).rstrip(" ;")
        text = short(instr.opcode) if len(text) > _LONGEST else text
        return f"`{text}` at {line_of(instr)}"

    # -- groups -------------------------------------------------------------------------------

    def of_group(
        self, kind: str, step: int, owner: WarpClock, groups: list[int], by: Agent, usual: Reason
    ) -> Reason:
        """Operation `step` of `kind`, for which `owner` waits; groups: the last one of each."""
        if owner is not _warp_of(by) and kind in _BY_OTHERS and usual[:2] == explain.MISSING[kind]:
            usual = usual._replace(missing=_BY_OTHERS[kind])
        wait = owner.group_waits.get(kind)
        if wait is None or wait.issued < step:
            own = _warp_of(by).group_waits.get(kind)
            if own is None or owner is _warp_of(by):
                return usual
            why = f"{_name(by)} has waited, {self.words(own.site)}, for operations of its own alone"
            return usual._replace(why=why)
        agent = owner.agent
        if wait.covered >= step:
            if owner is _warp_of(by):
                return usual
            missing = f"a barrier, or an arrival and a wait, behind {self.words(wait.site)}"
            why = f"{agent} has waited there for its own part, and nothing tells {_name(by)} of it"
            return Reason(missing, "mbarrier, barrier", why)
        if not groups or groups[-1] < step:
            why = f"{agent} waits, {self.words(wait.site)}, but it is in no group"
            return Reason(f"{_COMMITS[kind]} behind it, before the wait", _COMMITS[kind], why)
        why = f"the last wait of {agent}, {self.words(wait.site)}, leaves its group open"
        return usual._replace(why=why)

    def _waiter(self, before: Side, by: Agent) -> tuple[WarpClock, list[int]] | None:
        """Whose wait it is, and the last operation of each of its groups."""
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
            return f"{_name(by)} knows of nothing that {agent} has done"
        return f"the last that {_name(by)} knows of {agent} is {self.words(signals[-1])}"


def _warp_of(by: Agent) -> WarpClock:
    return by if isinstance(by, WarpClock) else by.agent


def _name(by: Agent) -> str:
    return _warp_of(by).agent


def _phases(known: int) -> str:
    return "no phase" if known <= 0 else f"phase {known - 1} and those before"
