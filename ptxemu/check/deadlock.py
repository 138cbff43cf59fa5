"""Text of a deadlock: the chain of waits, likely causes, and each wait in detail."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ptxemu.check.barrier_names import BarrierNames
from ptxemu.check.causes import causes
from ptxemu.check.text import at_source, count, cut, describe, keep, ranges_of
from ptxemu.check.waits import Arrivers, Group, bytes_of, chain_from, cycles, groups_of, user_source
from ptxemu.codegen.program import Program
from ptxemu.machine.deadlock import Barrier, Signalled, Stall, Who
from ptxemu.options import Options
from ptxemu.syntax.tree import Instr

_ALL_LANES = 0xFFFFFFFF
_AT_MOST = 4  # places that are listed of one kind
_VAGUE = ("barriers only", "registers only", "shared memory only")
_DID = {"arrive": "made {}", "expect": "announced {} (expect_tx)", "land": "brought {}"}
_UNIT = {"arrive": "arrival", "expect": "byte", "land": "byte"}


def explain(stall: Stall, program: Program, options: Options, ptx: str) -> str:
    """The whole report. It depends on the state alone, not on the schedule that led to it.

    ptx: the text of the module, which is kept in a file that the report names.
    """
    path = keep(ptx, program.entry.name)
    return _Report(stall, program, options).text() + f"\n\nPTX: {path}" * bool(path)


class _Report:
    def __init__(self, stall: Stall, program: Program, options: Options) -> None:
        self.stall = stall
        self.entry = program.entry.name
        self.options = options
        self.arrivers = Arrivers(program, stall.inits)
        self.names = BarrierNames(options.names, program.layout, stall.inits)
        self.opcodes = [program.opcode_counts(i) for i in range(len(program.blocks))]
        self.groups = groups_of(stall, self.arrivers)

    def text(self) -> str:
        lines = [self._headline(), f"kernel {cut(self.entry)}"]
        circles = cycles(self.groups)
        told = [f"cycle: {self._sentence([*circle, circle[0]])}" for circle in circles]
        chains = [list(chain_from(group)) for group in self._starts(circles)]
        chains.sort(key=lambda path: bool(path[-1].after))  # those that end are surer
        ends = [f"chain: {self._sentence(path)}" for path in chains if not path[-1].after]
        lines += ends + told
        lines += [f"chain: {self._sentence(path)}" for path in chains[len(ends) :]]
        for cause in dict.fromkeys(causes(self, circles)):
            lines.append(f"likely cause: {cause}")
        for number, group in enumerate(self.groups, 1):
            lines += ["", *self._details(number, group)]
        return "\n".join(lines)

    def _headline(self) -> str:
        warps = len({one.who for one in self.stall.waiting})
        exited = len(self.stall.exited)
        gone = f"; {count(exited, 'other')} {'have' if exited > 1 else 'has'} exited"
        where = count(self.stall.ctas, "CTA")
        return f"{self.stall.headline}: {count(warps, 'warp')} of {where}" + gone * bool(exited)

    def _starts(self, circles: list[list[Group]]) -> Iterator[Group]:
        """Yield groups that begin chains of two or more: no group waits for them."""
        waited = {id(after) for group in self.groups for after in group.after}
        for group in self.groups:
            if group.after and id(group) not in waited:
                yield group

    # -- sentences --------------------------------------------------------------------------

    def _sentence(self, path: Sequence[Group]) -> str:
        """ "warps 0-3 wait for full phase 1 from warp 4, which waits for ..."."""
        first = path[0]
        words = [f"{self._among(first)} {_verb(first)} for {self.what(first)}"]
        for group in path[1:]:
            again = group is first
            waits = "as above" if again else f"for {self.what(group)}"
            words.append(f"from {self._among(group)}, which {_verb(group)} {waits}")
        last = path[-1]
        if last is not first or len(path) == 1:
            words.append("" if last.after else f"from nobody: {self.nobody(last)}")
        return " ".join(filter(None, words))

    def nobody(self, group: Group) -> str:
        """Why no warp that is left can end a wait."""
        if group.barrier is None:
            return "nothing that is left to run can change it"
        if not group.needs and group.barrier.tx < 0:
            return "more bytes came than were announced, and nothing takes them back"
        if group.needs == {"land"} and bytes_of(group.barrier)[1]:
            return "the copies of this phase are done"
        if not group.could:
            does = "arrives on" if "arrive" in group.needs else "brings bytes to"
            return f"no instruction of the program {does} it"
        before = [s for s in group.barrier.signals if s.kind in group.needs]
        agents = list(dict.fromkeys(s.agent for s in before)) or list(group.barrier.arrived)
        gone = [w for w in self.stall.exited if w.name in agents]
        if gone and len(gone) == len(agents):
            return f"{self.who(gone)}, which used to, {_has(gone)} exited"
        return "no warp that is left comes to an instruction that could"

    def _among(self, group: Group) -> str:
        """Format as `who`, without the CTA if there is only one."""
        told = self.who(group.warps)
        return told.removesuffix(f" of {group.first.who.cta}") if self.stall.ctas == 1 else told

    def who(self, warps: Iterable[Who]) -> str:
        """Return text such as "warps 0-3 (epilogue) of all 2 CTAs"."""
        by_cta: dict[str, list[int]] = defaultdict(list)
        for warp in sorted(set(warps), key=lambda w: w.index):
            by_cta[warp.cta].append(warp.index)
        same: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for cta, indices in by_cta.items():
            same[tuple(indices)].append(cta)
        parts = []
        for together, ctas in same.items():
            every = "all " * (len(ctas) == self.stall.ctas)
            where = ctas[0] if len(ctas) == 1 else f"{every}{len(ctas)} CTAs"
            parts.append(f"{_warps(together)}{self._roles(together)} of {where}")
        return " and ".join(parts)

    def agents(self, labels: Iterable[str]) -> str:
        """Format names such as "warp 4 of cta(0,0,0)"."""
        whos = []
        for label in labels:
            head, _, cta = label.partition(" of ")
            if not head.startswith("warp "):
                return label or "an asynchronous operation"
            whos.append(Who(int(head[5:]), cta, 0))
        return self.who(whos)

    def _roles(self, indices: Iterable[int]) -> str:
        given = self.options.roles or {}
        names = dict.fromkeys(given.get(i) or self._duty(i) for i in indices)
        return f" ({'; '.join(filter(None, names))})" if any(names) else ""

    def _duty(self, index: int) -> str:
        """Describe a warp's duty by what it has executed, or else by the code that follows."""
        told = describe(self.stall.opcodes.get(index, {}))
        if told not in _VAGUE:
            return told
        ahead = [
            describe(self.opcodes[block])
            for one in self.stall.waiting
            if one.who.index == index
            for block in sorted(self.arrivers.reachable(one.block))
        ]
        named = list(dict.fromkeys(duty for duty in ahead if duty not in _VAGUE))
        return ", ".join(named) if len(named) <= 2 else ""

    def what(self, group: Group) -> str:
        one = group.first
        if one.on is None:
            told = {
                "lanes": "the other lanes of its warp",
                "memory": "a change of memory, which it reads again and again",
            }
            return told.get(one.kind, one.text)
        if one.kind == "mbarrier":
            assert group.barrier is not None
            return f"phase {group.barrier.phase} of {self.name(one.on[2])}"
        if one.kind == "cluster":
            return "the cluster barrier"
        ctas = {w.on[1] for w in group.waiting if w.on}
        return f"barrier {one.on[2]}" + f" of {one.on[1]}" * (len(ctas) == 1)

    def name(self, offset: int) -> str:
        """Return the name of an mbarrier: the user's, the source's, or its symbol."""
        return self.names.of(offset)

    def executed(self, instr: Instr) -> bool:
        """Whether a warp of the CTAs that still run has."""
        return self.arrivers.executed(instr, self.stall.executed)

    # -- details ----------------------------------------------------------------------------

    def _details(self, number: int, group: Group) -> Iterator[str]:
        one = group.first
        parity = f", with parity {one.parity}" if one.kind == "mbarrier" else ""
        lanes = f" lanes {one.lanes:#010x}" if one.lanes != _ALL_LANES else ""
        who = f"{self.who(group.warps)}{lanes}"
        yield f"[{number}] {who} {_verb(group)} for {self.what(group)}{parity}"
        yield from (f"  {line}" for line in place(one.instr))
        if group.barrier is not None:
            barrier, others = self._telling(group)
            if others:
                yield f"  in {barrier.key[1]}, unlike in {count(others, 'other')}:"
            yield from (f"  {line}" for line in self._state(group, barrier))
        for after in group.after:
            if after is not group:
                warps = [w for w in after.warps if w in group.suppliers] or after.warps
                seen = f"see [{self.groups.index(after) + 1}]"
                yield f"  can still come from {self.who(warps)}, which {_verb(after)}: {seen}"

    def _state(self, group: Group, barrier: Barrier) -> Iterator[str]:
        came = barrier.expected - barrier.pending
        if barrier.key[0] != "mbarrier":
            by = f": {self.agents(barrier.arrived)}" if barrier.arrived else ""
            yield f"{self.what(group)}: {came} of {barrier.expected} threads arrived{by}"
            missing = self._absent(group)
            if missing:
                yield f"not arrived: {missing}"
            return
        yield f"{arrivals(barrier)}; {transaction(barrier)}".removesuffix("; ")
        done = f"phases 0 to {barrier.phase - 1} are" if barrier.phase > 1 else "phase 0 is"
        yield f"{done} complete" if barrier.phase else "no phase of it has completed in this launch"
        yield from self._history(group, barrier)

    def _telling(self, group: Group) -> tuple[Barrier, int]:
        """Return the barrier of a group whose history is rarest among the CTAs.

        The second value is the number of barriers with another history.
        """
        keys = dict.fromkeys(one.on for one in group.waiting if one.on)
        barriers = [self.stall.barriers[key] for key in keys]
        stories = Counter(map(_story, barriers))
        found = min(barriers, key=lambda barrier: stories[_story(barrier)])
        return found, len(barriers) - stories[_story(found)]

    def _absent(self, group: Group) -> str:
        """Warps that a named barrier or a cluster barrier lacks."""
        assert group.barrier is not None
        assert group.first.on is not None
        kind, cta, _ = group.first.on
        here = [
            w
            for w in (*(one.who for one in self.stall.waiting), *self.stall.exited)
            if (kind == "cluster" or w.cta == cta) and w.name not in group.barrier.arrived
        ]
        gone = [w for w in here if w in self.stall.exited]
        rest = list(dict.fromkeys(w for w in here if w not in self.stall.exited))
        parts = [self.who(rest)] if rest else []
        parts += [f"{self.who(gone)}, {_has(gone)} exited"] if gone and kind != "cluster" else []
        return "; ".join(parts)

    def _history(self, group: Group, barrier: Barrier) -> Iterator[str]:
        """Yield signals of the barrier, in this phase or before, and instructions that could
        signal it."""
        found: dict[int, list[Signalled]] = defaultdict(list)
        for signal in barrier.signals:
            line = signal.instr.line if signal.instr else 0
            if signal.kind in _DID:
                found[line].append(signal)
            elif barrier.pending and barrier.expected > 1:
                yield f"its count of {signal.amount} was set at PTX line {line}"
        recent = sorted(found, key=lambda line: (-max(s.last_phase for s in found[line]), line))
        for some in [found[line] for line in recent[:_AT_MOST]]:
            yield from self._did(some)
        if len(found) > _AT_MOST:
            yield f"and by {count(len(found) - _AT_MOST, 'other instruction')}"
        others = [i for i in group.could if i.line not in found]
        alike: dict[tuple[object, ...], list[Instr]] = defaultdict(list)
        for instr in others:  # an unrolled loop is one line of Python
            alike[user_source(instr) or instr.line, self.executed(instr)].append(instr)
        for (_, executed), instrs in list(alike.items())[:_AT_MOST]:
            did = "executed for other barriers only" if executed else "never executed"
            yield f"could signal it, but was {did}:"
            yield from (f"  {line}" for line in place(instrs[0], len(instrs) - 1))
        if not found and not others:
            yield "nobody has signalled it in this launch, and no instruction of the program could"

    def _did(self, some: list[Signalled]) -> Iterator[str]:
        """Describe the effect of one instruction, over all warps that executed it."""
        now = [s for s in some if s.now_times]
        parts = []
        for kind, form in _DID.items():
            these = [s for s in now or some if s.kind == kind]
            amount = sum(s.now_amount if now else s.amount for s in these)
            parts += [form.format(count(amount, _UNIT[kind]))] * bool(these)
        last = max(s.last_phase for s in some)
        before = f"in phases up to {last}" if last else "in phase 0"
        when = "in this phase" if now else f"{before}, and not since"
        who = self.agents(dict.fromkeys(s.agent for s in now or some))
        yield f"{who} {' and '.join(parts)} {when}:"
        yield from (f"  {line}" for line in place(some[0].instr))


