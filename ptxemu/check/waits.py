"""Graph of a deadlock: groups of warps that wait alike, and the groups they wait for.

`Arrivers` knows which instructions could signal a barrier, and from where they can be reached.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ptxemu.codegen.program import Program
from ptxemu.machine.deadlock import Barrier, Key, Stall, Waiting, Who
from ptxemu.syntax.tree import Addr, Imm, Instr, Reg, Sym

# Which instructions of a program could signal a barrier, and from where they can be reached.
#
# An address is followed back through the code as far as it is a symbol and constants: of a ring of
# barriers that is its beginning, and what was added at run time is unknown.

Ran = Mapping[str, frozenset[int]]  # name of a warp -> blocks

_SUMS = ("add", "or")
# The offset stays: `mapa` changes the CTA, and an address is shuffled to make it uniform.
_SAME = ("mov", "cvta", "cvt", "mapa", "shfl")
_DEPTH = 40  # instructions that are followed back


@dataclass(frozen=True)
class Known:
    """Known part of an address.

    Attributes:
        start: The constant part.
        whole: Whether that is all of it.
        based: Whether it contains a symbol.
    """

    start: int = 0
    whole: bool = False
    based: bool = False


class Arrivers:
    """The instructions of a program that signal barriers. inits: the mbarrier.init of each."""

    def __init__(self, program: Program, inits: Mapping[int, Instr] | None = None) -> None:
        self._program = program
        self._inits = inits or {}
        self._definitions: dict[str, list[Instr]] = defaultdict(list)
        self._values: dict[str, Known] = {}
        self._block_of: dict[int, int] = {}
        self._signals: list[tuple[Instr, Known]] = []
        for block in program.blocks:
            for step in block.steps:
                self._block_of[id(step.instr)] = block.index
                operands = step.instr.operands
                if operands and isinstance(operands[0], Reg):
                    self._definitions[operands[0].name].append(step.instr)
        for instr in program.sites:
            if signals(instr):
                self._signals.append((instr, self.address(instr)))
        waits = (i for i in program.sites if "mbarrier" in i.opcode and "_wait" in i.opcode)
        self._waits = [self.address(instr) for instr in waits]
        self.reachable = cache(self._reachable)
        self._avoidable = cache(self._can_avoid)

    def address(self, instr: Instr) -> Known:
        """Return the address of the barrier of an mbarrier instruction or an asynchronous copy."""
        found = [operand for operand in instr.operands if isinstance(operand, Addr)]
        if not found:
            return Known()
        base = self._value(found[-1].base, _DEPTH)
        return Known(base.start + found[-1].offset, base.whole, base.based)

    def of_mbarrier(self, offset: int, wait: Instr | None, kinds: set[str]) -> list[Instr]:
        """Return instructions with an effect in `kinds` ('arrive', 'land') on an mbarrier.

        The mbarrier is at shared `offset`, and `wait` waits for it.
        """
        waited = self.address(wait) if wait else Known(offset, True)
        signals_here = [(i, known) for i, known in self._signals if signals(i) & kinds]
        starts = [known.start for _, known in self._signals if known.based]
        found = [i for i, known in signals_here if self._meets(known, waited, offset, starts)]
        if waited.whole:
            found = [i for i in found if not self._ring_of_its_own(i, offset)]
        unknown = [i for i, known in signals_here if not known.based and not known.whole]
        return found or unknown

    def _meets(self, known: Known, waited: Known, offset: int, starts: list[int]) -> bool:
        if known.whole:
            return known.start == offset
        if not known.based or known.start > offset:
            return False
        if waited.based and not waited.whole:
            return known.start == waited.start
        return not any(known.start < start <= offset for start in starts)

    def _ring_of_its_own(self, signal: Instr, offset: int) -> bool:
        """Whether a signal is for a ring of barriers that others wait for, by an index as well,
        and that begins before `offset`, which is waited for by a constant address; barriers that
        one line of Python initialises are one ring."""
        start = self.address(signal).start
        if start >= offset or all(known.start != start or known.whole for known in self._waits):
            return False
        first, other = (self._inits.get(each) for each in (start, offset))
        return (
            not (first and other)
            or user_source(first) != user_source(other)
            or (not user_source(first))
        )

    def of_barrier(self, ident: int) -> list[Instr]:
        """bar and barrier.cta instructions that may name this barrier."""
        return [
            instr
            for instr in self._program.sites
            if instr.root in ("bar", "barrier")
            and not {"warp", "cluster"} & set(instr.parts)
            and self._value(_number(instr), _DEPTH) in (Known(ident, True), Known())
        ]

    def of_cluster(self) -> list[Instr]:
        sites = self._program.sites
        return [i for i in sites if i.opcode.startswith("barrier.cluster.arrive")]

    def can_reach(self, waiting: Waiting, instrs: list[Instr], ran: Ran) -> list[Instr]:
        """Return those of `instrs` that lanes could execute once their wait has ended.

        ran: blocks that each warp has executed.
        """
        blocks = self.reachable(waiting.block, self._foreign(waiting, ran))
        return [i for i in instrs if i is not waiting.instr and self._block_of[id(i)] in blocks]

    def executed(self, instr: Instr, blocks: frozenset[int]) -> bool:
        return self._block_of[id(instr)] in blocks

    def _foreign(self, waiting: Waiting, ran: Ran) -> frozenset[int]:
        """Return blocks of other roles.

        Code of other roles often follows a role's code, so that by the text a warp could reach it.
        These blocks were executed only by warps that never reached this one's wait, and are not
        needed to reach its end.
        """
        kin = set(ran.get(waiting.who.name, ()))
        for blocks in ran.values():
            kin |= blocks if waiting.block in blocks else frozenset()
        others = frozenset().union(*ran.values()) - kin
        return frozenset(block for block in others if self._avoidable(waiting.block, block))

    def _can_avoid(self, start: int, block: int) -> bool:
        blocks = self._program.blocks
        ways = self.reachable(start, frozenset([block]))
        return any(self._inside(blocks[at].successors) == [] for at in ways)

    def _inside(self, successors: Iterable[int]) -> list[int]:
        return [after for after in successors if after < len(self._program.blocks)]

    def _reachable(self, start: int, closed: frozenset[int] = frozenset()) -> frozenset[int]:
        """Return reachable blocks without passing through `closed` ones."""
        seen, pending = {start}, [start]
        while pending:
            for after in self._inside(self._program.blocks[pending.pop()].successors):
                if after not in seen and after not in closed:
                    seen.add(after)
                    pending.append(after)
        return frozenset(seen)

    # -- values -----------------------------------------------------------------------------

    def _value(self, operand: Any, depth: int) -> Known:
        if isinstance(operand, Imm):
            return Known(int(operand.value), True)
        if isinstance(operand, Sym):
            space, start = self._program.layout.symbols.get(operand.name, ("", 0))
            return Known(start + operand.offset, True, True) if space == "shared" else Known()
        if not isinstance(operand, Reg) or not depth:
            return Known()
        if operand.name not in self._values:
            self._values[operand.name] = Known()  # what a loop adds to it is unknown
            found = {self._result(i, depth - 1) for i in self._definitions[operand.name]}
            starts = [value.start for value in found if value.based]
            several = Known(min(starts), False, True) if starts else Known()
            self._values[operand.name] = found.pop() if len(found) == 1 else several
        return self._values[operand.name]

    def _result(self, instr: Instr, depth: int) -> Known:
        if instr.guard is not None:
            return Known()
        root, operands = instr.root, instr.operands
        if root in _SAME:
            return self._value(operands[1], depth)
        if root in _SUMS:
            return self._sum(operands[1], operands[2], depth)
        if root == "mad":
            return self._sum(None, operands[3], depth)
        if root == "sub" and isinstance(operands[2], Imm):
            return self._sum(operands[1], Imm(-int(operands[2].value)), depth)
        return Known()

    def _sum(self, first: Any, second: Any, depth: int) -> Known:
        a, b = self._value(first, depth), self._value(second, depth)
        return Known(a.start + b.start, a.whole and b.whole, a.based or b.based)


def signals(instr: Instr) -> set[str]:
    """Return the instruction's effects on an mbarrier: 'arrive', 'land' (bytes come), or none."""
    opcode = instr.opcode
    if opcode.startswith(("mbarrier.arrive", "tcgen05.commit", "cp.async.mbarrier.arrive")):
        return {"arrive"}
    if opcode.startswith("mbarrier.complete_tx") or "complete_tx" in opcode:
        return {"land"}
    if opcode.startswith(("st.async", "red.async", "clusterlaunchcontrol.try_cancel")):
        return {"land"}
    return set()


