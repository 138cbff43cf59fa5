"""Likely causes of a deadlock: each is a rule, and what it says carries its evidence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from ptxemu.check.waits import Group, bytes_of
from ptxemu.machine.deadlock import Barrier, Signalled, Stall, Who
from ptxemu.syntax.tree import Instr


class Words(Protocol):
    """What a rule needs of the report around it."""

    stall: Stall
    groups: list[Group]

    def who(self, warps: Iterable[Who]) -> str: ...

    def agents(self, labels: Iterable[str]) -> str: ...

    def what(self, group: Group) -> str: ...

    def executed(self, instr: Instr) -> bool: ...


def causes(words: Words, circles: list[list[Group]]) -> Iterator[str]:
    """Of every group that is at the root of the deadlock: nobody it could wait for, or a circle;
    where no rule has an answer there, of all others as well."""
    inside = {id(group) for circle in circles for group in circle}
    roots = [group for group in words.groups if not group.after or id(group) in inside]
    found = [cause for group in roots for cause in _of(words, group)]
    found += [cause for circle in circles for cause in _fresh(words, circle)]
    if not found:
        found = [cause for group in words.groups for cause in _of(words, group)]
    yield from found


def _of(words: Words, group: Group) -> Iterator[str]:
    barrier = group.barrier
    if barrier is None:
        return
    rules = {"mbarrier": _MBARRIER, "barrier": (_named,), "cluster": (_cluster,)}[barrier.key[0]]
    for rule in rules:
        told = list(rule(words, group, barrier))
        yield from told
        if told:
            return  # the first that knows


def _parity(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    """The warps have not seen a phase that is complete, and wait for the one behind it."""
    if any(s.now_times for s in barrier.signals if s.kind in ("arrive", "land")):
        return
    missed = [w for w in group.warps if barrier.seen.get(w.name, 0) < barrier.phase]
    if not missed or len(missed) < len(group.warps):
        return
    seen = max(barrier.seen.get(w.name, 0) for w in missed)
    first = f"phase {seen}"
    before = f"never waited on it before with success; {first}" if not seen else f"{first}"
    parity = group.first.parity
    who = words.who(group.warps)
    yield (
        f"wrong parity, off by one: {who} {before} is complete, parity {seen & 1} would have seen "
        f"that, but parity {parity} waits for phase {barrier.phase}, for which nobody has arrived"
    )


def _bytes(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    """All arrivals, but not the bytes that were announced."""
    announced, landed = bytes_of(barrier)
    if barrier.pending or not barrier.tx:
        return
    if announced and announced == 2 * landed:
        times = "twice"
    elif landed and landed == 2 * announced:
        times = "half of"
    else:
        times = ""
    if not landed:
        yield (
            f"no copy completes on it: {announced} bytes were announced with expect_tx in this "
            "phase and none came; is the copy issued, and does it name this barrier?"
        )
    elif times:
        yield (
            f"wrong transaction bytes: expect_tx announces {announced} bytes, {times} the {landed} "
            "bytes that the copies bring; announce exactly the bytes of the boxes"
        )
    else:
        yield (
            f"wrong transaction bytes: expect_tx announces {announced} bytes, the copies brought "
            f"{landed}; announce the sum of all boxes, or issue the missing copy"
        )


def _nobody(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    """Nothing in the program signals it, or nobody comes to what does."""
    if group.suppliers or any(s.now_times for s in _signals(group, barrier)):
        return
    before = _signals(group, barrier)
    verb = "arrives on" if "arrive" in group.needs else "completes bytes on"
    if not group.could:
        yield (
            f"the signal is missing: no instruction of the program {verb} {_name(words, group)} "
            "(an arrive, a commit or a release was left out, or it names another barrier)"
        )
    elif before:
        last = max(s.last_phase for s in before)
        agents = words.agents(dict.fromkeys(s.agent for s in before))
        yield (
            f"{agents} signalled phases up to {last} of it and will not again; this wait is for "
            f"phase {barrier.phase}: one wait too many, one signal too few, or an exit too early"
        )
    else:
        lines = ", ".join(str(i.line) for i in group.could[:3])
        done = any(words.executed(i) for i in group.could)
        came = "executed for other barriers only" if done else "never executed"
        yield (
            f"the signal for {_name(words, group)} is missing: PTX line {lines} could give it, and "
            f"was {came}; no warp that is left comes there"
        )


def _fewer(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    """Some arrivals came, and nobody is left who could make the others."""
    came = barrier.expected - barrier.pending
    if not came or not barrier.pending or group.suppliers:
        return
    now = [s for s in barrier.signals if s.kind == "arrive" and s.now_times]
    agents = words.agents(dict.fromkeys(s.agent for s in now))
    single = all(s.now_amount == s.now_times for s in now)
    count = f"the barrier was initialised with a count of {barrier.expected}"
    if single and barrier.expected == 32 * came:
        yield (
            f"one lane arrives where the count is of whole warps: {count}, and {agents} arrived "
            f"with {came} of them in all; let every lane arrive, or initialise with {came}"
        )
    elif came == 32 * barrier.expected or (not single and barrier.expected % came == 0):
        yield f"fewer warps arrive than are counted: {count}, and only {agents} arrived ({came})"
    else:
        yield f"fewer threads arrive than are counted: {count}, and only {agents} arrived ({came})"


def _gone(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    """Warps that used to signal it have exited."""
    agents = {s.agent for s in _signals(group, barrier) if not s.now_times}
    gone = [w for w in words.stall.exited if w.name in agents]
    if gone and not group.suppliers:
        yield f"{words.who(gone)} signalled it before, and exited while others still wait for more"


def _skipped(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    """Those who should signal it have used what they wait for before, and gone round the signal."""
    if _signals(group, barrier) or not group.suppliers or "arrive" not in group.needs:
        return
    for other in group.after:
        asked = [w for w in other.warps if w in group.suppliers]
        used = [w for w in asked if other.barrier and other.barrier.seen.get(w.name)]
        if used and used == asked and other is not group:
            done = [i for i in group.could if words.executed(i)]
            lines = ", ".join(str(i.line) for i in (done or group.could)[:3])
            how = "executed it for other barriers only" if done else "never executed it"
            yield (
                f"the signal was skipped: {words.who(used)} should give {_name(words, group)} at "
                f"PTX line {lines}, went through its loop before and {how} (a condition that does "
                "not hold, or the wrong stage)"
            )


_MBARRIER = (_parity, _bytes, _fewer, _gone, _nobody, _skipped)


def _name(words: Words, group: Group) -> str:
    return words.what(group).partition(" of ")[2]


def _signals(group: Group, barrier: Barrier) -> list[Signalled]:
    return [s for s in barrier.signals if s.kind in group.needs]


def _named(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    """A named barrier that counts more threads than come."""
    _, cta, ident = barrier.key
    if group.suppliers:
        return
    came = barrier.expected - barrier.pending
    elsewhere = [
        other
        for other in words.groups
        if other is not group and other.first.kind == "barrier" and other.first.on != barrier.key
    ]
    gone = [w for w in words.stall.exited if w.cta == cta]
    text = f"barrier {ident} counts {barrier.expected} threads and only {came} come"
    if elsewhere:
        others = ", ".join(f"{words.who(g.warps)} at {words.what(g)}" for g in elsewhere)
        text += f"; others wait at another barrier: {others}"
    if gone:
        text += f"; {words.who(gone)} exited without it"
    yield f"{text}; the count has to be that of the warps which execute it"


def _cluster(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    """Threads of the cluster that wait elsewhere never arrive."""
    others = [
        w.who
        for w in words.stall.waiting
        if w.who.cluster == group.first.who.cluster and w.who.name not in barrier.arrived
    ]
    if others and not group.suppliers:
        yield (
            f"{words.who(others)} cannot come to a barrier.cluster.arrive any more: every thread "
            "of the cluster that has not exited has to arrive"
        )


def _fresh(words: Words, circle: list[Group]) -> Iterator[str]:
    """A circle at the very beginning: somebody has to go first."""
    fresh = [
        group
        for group in circle
        if group.barrier is not None
        and group.barrier.key[0] == "mbarrier"
        and group.barrier.phase == 0
        and group.first.parity == 0
        and not any(s.now_times for s in _signals(group, group.barrier))
    ]
    if len(fresh) < len(circle) or len(circle) < 2:
        return
    names = "; ".join(words.what(group) for group in fresh)
    yield (
        f"wrong parity at the start: all barriers of the cycle are fresh ({names}), and each wait "
        "has parity 0, so nobody goes first; the producer's first wait for an empty buffer needs "
        "parity 1, which passes on a fresh mbarrier"
    )
