"""Accesses to global memory that nobody gave to the kernel: found once for each instruction, with
who it was and what lies below."""

from __future__ import annotations

from ptxemu.check.agents import Ticket
from ptxemu.check.findings import Findings, short
from ptxemu.check.pointers import Pointers
from ptxemu.codegen.program import Program
from ptxemu.findings import ERROR, NOTE, Access, Finding, place_of
from ptxemu.machine.async_ops import Work
from ptxemu.machine.memory import Stray
from ptxemu.machine.state import Warp
from ptxemu.syntax.tree import Instr

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
        """Report an access, which has been refused where it is no read inside of a block: those
        that hardware does for nobody's harm are notes."""
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
        """The instruction, and on whose behalf: of a copy the one that issued it."""
        ticket = self._tickets.get(self.work) if self.work else None
        if ticket is not None:
            return self._findings.sites[ticket.site], ticket.agent.agent
        instr = self._program.running_instruction()
        warp = self._program.running_warp()
        return instr, warp.name() if isinstance(warp, Warp) else ""