def _number(instr: Instr) -> Any:
    """The operand that names the barrier; `bar.red` has its result before it."""
    return instr.operands[1 if "red" in instr.parts else 0]


def user_source(instr: Instr) -> str:
    """Return the innermost Python line outside libraries; "" if there is none."""
    frames = instr.location.frames() if instr.location else []
    return next((f for f in frames if "site-packages" not in f), instr.source)


@dataclass(eq=False)
class Group:
    """Warps that wait alike: at one instruction, for the same barrier of their CTA, in one state.

    Attributes:
        could: Instructions that could signal the barrier.
        suppliers: Warps that cannot proceed and could reach one of these instructions.
        again: Whether all suppliers have already signalled in this phase.
        after: Groups of the suppliers.
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
        """Return what the phase of an mbarrier lacks: 'arrive', 'land' (bytes), or both."""
        if self.barrier is None:
            return set()
        lacks = {"arrive"} if self.barrier.pending else set[str]()
        return lacks | ({"land"} if self.barrier.tx > 0 else set())


def groups_of(stall: Stall, arrivers: Arrivers) -> list[Group]:
    """Return all groups, linked; groups that others wait for come first."""
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
    """Return the rank: groups that wait for nobody, then mbarriers, then lanes of a warp."""
    return bool(group.after) + 2 * (group.first.kind == "lanes")


def _alike(one: Waiting, barrier: Barrier | None) -> tuple[object, ...]:
    kind, cta, number = one.on or ("", one.who.cta, 0)
    state = barrier and (barrier.phase, barrier.expected, barrier.pending, barrier.tx)
    own = cta == one.who.cta or kind == "cluster"
    line = one.instr.line if one.instr else -one.block
    number = 0 if kind == "cluster" else number
    return kind or one.kind, line, number, own or cta, one.parity, one.lanes, state, one.text


def _supply(group: Group, stall: Stall, arrivers: Arrivers) -> None:
    """Find warps that could end the wait.

    Warps that have done their part are left out, unless all have.
    """
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
    """Keep the warps that signalled the barrier in earlier phases.

    Code of several roles often follows in sequence, so by the text alone every warp could reach the
    code of a later role.
    """
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
    """Return warps that have already done in this phase what it lacks, be it that the bytes which
    they brought went to the same mbarrier of other CTAs."""
    now = {s.agent for s in barrier.signals if s.kind in needs and s.now_times}
    if "land" in needs:
        theirs = (s for _, s in barrier.elsewhere if s.kind == "land")
        now |= {s.agent for s in theirs if s.last_phase >= barrier.phase}
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
    """Yield a group, a group it waits for, and so on, until one repeats or waits for nobody."""
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
