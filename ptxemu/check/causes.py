"""Likely causes of a deadlock: each is a rule, whose text contains its evidence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol

from ptxemu.check.waits import Group, bytes_of, user_source
from ptxemu.machine.deadlock import Barrier, Signalled, Slip, Stall, Who
from ptxemu.syntax.tree import Instr

_AT_MOST = 3  # places that are listed


class Words(Protocol):
    """Parts of the report that a rule needs."""

    stall: Stall
    groups: list[Group]

    def who(self, warps: Iterable[Who]) -> str: ...

    def agents(self, labels: Iterable[str]) -> str: ...

    def what(self, group: Group) -> str: ...

    def name(self, offset: int) -> str: ...

    def executed(self, instr: Instr) -> bool: ...


def causes(words: Words, circles: list[list[Group]]) -> Iterator[str]:
    """Yield causes of the deadlock.

    Groups that wait for nobody are explained first. If no rule applies there, the circles follow,
    which may exist only in the program's text. Else any group that a rule recognises follows. What
    may be a consequence of something else is left out if there is something else, and comes after
    waits that were not for the next phase.
    """
    inside = {id(group) for circle in circles for group in circle}
    ends = [group for group in words.groups if not group.after]
    roots = ends + [group for group in words.groups if id(group) in inside]
    found = [cause for group in ends for cause in _of(words, group)]
    if not found:
        found = [cause for group in roots for cause in _of(words, group)]
        found += [cause for circle in circles for cause in _fresh(words, circle)]
        if found:
            found += [cause for group in roots for cause in _left_out(words, group)]
    found = found or [cause for group in roots for cause in _left_out(words, group)]
    found = found or [cause for circle in circles for cause in _lacks_bytes(words, circle)]
    if not found:
        found = [cause for circle in circles for cause in _behind_a_wait(words, circle)]
        found += [cause for group in roots for cause in _others_wait(words, group)]
    if not found:
        found = [cause for group in words.groups for cause in _of(words, group)]
    sure = [cause for cause in found if not isinstance(cause, _Vague)]
    yield from sure or [*_slips(words), *found] or _overdrawn(words)


class _Vague(str):
    """A cause that may be a consequence of another."""


def _of(words: Words, group: Group) -> Iterator[str]:
    barrier = group.barrier
    if barrier is None:
        return
    rules = {"mbarrier": _MBARRIER, "barrier": (_named,), "cluster": (_cluster,)}[barrier.key[0]]
    for rule in rules:
        told = list(rule(words, group, barrier))
        yield from map(_Vague, told) if rule in _CONSEQUENCES else told
        if told:
            return  # the first that knows


def _slips(words: Words) -> Iterator[str]:
    """Explain that a warp which waits, or has signalled those that wait, went on too early: a wait
    passed on a phase that it had seen before, or phases had gone by."""
    signals = {
        s.agent for group in words.groups if group.barrier for s in _signals(group, group.barrier)
    }
    waiting = {who.name for group in words.groups for who in group.warps}
    slips = [slip for name, slip in words.stall.slips.items() if name in signals | waiting]
    alike: dict[tuple[object, ...], list[Slip]] = defaultdict(list)
    for slip in sorted(slips, key=lambda slip: slip.now > slip.before):  # causes come first
        alike[slip.on[2], slip.instr.line, slip.before, slip.now].append(slip)
    for some in alike.values():
        slip = some[0]
        who, barrier = words.who(each.who for each in some), words.name(slip.on[2])
        place = lines_of([slip.instr])
        if slip.now > slip.before + 1:
            missed = f"phase {slip.before}"
            if slip.now > slip.before + 2:
                missed = f"phases {slip.before} to {slip.now - 2}"
            yield (
                f"{barrier} went on without its waiter: {who} found phase {slip.now - 1} of it "
                f"complete at {place}, and never saw {missed}: whoever signals it did not wait "
                "for that (a missing wait for a free slot, or its wrong parity)"
            )
        elif slip.now:
            yield (
                f"a wait that passed twice: {who} found phase {slip.now - 1} of {barrier} complete "
                f"at {place}, as before, so it did not wait for phase {slip.now}: the parity has "
                "to change with every phase"
            )
        else:
            yield (
                f"a wait that passed twice: {who} went on at {place} twice though no phase of "
                f"{barrier} was complete: parity 1 passes on a fresh mbarrier, and has to be 0 "
                "in the next round"
            )


def _parity(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    """Explain that warps missed a complete phase and wait for the one after it."""
    if any(s.now_times for s in barrier.signals if s.kind in ("arrive", "land")):
        return
    if _behind(group, barrier) >= 2:
        return
    missed = [w for w in group.warps if barrier.seen.get(w.name, 0) < barrier.phase]
    if not missed or len(missed) < len(group.warps):
        return
    seen = max(barrier.seen.get(w.name, 0) for w in missed)
    first = f"phase {seen}"
    before = f" never waited on it before with success; {first}" if not seen else f": {first}"
    parity = group.first.parity
    who = words.who(group.warps)
    yield (
        f"wrong parity, off by one: {who}{before} is complete, parity {seen & 1} would have seen "
        f"that, but parity {parity} waits for phase {barrier.phase}, for which nobody has arrived"
    )


def _overtaken(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    """Explain that two or more phases completed since the warps looked.

    Parities of every other phase are equal, so the signalling warps have to wait for the others.
    """
    behind = _behind(group, barrier)
    if behind < 2:
        return
    who, verb = words.who(group.warps), "has" if len(group.warps) == 1 else "have"
    first, last = barrier.phase - behind, barrier.phase - 1
    text = (
        f"the barrier went on without its waiters: phases {first} to {last} of "
        f"{_name(words, group)} are complete, and {who} {verb} seen none of them"
    )
    arrived = [s for s in barrier.signals if s.kind == "arrive"]
    agents = words.agents(dict.fromkeys(s.agent for s in arrived))
    once = sum(s.amount // s.times for s in arrived)
    if once > barrier.expected:
        yield (
            f"{text}; its count is {barrier.expected}, but {agents} arrive {once} times in a round "
            f"and complete a phase with every {barrier.expected}: the count is too small, somebody "
            "arrives twice, or arrives without a wait for what it releases"
        )
        return
    text = f"{text}; {agents} did not wait for them"
    over = list(_overdrawn(words))
    if over:
        yield f"{text}: {over[0]}"
        return
    yield _Vague(
        f"{text} (a missing wait for a free slot, its parity, or a count or an expect_tx that "
        "leaves their part out)"
    )


def _behind(group: Group, barrier: Barrier) -> int:
    """Return the number of phases since a warp of the group last found one complete."""
    return barrier.phase - max(barrier.seen.get(w.name, 0) for w in group.warps)


def _overdrawn(words: Words) -> Iterator[str]:
    """Explain that more bytes landed than were announced, even on barriers without waiters."""
    for barrier in words.stall.overdrawn:
        announced, landed = (
            sum(s.amount for s in barrier.signals if s.kind == kind) for kind in ("expect", "land")
        )
        _, cta, offset = barrier.key
        yield (
            f"wrong transaction bytes: {landed} bytes have landed on {words.name(offset)} of {cta} "
            f"and expect_tx has announced {announced}; where it announces less than the copies of "
            "a phase bring, the phase is complete too early"
        )


def _unannounced(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    """Explain that copies of this CTA landed unannounced; those of a peer may come first."""
    announced, landed = bytes_of(barrier)
    now = [s for s in barrier.signals if s.now_times and s.kind == "land"]
    _, cta, _ = barrier.key
    if barrier.pending and landed and not announced and all(cta in s.agent for s in now):
        copies = lines_of([s.instr for s in now if s.instr])
        yield (
            f"the acquire is missing: {landed} bytes have come to {_name(words, group)} in phase "
            f"{barrier.phase}, by {copies}, and nobody has announced them there with "
            "arrive.expect_tx (a pipeline does that in producer_acquire, before the copies)"
        )


def _bytes(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    """Explain that all arrivals came, but the announced bytes did not and cannot."""
    others = [who for who in group.suppliers if who not in group.warps]
    if barrier.pending or not barrier.tx or (barrier.tx > 0 and others):
        return
    yield _wrong_bytes(words, group, barrier)


def _lacks_bytes(words: Words, circle: list[Group]) -> Iterator[str]:
    """Explain a circle in which all have announced bytes that do not come."""
    for group in circle:
        barrier = group.barrier
        if barrier and barrier.key[0] == "mbarrier" and not barrier.pending and barrier.tx > 0:
            yield _wrong_bytes(words, group, barrier)


def _wrong_bytes(words: Words, group: Group, barrier: Barrier) -> str:
    announced, landed = bytes_of(barrier)
    if not announced:
        return (
            f"no expect_tx: {landed} bytes have come to {_name(words, group)} in phase "
            f"{barrier.phase}, and its arrival announced none; arrive with expect_tx of the bytes "
            "of all copies"
        )
    if not landed:
        return (
            f"no copy completes on it: {announced} bytes were announced on {_name(words, group)} "
            "with expect_tx in this phase and none came; is the copy issued, and does it name this "
            "barrier?" + (_went_elsewhere(barrier) or _never_issued(words, group))
        )
    brought = f"expect_tx announces {announced} bytes, the copies brought {landed}"
    advice = "announce the sum of all boxes"
    if announced == 2 * landed:
        brought = (
            f"expect_tx announces {announced} bytes, twice the {landed} bytes that the copies bring"
        )
    elif landed == 2 * announced:
        brought = (
            f"expect_tx announces {announced} bytes, half of the {landed} bytes that the copies "
            "bring"
        )
    if barrier.tx > 0:
        advice += ", or issue the missing copy"
    hint = barrier.tx > 0 and (
        _brought_before(words, group, barrier) or _multicast(barrier) or _never_issued(words, group)
    )
    return f"wrong transaction bytes on {_name(words, group)}: {brought}; {advice}{hint or ''}"


def _went_elsewhere(barrier: Barrier) -> str:
    """Explain that copies bring their bytes to other CTAs alone."""
    theirs = [(cta, s.instr) for cta, s in barrier.elsewhere if s.kind == "land" and s.instr]
    if not theirs:
        return ""
    ctas = " and ".join(dict.fromkeys(cta for cta, _ in theirs))
    return (
        f" {lines_of([instr for _, instr in theirs])} brings bytes to that of {ctas}: does a "
        "multicast mask or a rank leave this CTA out?"
    )


def _brought_before(words: Words, group: Group, barrier: Barrier) -> str:
    """Name warps whose copies came in each phase before, and not in this one."""
    lands = [s for s in barrier.signals if s.kind == "land"]
    before = [s for s in lands if not s.now_times and s.last_phase == barrier.phase - 1]
    agents = words.agents(dict.fromkeys(s.agent for s in before))
    return f"; {agents} brought bytes up to the phase before" * bool(before)


def _never_issued(words: Words, group: Group) -> str:
    """Name copies that could bring the bytes which a phase lacks, and that nobody has executed."""
    instrs = [i for i in group.could if "land" in group.needs and not words.executed(i)]
    return f" ({lines_of(instrs)} was never executed)" * bool(instrs)


def _multicast(barrier: Barrier) -> str:
    """Explain that a multicast mask may leave out this CTA, where copies of several CTAs land."""
    lands = [s for s in barrier.signals if s.kind == "land" and s.now_times and s.instr]
    cast = [s.instr for s in lands if s.instr and "multicast" in s.instr.opcode]
    came = {s.agent.rpartition(" of ")[2] for s in lands if s.instr in cast}
    others = {cta for cta, s in barrier.elsewhere if s.kind == "land"} - came
    if not cast or not others:
        return ""
    return (
        f"; the multicast copies at {lines_of(cast)} came from {' and '.join(sorted(came))} alone: "
        f"does the mask of {' and '.join(sorted(others))} name this CTA?"
    )


def _nobody(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    """Explain that nothing in the program signals the barrier, or that no warp reaches the
    signal."""
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
        done = any(words.executed(i) for i in group.could)
        came = "executed for other barriers only" if done else "never executed"
        why = "no warp that is left comes there"
        if not done:
            why = "no warp has come there: is there a warp with that role, does its condition hold?"
        yield (
            f"the signal for {_name(words, group)} is missing: {lines_of(group.could)} could give "
            f"it, and was {came}; {why}"
        )


def _left_out(words: Words, group: Group) -> Iterator[str]:
    """The signal has come to other CTAs of the cluster."""
    barrier = group.barrier
    if barrier is None or barrier.key[0] != "mbarrier" or _signals(group, barrier):
        return
    theirs = [(c, s.instr) for c, s in barrier.elsewhere if s.kind in group.needs and s.instr]
    ctas = ", ".join(dict.fromkeys(cta for cta, instr in theirs if instr in group.could))
    if ctas:
        lines = lines_of([instr for _, instr in theirs])
        verb = "arrives on" if "arrive" in group.needs else "brings bytes to"
        wait = "wait" if len(group.warps) > 1 else "waits"
        yield (
            f"the signal goes to another CTA: {lines} {verb} {_name(words, group)} of {ctas}, and "
            f"never that of {barrier.key[1]}, for which {words.who(group.warps)} {wait} (a "
            "multicast mask or a rank that leaves this CTA out, or the wrong CTA as leader)"
        )


def _only_elsewhere(words: Words, group: Group, _: Barrier) -> Iterator[str]:
    """Explain, as `_left_out`, if no warp is left that could signal this barrier."""
    if not group.suppliers:
        yield from _left_out(words, group)


def _fewer(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    """Explain that some arrivals came, and no warp is left that could make the others."""
    if not group.suppliers or group.again:
        yield from _too_few(words, group, barrier)


def _others_wait(words: Words, group: Group) -> Iterator[str]:
    """Explain that some arrivals came, and the warps that could make the others wait as well."""
    if group.barrier is not None and group.barrier.key[0] == "mbarrier":
        yield from _too_few(words, group, group.barrier)


def _too_few(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    came = barrier.expected - barrier.pending
    if not came or not barrier.pending:
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
        yield (
            f"fewer warps arrive than are counted: {count}, and only {agents} arrived ({came})"
            + _left_early(words, group, barrier)
        )
    else:
        yield (
            f"fewer threads arrive than are counted: {count}, and only {agents} arrived ({came})"
            + _left_early(words, group, barrier)
        )


def _left_early(words: Words, group: Group, barrier: Barrier) -> str:
    """Name warps that arrived in phases before, and have exited."""
    before = {s.agent for s in _signals(group, barrier) if not s.now_times}
    gone = [who for who in words.stall.exited if who.name in before]
    return f"; {words.who(gone)} arrived in phases before, and exited" * bool(gone)


def _gone(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    """Warps that used to signal it have exited."""
    agents = {s.agent for s in _signals(group, barrier) if not s.now_times}
    gone = [w for w in words.stall.exited if w.name in agents]
    if gone and not group.suppliers:
        yield f"{words.who(gone)} signalled it before, and exited while others still wait for more"


def _absent(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    """Explain that warps which arrived in earlier phases now wait for something else."""
    signals = [s for s in barrier.signals if s.kind == "arrive"]
    now = {s.agent for s in signals if s.now_times}
    absent = {s.agent: s.instr for s in signals if s.agent not in now}
    here = (w.who for w in words.stall.waiting if w.who not in group.warps)
    blocked = [who for who in dict.fromkeys(here) if who.name in absent]
    if now and blocked and barrier.pending:
        instrs = [instr for w in blocked if (instr := absent[w.name]) is not None]
        yield (
            f"{words.who(blocked)} arrived on {_name(words, group)} in phases before, at "
            f"{lines_of(instrs)}, and not in phase {barrier.phase}, to which "
            f"{words.agents(sorted(now))} came: an arrival was skipped, or went to another barrier "
            "(the wrong stage)"
        )


def _skipped(words: Words, group: Group, barrier: Barrier) -> Iterator[str]:
    """Explain that warps used the barrier's data before and went around the signal."""
    if _signals(group, barrier) or not group.suppliers or "arrive" not in group.needs:
        return
    for other in group.after:
        asked = [w for w in other.warps if w in group.suppliers]
        used = [w for w in asked if other.barrier and other.barrier.seen.get(w.name)]
        known = other.barrier and list(_absent(words, other, other.barrier))
        if used and used == asked and other is not group and not known:
            done = [i for i in group.could if words.executed(i)]
            how = "executed it for other barriers only" if done else "never executed it"
            yield (
                f"the signal was skipped: {words.who(used)} should give {_name(words, group)} at "
                f"{lines_of(done or group.could)}, went through its loop before and {how} (a "
                "condition that does not hold, or the wrong stage)"
            )


