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

from ptxemu.check.flow import UndefinedRead
from ptxemu.check.races import Races
from ptxemu.check.registers import Registers
from ptxemu.check.rules import RULES
from ptxemu.check.undefined import CODE, NEVER
from ptxemu.ops import registry
from ptxemu.report import Access, Finding, place_of

_MISSING = "a write of that memory, or a wait for it, before the read"
_BRANCHES = ("bra", "exit", "ret")


class Taint(Races):
    """The part of the checker that follows undefined data through registers, and reports it."""

    def __init__(self, machine: object) -> None:
        super().__init__(machine)
        self.flows = machine.program.flows
        self.origins: list[tuple[int, Access]] = []  # code n stands for number n - 1; with its site
        self._code_of: dict[int, int] = {}
        self._told: set[tuple] = set()

    def warp_started(self, w: object) -> None:
        super().warp_started(w)
        w.taint = Registers()
        w.clock.warp = w

    # -- what the instructions of a block do --------------------------------------------------

    def flow(self, w: object, sites: tuple[int, ...], mb: int, *values: object) -> None:
        """Instructions on registers alone; values: what the rule of the only one needs."""
        taint = w.taint
        masks = taint.masks
        for site in sites:
            flow = self.flows[site]
            sources = [name for name in flow.sources if name in masks]
            if sources:
                news = RULES[flow.kind](flow, masks, mb, *values)
                origin = taint.origins[sources[0]]
                for name, new in zip(flow.targets, news, strict=True):
                    taint.set(name, new, mb, origin)
            elif masks:
                taint.clear(flow.targets, mb)

    def flow_in(self, w: object, site: int, mb: int) -> None:
        """An instruction that reaches memory or other agents is about to run."""
        flow, taint = self.flows[site], w.taint
        taint.begin()
        if taint.masks:
            for name in flow.watched:
                self._watch(w, site, name, mb, flow.sink)
            taint.stored = taint.codes_of(flow, mb)

    def flow_out(self, w: object, site: int, mb: int) -> None:
        """It has run."""
        flow, taint = self.flows[site], w.taint
        if taint.stored is not None and not taint.landed:
            self._reached(w.label, site, int(taint.stored.max()), "global memory")
        taint.take_loaded(flow, mb)
        taint.begin()

    def flow_guard(self, w: object, site: int, name: str, mb: int) -> None:
        """A block ends with a branch, or with the decision whether `site` is executed."""
        branch = self.sites[site].root in _BRANCHES
        self._watch(w, site, name, mb, "a branch" if branch else "the predicate of an instruction")

    def _watch(self, w: object, site: int, name: str, mb: int, sink: str) -> None:
        if w.taint.undefined(name, mb):
            self._reached(w.label, site, w.taint.origins[name], sink)
            w.taint.clear([name], mb)  # what follows from it has the same cause

    def _loaded(self, w: object, lanes: object, codes: np.ndarray, extent: tuple) -> None:
        """An instruction of a warp reads undefined data: codes [row, lane]."""
        if not w.taint.following:
            raise UndefinedRead
        w.taint.load(lanes, self._named(codes, w.at, w.label, extent))

    # -- origins and findings -----------------------------------------------------------------

    def _named(self, codes: np.ndarray, site: int, agent: str, extent: tuple) -> np.ndarray:
        """Codes with a new origin, this read, for what was never written."""
        if not (codes == NEVER).any():
            return codes
        return np.where(codes == NEVER, CODE(self._origin(site, agent, extent)), codes)

    def _origin(self, site: int, agent: str, extent: tuple) -> int:
        """The code of a read of memory that nothing wrote; extent: its space, first and last
        unit."""
        if site not in self._code_of:
            space, first, last = extent
            read = self._side(site, agent, "read", space, first=first, last=last)
            self.origins.append((site, read))
            self._code_of[site] = len(self.origins)
        return self._code_of[site]

    def _reached(self, agent: str, site: int, code: int, sink: str) -> None:
        """Undefined data is where it must not be; told once per origin and sink."""
        if (code, sink) in self._told:
            return
        self._told.add((code, sink))
        read_at, read = self.origins[code - 1]
        instr = self.sites[site]
        self.machine.report(
            Finding(
                "uninitialised",
                f"{sink} gets data that {read.role} read and nothing wrote",
                **place_of(instr),
                accesses=(read, self._side(site, agent, "use", "")),
                missing=_MISSING,
                rule=registry.match(self.sites[read_at]).form.section,
            )
        )

    def _side(self, site: int, agent: str, what: str, space: str, **extent: int) -> Access:
        instr = self.sites[site]
        return Access(
            agent,
            instr.opcode,
            what,
            space,
            **place_of(instr),
            **extent,
        )
