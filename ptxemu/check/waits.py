"""Who waits for whom in a deadlock: warps that wait alike as one group, and groups as a graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ptxemu.check.arrivers import Arrivers
from ptxemu.machine.deadlock import Barrier, Key, Stall, Waiting, Who
from ptxemu.syntax.tree import Instr


@dataclass(eq=False)
class Group:
    """Warps that wait alike: at one instruction, for the same barrier of their own CTA, in the same
    state.

    could: the instructions that could signal it. suppliers: warps that cannot go on, and could come
    to one of these; again: all of them have done so in this phase already; `after`: their groups.
    """

    waiting: list[Waiting]
    barrier: Barrier | None
    could: list[Instr] = field(default_factory=list[Instr])
    suppliers: dict[Who, list[Instr]] = field(default_factory=dict[Who, list[Instr]])
    again: bool = False
    after: list[Group] = field(default_factory=list["Group"])

    @property
    def first(self) -> Waiting:
        return self.waiting[0]

    @property
    def warps(self) -> list[Who]:
        return list(dict.fromkeys(w.who for w in self.waiting))

    @property
    def needs(self) -> set[str]:
        """What the phase of an mbarrier lacks: 'arrive', 'land' (bytes), or both."""
        if self.barrier is None:
            return set()
        lacks = {"arrive"} if self.barrier.pending else set[str]()
        return lacks | ({"land"} if self.barrier.tx > 0 else set())


def groups_of(stall: Stall, arrivers: Arrivers) -> list[Group]:
    """All groups, linked; those that the others wait for come first."""
    found: dict[tuple[object, ...], Group] = {}
    for one in stall.waiting:
        barrier = stall.barriers.get(one.on) if one.on else None
        group = found.setdefault(_alike(one, barrier), Group([], barrier))
        group.waiting.append(one)
    groups = list(found.values())
    for group in groups:
        _supply(group, stall, arrivers)
    for group in groups:
        whos = group.suppliers
        group.after = [g for g in groups if any(w.who in whos for w in g.waiting)]
        if len(group.after) > 1 and group in group.after:  # those that wait alike wait for others
            group.after.remove(group)
    return sorted(groups, key=lambda g: (_rank(g), g.first.instr.line if g.first.instr else 0))


def _rank(group: Group) -> int:
    """Nobody to wait for first; then mbarriers, and the other lanes of a warp last."""
    return bool(group.after) + 2 * (group.first.kind == "lanes")


def _alike(one: Waiting, barrier: Barrier | None) -> tuple[object, ...]:
    kind, cta, number = one.on or ("", one.who.cta, 0)
    state = barrier and (barrier.phase, barrier.expected, barrier.pending, barrier.tx)
    own = cta == one.who.cta or kind == "cluster"
    line = one.instr.line if one.instr else -one.block
    number = 0 if kind == "cluster" else number
    return kind or one.kind, line, number, own or cta, one.parity, one.lanes, state, one.text


def _supply(group: Group, stall: Stall, arrivers: Arrivers) -> None:
    """Look up who could end the wait. Warps that have done their part are left out, unless all
    have."""
    one = group.first
    if one.on is None:
        _supply_lanes(group, stall)
        return
    group.could = _could(one, one.on, group, arrivers)
    for waiting in group.waiting:
        barrier = stall.barriers[waiting.on] if waiting.on else None
        near = [w for w in stall.waiting if barrier and _near(w, waiting, barrier.key)]
        reach = {w.who: arrivers.can_reach(w, group.could, stall.ran) for w in near}
        if not any(reach.values()):
            reach = {w.who: arrivers.can_reach(w, group.could, {}) for w in near}
        done = _done(barrier, group.needs) if barrier else set[str]()
        able = {who: instrs for who, instrs in reach.items() if instrs}
        able = _experienced(able, barrier, group.needs) or able
        rest = {who: instrs for who, instrs in able.items() if who.name not in done}
        if not rest and _may_repeat(barrier):
            rest, group.again = able, bool(able)
        group.suppliers |= rest


def _experienced(
    able: dict[Who, list[Instr]], barrier: Barrier | None, needs: set[str]
) -> dict[Who, list[Instr]]:
    """Those that have signalled the barrier in phases before this one. Roles often stand one behind
    the other, so that every warp could come to the code of a later one as far as its text tells."""
    signals = barrier.signals if barrier else ()
    before = {s.agent for s in signals if s.kind in needs and s.times > s.now_times}
    return {who: instrs for who, instrs in able.items() if who.name in before}


def _may_repeat(barrier: Barrier | None) -> bool:
    """Whether a warp that has done its part may have more: arrivals, but not copies, once all that
    announce them have arrived."""
    return bool(barrier and barrier.key[0] == "mbarrier" and barrier.pending)


def _supply_lanes(group: Group, stall: Stall) -> None:
    if group.first.kind == "lanes":
        others = [w for w in stall.waiting if w.who in group.warps and w not in group.waiting]
        group.suppliers = {w.who: [] for w in others}


def _could(one: Waiting, key: Key, group: Group, arrivers: Arrivers) -> list[Instr]:
    if key[0] == "barrier":
        return arrivers.of_barrier(key[2])
    if key[0] == "cluster":
        return arrivers.of_cluster()
    known = arrivers.of_mbarrier(key[2], one.instr, group.needs)
    signals = group.barrier.signals if group.barrier else ()
    ever = [s.instr for s in signals if s.kind in group.needs and s.instr is not None]
    return list(dict.fromkeys([*ever, *known]))


def _near(other: Waiting, waiting: Waiting, key: Key) -> bool:
    """Whether a warp could reach the barrier: of its CTA, or of its cluster."""
    if key[0] == "barrier":
        return other.who.cta == key[1] and other is not waiting
    return other.who.cluster == waiting.who.cluster


def _done(barrier: Barrier, needs: set[str]) -> set[str]:
    """Warps that have done in this phase what it lacks."""
    now = {s.agent for s in barrier.signals if s.kind in needs and s.now_times}
    return now | set(barrier.arrived)


def cycles(groups: list[Group]) -> list[list[Group]]:
    """Circles of groups that wait for each other, each once, from its first group on."""
    found: dict[frozenset[int], list[Group]] = {}
    for start in groups:
        path = _path_back(start)
        if path:
            found.setdefault(frozenset(map(id, path)), path)
    return list(found.values())


def _path_back(start: Group) -> list[Group]:
    """The shortest way from a group to itself."""
    paths, seen = [[start]], set[int]()
    for path in paths:
        for after in path[-1].after:
            if after is start:
                return path
            if id(after) not in seen:
                seen.add(id(after))
                paths.append([*path, after])
    return []


def chain_from(start: Group) -> Iterator[Group]:
    """A group, whom it waits for, and so on, until somebody repeats or waits for nobody."""
    seen: list[Group] = []
    while start not in seen:
        yield start
        seen.append(start)
        following = [g for g in start.after if g not in seen]
        if not following:
            return
        start = following[0]


def bytes_of(barrier: Barrier) -> tuple[int, int]:
    """Announced and landed in the present phase."""
    sums = [sum(s.now_amount for s in barrier.signals if s.kind == k) for k in ("expect", "land")]
    return sums[0], sums[1]