_MBARRIER = (
    _overtaken,
    _unannounced,
    _parity,
    _bytes,
    _absent,
    _fewer,
    _only_elsewhere,
    _gone,
    _nobody,
    _skipped,
)
_CONSEQUENCES = (_absent, _gone, _skipped)


def lines_of(instrs: Iterable[Instr]) -> str:
    """Return text such as "kernel.py:30 (PTX line 453, 627)", by the user's lines of Python."""
    places: dict[str, list[Instr]] = defaultdict(list)
    for instr in dict.fromkeys(instrs):
        places[user_source(instr).rpartition("/")[2]].append(instr)
    told = []
    for place, some in list(places.items())[:_AT_MOST]:
        lines = ", ".join(str(i.line) for i in some[:_AT_MOST])
        told.append(f"{place} (PTX line {lines})" if place else f"PTX line {lines}")
    return " and ".join(told)


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
    text = f"barrier {ident} counts {barrier.expected} threads and only {came} come"
    if elsewhere:
        if any(words.groups.index(other) < words.groups.index(group) for other in elsewhere):
            return  # told with the first of them
        others = ", ".join(f"{words.who(g.warps)} at {words.what(g)}" for g in elsewhere)
        yield (
            f"{text}; others wait at another barrier: {others}; either a count is not that of the "
            "warps that arrive, or a barrier.arrive before a warp's own wait was left out"
        )
        return
    gone = [w for w in words.stall.exited if w.cta == cta]
    text += f"; {words.who(gone)} exited without it" * bool(gone)
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


