"""Undefined data in registers: what follows from it, and where it must not get.

Reading memory that nothing wrote is no fault, and neither is computing with what is there:
compilers use registers that were never written, and rows that a partial tile lacks are computed and
dropped. It is reported where it reaches global memory, an address, a branch, the predicate of an
instruction, or an operand of a barrier or of an MMA. Global memory counts as defined.

While no register of a warp is undefined, its blocks run as they are; a read of undefined data stops
one, and it goes on in a form that tells what each instruction does (`codegen.tainted`).
"""

from __future__ import annotations

import numpy as np

from ptxemu.check.findings import Findings
from ptxemu.check.registers import Registers
from ptxemu.check.rules import RULES
from ptxemu.check.undefined import CODE, NEVER
from ptxemu.codegen import registry
from ptxemu.codegen.flow import Flow, UndefinedRead
from ptxemu.findings import Access, Finding, place_of
from ptxemu.machine.state import Warp
from ptxemu.ops.warp_mma import metadata_lanes

Extent = tuple[str, int, int]  # a space, its first and last unit

_MISSING = "a write of that memory, or a wait for it, before the read"
_BRANCHES = ("bra", "exit", "ret")


class Origins:
    """Where undefined data comes from, and the findings of where it gets to."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._reads: list[tuple[int, Access]] = []  # code n stands for number n - 1; with its site
        self._code_of: dict[int, int] = {}

    def named(self, codes: np.ndarray, site: int, agent: str, extent: Extent) -> np.ndarray:
        """Codes with a new origin, this read, for what was never written."""
        if not (codes == NEVER).any():
            return codes
        return np.where(codes == NEVER, CODE(self._origin(site, agent, extent)), codes)

    def _origin(self, site: int, agent: str, extent: Extent) -> int:
        """The code of a read of memory that nothing wrote."""
        if site not in self._code_of:
            space, first, last = extent
            instr = self._findings.sites[site]
            read = Access(agent, instr.opcode, "read", space, first, last, **place_of(instr))
            self._reads.append((site, read))
            self._code_of[site] = len(self._reads)
        return self._code_of[site]

    def reached(self, agent: str, site: int, code: int, sink: str) -> None:
        """Undefined data is where it must not be; told once per origin and sink."""
        if not self._findings.new("undefined", code, sink):
            return
        read_at, read = self._reads[code - 1]
        instr = self._findings.sites[site]
        use = Access(agent, instr.opcode, "use", "", **place_of(instr))
        self._findings.report(
            Finding(
                "uninitialised",
                f"{sink} gets data that {read.role} read and nothing wrote",
                **place_of(instr),
                accesses=(read, use),
                missing=_MISSING,
                rule=registry.match(self._findings.sites[read_at]).form.section,
            )
        )

    def branches(self, site: int) -> bool:
        return self._findings.sites[site].root in _BRANCHES


class RegisterFlow:
    """The `codegen.tainted.Follower` of a warp. flows: of the program's instructions, by site."""

    def __init__(self, w: Warp, flows: dict[int, Flow], origins: Origins) -> None:
        self.registers = Registers()
        self.masks = self.registers.masks
        self.following = False
        self._w = w
        self._flows = flows
        self._origins = origins

    def flow(self, sites: tuple[int, ...], mb: int, *values: object) -> None:
        registers, masks = self.registers, self.masks
        for site in sites:
            flow = self._flows[site]
            for metadata in flow.watched:
                self._watch(site, metadata, mb & metadata_lanes(flow.instr), flow.sink)
            sources = [name for name in flow.sources if name in masks]
            if sources:
                news = RULES[flow.kind](flow, masks, mb, *values)
                origin = registers.origins[sources[0]]
                for name, new in zip(flow.targets, news, strict=True):
                    registers.set(name, new, mb, origin)
            elif masks:
                registers.clear(flow.targets, mb)

    def flow_in(self, site: int, mb: int) -> None:
        flow, registers = self._flows[site], self.registers
        registers.begin()
        if self.masks:
            for name in flow.watched:
                self._watch(site, name, mb, flow.sink)
            registers.stored = registers.codes_of(flow, mb)

    def flow_out(self, site: int, mb: int) -> None:
        flow, registers = self._flows[site], self.registers
        if registers.stored is not None and not registers.landed:
            code = int(registers.stored.max())
            self._origins.reached(self._w.label, site, code, "global memory")
        registers.take_loaded(flow, mb)
        registers.begin()

    def flow_guard(self, site: int, name: str, mb: int) -> None:
        branch = self._origins.branches(site)
        self._watch(site, name, mb, "a branch" if branch else "the predicate of an instruction")

    def keep(self, names: frozenset[str], mb: int) -> None:
        self.registers.keep(names, mb)

    def _watch(self, site: int, name: str, mb: int, sink: str) -> None:
        if self.registers.undefined(name, mb):
            self._origins.reached(self._w.label, site, self.registers.origins[name], sink)
            self.registers.clear([name], mb)  # what follows from it has the same cause

    def load(self, lanes: np.ndarray | slice, codes: np.ndarray, extent: Extent) -> None:
        """The instruction reads undefined data: codes [row, lane]."""
        if not self.following:
            raise UndefinedRead
        w = self._w
        self.registers.load(lanes, self._origins.named(codes, w.at, w.label, extent))
