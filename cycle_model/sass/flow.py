"""SASS of one kernel: instructions with their control words, basic blocks, dominators, loops."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

# One SASS instruction, and the requests of its control word to the scheduler.
#
# The compiler, not the hardware, prevents an instruction from issuing too early. If it knows the
# latency of a result, the preceding instruction waits: `stall`. Otherwise, as for memory, the
# producer takes one of six scoreboards at issue. It releases the scoreboard when the result is
# there (`writes`) or when its operands have been read (`reads`). A consumer waits until the
# scoreboards of its mask (`waits`) are free.

TARGET = re.compile(r"`\(([^)]+)\)")
NO_SCOREBOARD = 7

# What kinds of instructions begin with. Spills: to local memory and back.
SPILLS = ("STL", "LDL")
BARRIERS = (
    *("SYNCS", "BAR", "DEPBAR", "LDGDEPBAR", "FENCE", "MEMBAR", "WARPSYNC", "NOP", "NANOSLEEP"),
)
SELECTION = ("FSETP", "FSEL", "ISETP", "SEL", "PLOP3", "P2R", "R2P", "UISETP", "USEL")

Kinds = dict[str, tuple[str, ...]]  # kind -> what its opcodes begin with; the first match counts


def kind_of(opcode: str, kinds: Kinds) -> str:
    """The kind of an instruction."""
    return next(kind for kind, heads in kinds.items() if opcode.startswith(heads))


class Control(NamedTuple):
    """Control fields of an instruction.

    Attributes:
        stall: Cycles until the warp may issue again, 0 to 15.
        yields: Whether another warp should issue first.
        writes: Scoreboard held until the result is written, 7 for none.
        reads: Scoreboard held until the operands are read, 7 for none.
        waits: Mask of scoreboards to wait for.
        reuse: Operand slots that are kept.
    """

    stall: int = 1
    yields: bool = False
    writes: int = NO_SCOREBOARD
    reads: int = NO_SCOREBOARD
    waits: int = 0
    reuse: int = 0

    @classmethod
    def decoded(cls, high: int) -> Control:
        """Decode the upper 64 of an instruction's 128 bits."""
        return cls(
            stall=high >> 41 & 15,
            yields=not high >> 45 & 1,
            writes=high >> 46 & 7,
            reads=high >> 49 & 7,
            waits=high >> 52 & 63,
            reuse=high >> 58 & 15,
        )


NOTHING_ASKED = Control()