def _behind_a_wait(words: Words, circle: list[Group]) -> Iterator[str]:
    """Explain a circle with a barrier never signalled: its first signaller waits before the
    signal."""
    for group, after in zip(circle, [*circle[1:], circle[0]], strict=True):
        barrier = group.barrier
        if barrier is None or barrier.key[0] != "mbarrier" or _signals(group, barrier):
            continue
        instrs = [i for who in after.warps for i in group.suppliers.get(who, ())]
        if instrs and after is not group:
            yield (
                f"{words.who(after.warps)} would first signal {_name(words, group)} at "
                f"{lines_of(instrs)}, after the wait for {words.what(after)} at "
                f"{lines_of([i for i in [after.first.instr] if i])}, which in turn needs "
                f"{words.who(group.warps)}: a signal before that wait is missing, or the two stand "
                "in the wrong order"
            )


def _fresh(words: Words, circle: list[Group]) -> Iterator[str]:
    """Explain a circle at the very beginning, in which no group can go first.

    One group may wait for itself.
    """
    fresh = [
        group
        for group in circle
        if group.barrier is not None
        and group.barrier.key[0] == "mbarrier"
        and group.barrier.phase == 0
        and group.first.parity == 0
        and not any(s.now_times for s in _signals(group, group.barrier))
        and not bytes_of(group.barrier)[1]
        and not any(w.name in group.barrier.seen for w in group.warps)
    ]
    if len(fresh) < len(circle):
        return
    names = "; ".join(words.what(group) for group in fresh)
    also = [g for g in words.groups if g.barrier is fresh[0].barrier and g is not fresh[0]]
    if len(circle) == 1 and also:
        yield (
            f"the wrong barrier: {words.who(fresh[0].warps)} waits for {names}, which it is to "
            f"signal itself after that wait, and for which {words.who(also[0].warps)} waits as "
            "well: is the wait meant for another barrier?"
        )
        return
    instrs = [i for who in fresh[0].warps for i in fresh[0].suppliers.get(who, ())]
    if len(circle) == 1 and instrs:
        yield (
            f"wrong parity at the start, or no signal before the wait: {names} is fresh, and "
            f"{words.who(fresh[0].suppliers)} would first signal it at {lines_of(instrs)}, after "
            "this wait; an arrive, a copy or a commit before it is missing, or it is a producer's "
            "first wait for an empty buffer and needs parity 1, which passes on a fresh mbarrier"
        )
        return
    yield (
        f"wrong parity at the start: all barriers of the cycle are fresh ({names}), and each wait "
        "has parity 0, so nobody goes first; the producer's first wait for an empty buffer needs "
        "parity 1, which passes on a fresh mbarrier"
    )
