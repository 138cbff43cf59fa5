"""Allocations passed to a kernel: their names, accesses beyond them, and their written parts."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ptxemu.check.agents import Ticket
from ptxemu.check.findings import Findings, Side, line_of, short
from ptxemu.check.global_memory import GlobalShadow
from ptxemu.codegen.program import Program
from ptxemu.findings import ERROR, NOTE, Access, Finding, place_of
from ptxemu.machine.async_ops import Work
from ptxemu.machine.memory import Block, GlobalMemory, Stray
from ptxemu.machine.state import Warp
from ptxemu.syntax.tree import Instr

_WORD = 8  # bytes of a pointer, which structures align to as much


class Pointers:
    """places: (offset, bytes) of each parameter within `params`, all of them packed."""

    def __init__(
        self, memory: GlobalMemory, params: np.ndarray, places: Sequence[tuple[int, int]]
    ) -> None:
        self._memory = memory
        self._words: dict[int, int] = {}  # the first parameter with this word: others are its maps
        for number, (offset, nbytes) in enumerate(places):
            for at in range(offset, offset + nbytes - _WORD + 1, _WORD):
                word = int.from_bytes(params[at : at + _WORD].tobytes(), "little")
                self._words.setdefault(word, number)

    def name(self, address: int) -> str:
        """Return a name such as "parameter 2 + 1,024 bytes"; "" if no parameter points there."""
        block = self._memory.block_at(address)
        return "" if block is None else self._from(address, block)

    def near(self, address: int, block: Block | None) -> str:
        """Describe an address outside every allocation, relative to `block`, the nearest one."""
        return "" if block is None else self._from(address, block)

    def of_block(self, block: Block) -> str:
        """Return a name such as "parameter 2"."""
        return self._from(block.start, block).partition(" +")[0].partition(" -")[0]

    def _from(self, address: int, block: Block) -> str:
        inside = sorted(word for word in self._words if block.start <= word < block.end)
        if not inside:
            return ""
        pointer = inside[max(bisect.bisect_right(inside, address) - 1, 0)]
        number, gap = self._words[pointer], address - pointer
        far = f" {'-' if gap < 0 else '+'} {abs(gap):,} bytes" if gap else ""
        return f"parameter {number}{far}"


# Accesses to global memory outside the kernel's allocations: reported once per instruction, with
# the agent and the allocation below.

_RULE = "ld, st: the address is allocated"
_HINTS = {
    "null": "a null pointer: a tensor that was not passed, or a table that was not filled",
    "write": "a bound on the index: such as a predicate for the last tile",
    "read": "a bound on the index, or a length that is a multiple of the tile",
}


class Bounds:
    """tickets: those of outstanding asynchronous operations; `work` is the one that runs now."""

    def __init__(
        self,
        program: Program,
        findings: Findings,
        tickets: dict[Work, Ticket],
        pointers: Pointers,
    ) -> None:
        self._pointers = pointers
        self.work: Work | None = None
        self._program = program
        self._findings = findings
        self._tickets = tickets

    def stray(self, stray: Stray) -> None:
        """Report a stray access; it was refused unless it was a read inside a block.

        Harmless reads that hardware executes are notes.
        """
        instr, agent = self._who()
        harmless = stray.slack and not stray.write
        if not self._findings.new("out-of-bounds", instr and instr.line, harmless):
            return
        what = "write" if stray.write else "read"
        place = {} if instr is None else place_of(instr)
        role = "" if instr is None else short(instr.opcode)
        first, last = (address & (1 << 64) - 1 for address in (stray.low, stray.high - 1))
        known_as = self._pointers.near(stray.low, stray.near)
        space = "global memory"
        access = Access(agent, role, what, space, first, last, **place, known_as=known_as)
        finding = Finding(
            "out-of-bounds",
            stray.words(),
            NOTE if harmless else ERROR,
            accesses=(access,) if agent else (),
            missing=_HINTS["null" if 0 <= stray.low < 1 << 12 else what],
            rule=_RULE,
            **place,
        )
        self._findings.report(finding)

    def _who(self) -> tuple[Instr | None, str]:
        """Return the instruction and its agent; for a copy, the instruction that issued it."""
        ticket = self._tickets.get(self.work) if self.work else None
        if ticket is not None:
            return self._findings.sites[ticket.site], ticket.agent.agent
        instr = self._program.running_instruction()
        warp = self._program.running_warp()
        return instr, warp.name() if isinstance(warp, Warp) else ""


# Parts of the written allocations that a launch has written.
#
# No checker knows which element a tile should go to. But if several CTAs store equal values to one
# place, and other places of the same allocation are left out, an index is likely to be wrong: that
# is a note. The list of partly written allocations helps to find the cause of a wrong result.

_SHOWN = 3  # places in the source


@dataclass
class Coverage:
    """repeated: two stores of the same values to one address by two clusters, by their sites."""

    memory: GlobalMemory
    shadow: GlobalShadow
    pointers: Pointers
    sites: list[Instr]
    repeated: dict[tuple[int, int], tuple[Side, Side]] = field(default_factory=dict)

    def repeats(self, before: Side, now: Side) -> None:
        self.repeated.setdefault((before.stamp.site, now.stamp.site), (before, now))

    def findings(self, accesses: dict[tuple[int, int], tuple[Access, Access]]) -> Iterator[Finding]:
        """accesses: of each of `repeated`."""
        for key, (before, _) in self.repeated.items():
            block = self.memory.block_at(before.first)
            if block is None:
                continue
            size, (written, _) = block.end - block.start, self._written(block)
            if written < size:
                yield Finding(
                    "index",
                    f"two CTAs store the same values at one place, and {size - written:,} of the "
                    f"{size:,} bytes there are written by nobody",
                    NOTE,
                    accesses=accesses[key],
                    missing="if each CTA is to have its own part: the CTA in the index of the tile",
                )

    def partly(self) -> list[str]:
        """A line for each allocation that is written, but not whole."""
        lines = []
        for block in self.memory.blocks():
            written, sites = self._written(block)
            size = block.end - block.start
            if 0 < written < size:
                where = list(dict.fromkeys(map(self._place, sites)))
                more = f" and {len(where) - _SHOWN} more" * (len(where) > _SHOWN)
                name = self.pointers.of_block(block) or f"{block.start:#x}"
                lines.append(
                    f"{name}: {written:,} of {size:,} bytes, at {', '.join(where[:_SHOWN])}{more}"
                )
        return lines

    def _place(self, site: int) -> str:
        return line_of(self.sites[site])

    def _written(self, block: Block) -> tuple[int, list[int]]:
        """Return the number of written bytes and the instructions that last wrote them."""
        count, sites = self.shadow.written(block.start, block.end)
        return min(count, block.end - block.start), sorted(sites)