@dataclass(frozen=True)
class Instruction:
    """A SASS instruction; `guard` is its predicate ('P0', '!UP1') or empty."""

    address: int
    guard: str
    opcode: str
    operands: str
    control: Control = NOTHING_ASKED

    @property
    def word(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def text(self) -> str:
        """The instruction as nvdisasm prints it."""
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {self.operands}".rstrip()

    @property
    def target(self) -> str | None:
        """The label it names, if any."""
        match = TARGET.search(self.operands)
        return match[1] if match else None

    @property
    def is_branch(self) -> bool:
        """Whether it is BRA, or a call of a label of its own function.

        ptxas writes such a call, which never returns, for a branch that all lanes take together.
        """
        calls = self.word == "CALL" and (self.target or "").startswith(".L_")
        return calls or self.opcode.startswith("BRA")

    @property
    def conditional(self) -> bool:
        """A branch that may fall through: guarded, or with a predicate before its target."""
        return bool(self.guard) or bool(self.operands.partition("`")[0].strip())

    @property
    def repetition(self) -> int:
        """TMEM columns of a 32x32b LDTM or STTM: 32 for LDTM.x32."""
        match = re.search(r"\.x(\d+)", self.opcode)
        return int(match[1]) if match else 1


def kinds_of(instructions: Iterable[Instruction], kinds: Kinds) -> dict[str, int]:
    """Count instructions by kind; the result has every kind."""
    counts = dict.fromkeys(kinds, 0)
    for item in instructions:
        counts[kind_of(item.opcode, kinds)] += 1
    return counts


BARRIER_REGISTER = re.compile(r"\bB\d+\b")
REGISTER = re.compile(r"\bR(\d+)\b")
BRANCH_TARGETS = re.compile(r"BRANCH_TARGETS ([.\w,$]+)")
JUMPS = ("BRA", "EXIT", "RET", "KILL", "BRX", "JMX", "BSYNC")
ENDS = ("EXIT", "RET", "KILL", "JMX")


@dataclass
class Block:
    """A basic block; edges are indices of blocks."""

    index: int
    instructions: list[Instruction]
    successors: list[int] = field(default_factory=list)
    predecessors: list[int] = field(default_factory=list)

    def has(self, *heads: str) -> bool:
        """True when an opcode begins with one of `heads`."""
        return any(item.opcode.startswith(heads) for item in self.instructions)


class Function:
    """Basic blocks, dominators and natural loops of one kernel."""

    def __init__(self, name: str, instructions: list[Instruction], labels: dict[str, int]) -> None:
        self.name = name
        self.instructions = instructions
        self.labels = labels
        self._meets = _reconvergence(instructions, labels)
        self.blocks = self._made_blocks()

    @cached_property
    def registers(self) -> int:
        """Number of registers per thread that the instructions name."""
        found = (REGISTER.findall(item.operands) for item in self.instructions)
        return max((int(number) for numbers in found for number in numbers), default=0) + 1

    def goals(self, index: int) -> set[int]:
        """Return the instructions that may follow; the end index if the function ends.

        A call of another function counts as returned.
        """
        last, after, labels = self.instructions[index], index + 1, self.labels
        if last.opcode.startswith("BSYNC"):
            register = BARRIER_REGISTER.search(last.operands)
            met = self._meets.get(register[0], frozenset()) if register else frozenset()
            return {after} if after in met or not met else set(met)
        if last.is_branch:
            goals = {labels[last.target]} if last.target in labels else set()
            return goals | {after} if last.conditional else goals
        if last.opcode.startswith("BRX"):
            named = BRANCH_TARGETS.search(last.operands)
            return {labels[label] for label in named[1].split(",")} if named else set()
        if last.opcode.startswith(ENDS) and not last.guard:
            return set()
        return {after}

    def _made_blocks(self) -> list[Block]:
        """Make basic blocks with their edges; a branch out of the function has none."""
        leaders = {0, *self.labels.values()}
        for index, item in enumerate(self.instructions):
            if item.is_branch or item.opcode.startswith(JUMPS):
                leaders.add(index + 1)
        bounds = sorted(leader for leader in leaders if leader < len(self.instructions))
        at = {begin: index for index, begin in enumerate(bounds)}
        blocks = []
        for index, (begin, end) in enumerate(pairwise([*bounds, len(self.instructions)])):
            successors = sorted(at[goal] for goal in self.goals(end - 1) if goal in at)
            blocks.append(Block(index, self.instructions[begin:end], successors))
        for block in blocks:
            for successor in block.successors:
                blocks[successor].predecessors.append(block.index)
        return blocks

    @cached_property
    def order(self) -> list[int]:
        """Blocks reachable from the entry in reverse postorder."""
        seen, finished = {0}, []
        stack = [(0, iter(self.blocks[0].successors))]
        while stack:
            block, successors = stack[-1]
            fresh = next((s for s in successors if s not in seen), None)
            if fresh is None:
                finished.append(block)
                stack.pop()
            else:
                seen.add(fresh)
                stack.append((fresh, iter(self.blocks[fresh].successors)))
        return finished[::-1]

    @cached_property
    def dominators(self) -> dict[int, frozenset[int]]:
        """Block -> the blocks on every path to it, itself included."""
        everything = frozenset(self.order)
        result = dict.fromkeys(self.order, everything)
        result[0] = frozenset({0})
        changed = True
        while changed:
            changed = False
            for block in self.order[1:]:
                before = [result[p] for p in self.blocks[block].predecessors if p in result]
                now = frozenset.intersection(*before) | {block}
                changed |= now != result[block]
                result[block] = now
        return result

    @cached_property
    def loops(self) -> dict[int, frozenset[int]]:
        """Head -> blocks of the natural loop, all back edges to one head merged."""
        bodies: dict[int, set[int]] = {}
        for tail in self.order:
            for head in self.blocks[tail].successors:
                if head in self.dominators[tail]:
                    bodies.setdefault(head, {head}).update(self._reaching(tail, head))
        return {head: frozenset(body) for head, body in bodies.items()}

    def loops_with(self, *marks: str) -> list[int]:
        """Heads of the loops in which an opcode begins with each of the marks."""
        return [
            head
            for head, body in self.loops.items()
            if all(any(self.blocks[block].has(mark) for block in body) for mark in marks)
        ]

    def innermost(self, heads: Iterable[int]) -> list[int]:
        """Return the loops that contain none of the other given loops."""
        heads = list(heads)
        return [h for h in heads if not any(o != h and o in self.loops[h] for o in heads)]

    def _reaching(self, tail: int, head: int) -> set[int]:
        """Blocks from which `tail` can be reached without passing `head`."""
        found, stack = {head, tail}, [tail]
        while stack:
            block = stack.pop()
            if block != head:
                fresh = [p for p in self.blocks[block].predecessors if p not in found]
                found.update(fresh)
                stack.extend(fresh)
        return found

    def code(self, blocks: Iterable[int]) -> tuple[Instruction, ...]:
        """Instructions of these blocks in execution order."""
        wanted = set(blocks)
        return tuple(i for b in self.order if b in wanted for i in self.blocks[b].instructions)

    def address(self, block: int) -> int:
        """Return the address at which a block begins."""
        return self.blocks[block].instructions[0].address

    def guarded(self, body: frozenset[int]) -> list[tuple[int, frozenset[int]]]:
        """(branching block, blocks inside `body` that only one of its ways leads to)."""
        regions = []
        for block in body:
            ways = self.blocks[block].successors
            for way in ways if len(ways) > 1 else ():
                if way in body and self.blocks[way].predecessors == [block]:
                    region = frozenset(b for b in body if way in self.dominators[b])
                    regions.append((block, region))
        return regions


def _reconvergence(
    instructions: list[Instruction], labels: dict[str, int]
) -> dict[str, frozenset[int]]:
    """Map each convergence barrier register to the place where BSSY reconverges its threads."""
    meets: dict[str, frozenset[int]] = {}
    for item in instructions:
        if item.opcode.startswith("BSSY") and item.target in labels:
            for register in BARRIER_REGISTER.findall(item.operands):
                meets[register] = meets.get(register, frozenset()) | {labels[item.target or ""]}
    return meets


# Whether ptxas let the products of Hopper's tensor core overlap.
#
# ptxas serialises every wgmma of a kernel if it cannot prove that registers of a wgmma in flight
# are unchanged, or has too few of them: each wgmma becomes a group that is waited for before the
# next one is issued. It reports this in an advisory (C7510 to C7515) that `ptxas -v` prints and the
# DSL does not; the machine code shows it as well.

PRODUCTS = ("HGMMA", "QGMMA", "IGMMA", "BGMMA")
WAIT = "WARPGROUP.DEPBAR"
GROUP_ENDS = "gsb0"  # an operand of the last product of a group
FOR_ALL = "0x0"  # of the wait: no group may be in flight


def is_serialised(function: Function) -> bool | None:
    """Whether all groups are waited for after each product, before the next; None without products.

    A kernel that requests just that counts as well.
    """
    marks = [item for item in function.instructions if item.opcode.startswith((*PRODUCTS, WAIT))]
    products = [n for n, item in enumerate(marks) if not item.opcode.startswith(WAIT)]
    if not products:
        return None
    for n in products:
        waits = n + 1 < len(marks) and marks[n + 1].opcode.startswith(WAIT)
        ends = marks[n].operands.endswith(GROUP_ENDS)
        if not (ends and waits and marks[n + 1].operands.endswith(FOR_ALL)):
            return False
    return True