def _story(barrier: Barrier) -> frozenset[tuple[object, ...]]:
    """Return the history of signals, without the CTA that gave them."""
    return frozenset(
        (s.kind, s.instr and s.instr.line, s.now_amount, s.last_phase) for s in barrier.signals
    )


def arrivals(barrier: Barrier) -> str:
    """The state of the arrivals, in words that leave no doubt which number is missing."""
    came, expected = barrier.expected - barrier.pending, barrier.expected
    if not barrier.pending:
        return f"got all {count(expected, 'arrival')}" if expected > 1 else "got its one arrival"
    missing = "is" if barrier.pending == 1 else "are"
    return f"got {came} of {expected}: {barrier.pending} of {expected} arrivals {missing} missing"


def transaction(barrier: Barrier) -> str:
    """The state of the bytes."""
    announced, landed = bytes_of(barrier)
    came = f"{announced} were announced with expect_tx, {landed or 'none'} came"
    if barrier.tx > 0:
        return f"it still expects {barrier.tx} bytes: {came}"
    if barrier.tx < 0:
        return f"{-barrier.tx} bytes more came than were announced: {came}"
    return f"all {announced} announced bytes came" if announced else ""


def place(instr: Instr | None, others: int = 0) -> Iterator[str]:
    """Lines of PTX, of which there are `others` alike, and Python."""
    if instr is None:
        return
    more = f" (and {count(others, 'other')})" * bool(others)
    yield f"PTX line {instr.line}{more}: {cut(' '.join(instr.text.split()))}"
    frames = instr.location.frames() if instr.location else []
    mine = [f for f in frames if "site-packages" not in f]
    for frame in dict.fromkeys([*frames[:1], *mine[:1]]):
        yield at_source(frame)


def _warps(indices: Sequence[int]) -> str:
    """Two warps are no range yet."""
    if len(indices) == 2:
        return f"warp {indices[0]} and warp {indices[1]}"
    return ranges_of(indices)


def _verb(group: Group) -> str:
    return "wait" if len({warp.index for warp in group.warps}) > 1 else "waits"


def _has(warps: Sequence[Who]) -> str:
    return "have" if len(warps) > 1 else "has"
