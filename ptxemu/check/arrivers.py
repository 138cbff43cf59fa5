"""Which instructions of a program could signal a barrier, and from where they can be reached.

An address is followed back through the code as far as it is a symbol and constants: of a ring of
barriers that is its beginning, and what was added at run time is unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ptxemu.codegen.program import Program
from ptxemu.machine.deadlock import Waiting
from ptxemu.syntax.tree import Addr, Imm, Instr, Reg, Sym

Ran = Mapping[str, frozenset[int]]  # name of a warp -> blocks

_SUMS = ("add", "or")
# The offset stays: `mapa` changes who owns it, and an address is shuffled to make it uniform.
_SAME = ("mov", "cvta", "cvt", "mapa", "shfl")
_DEPTH = 40  # instructions that are followed back


@dataclass(frozen=True)
class Known:
    """What is known of an address: the constant part, whether that is all of it, and whether a
    symbol is in it."""

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
        """Of the barrier of an mbarrier instruction or an asynchronous copy."""
        found = [operand for operand in instr.operands if isinstance(operand, Addr)]
        if not found:
            return Known()
        base = self._value(found[-1].base, _DEPTH)
        return Known(base.start + found[-1].offset, base.whole, base.based)

    def of_mbarrier(self, offset: int, wait: Instr | None, kinds: set[str]) -> list[Instr]:
        """Those that could do one of `kinds` ('arrive', 'land') to the mbarrier at a shared offset
        for which `wait` waits."""
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
        """Those of `instrs` that lanes could execute, once what they wait for has come. ran: blocks
        that each warp has been through."""
        blocks = self.reachable(waiting.block, self._foreign(waiting, ran))
        return [i for i in instrs if i is not waiting.instr and self._block_of[id(i)] in blocks]

    def executed(self, instr: Instr, blocks: frozenset[int]) -> bool:
        return self._block_of[id(instr)] in blocks

    def _foreign(self, waiting: Waiting, ran: Ran) -> frozenset[int]:
        """Blocks of other roles, which often stand behind one's own, so that a warp could come
        there as far as the text tells: only warps that never came to where this one waits have been
        through them, and it can come to its end without."""
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
        """Blocks, without a way through those that are `closed`."""
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
    """What an instruction does to an mbarrier: 'arrive', 'land' (bytes come), or nothing."""
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
    """The innermost line of Python that is no library's; "" where there is none."""
    frames = instr.location.frames() if instr.location else []
    return next((f for f in frames if "site-packages" not in f), instr.source)
