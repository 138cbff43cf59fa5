"""wgmma: what it reads in shared memory against other accesses, and who uses its registers too
early. PTX ISA, "wgmma.mma_async", "wgmma.fence", "wgmma.wait_group".

Each warp reads all of B, and of A its own 16 rows, with what it knew itself when it came to the
instruction: FlashAttention-3 writes each warp's rows of P with no more than a bar.warp.sync. That
an operation is complete any of the four learns by its own wait, and tells on: CUTLASS's pipelines
have one thread of a warpgroup release a stage. An H100 bears it out (conformance/questions.py): a
warp that came to its products at cycle 60 ended its wait at 200,426, only after the other three had
come at 200,067, and B, which it cleared then, had been read by all. So the wait of one warp covers
the rows of all four.
"""

from __future__ import annotations

from dataclasses import replace

from ptxemu.check import footprints
from ptxemu.check.agents import GroupWait, Ticket
from ptxemu.check.clocks import ALL_LANES
from ptxemu.check.evidence import Evidence, Reason
from ptxemu.check.findings import Findings
from ptxemu.check.races import Races
from ptxemu.check.state import States
from ptxemu.check.wgmma_registers import Hazard, hazards
from ptxemu.codegen.program import Program
from ptxemu.findings import ERROR, MANUAL, NOTE, Access, place_of
from ptxemu.machine.state import Multiplication, Warp, Warpgroup
from ptxemu.machine.umma_desc import SmemDesc
from ptxemu.machine.wgmma import ROWS, smem_desc


class Warpgroups:
    """Of one launch."""

    def __init__(
        self,
        program: Program,
        states: States,
        findings: Findings,
        races: Races,
    ) -> None:
        self._program = program
        self._states = states
        self._findings = findings
        self._races = races
        self._evidence = Evidence(states, findings.sites)
        self._hazards: dict[int, list[Hazard]] | None = None  # by site, on first use
        self._components: dict[Warpgroup, int] = {}
        self._tickets: dict[tuple[Warpgroup, int], list[Ticket]] = {}  # of outstanding operations

    def warpgroup_joined(self, w: Warp, group: Warpgroup, number: int) -> None:
        self._report_hazards(w)
        components = self._states.components(w.cta)
        if group not in self._components:
            number_of = self._components[group] = components.add("wgmma", str(group))
            self._states.warpgroups[w.cluster.index, number_of] = group
        ticket = Ticket(self._states.clocks[w], ALL_LANES, w.at)
        ticket.component, ticket.step = self._components[group], number
        self._tickets.setdefault((group, number), []).append(ticket)

    def warpgroup_multiply(self, what: Multiplication) -> None:
        form, _, a, b, _ = what.operands
        cta, grain = what.group.cta, self._states.grain
        of_b = footprints.matrix_cells(
            smem_desc(b), form.b_lines(), grain, mn_major=form.b_mn_major
        )
        lines = form.a_lines(ROWS)
        for ticket in self._tickets.pop((what.group, what.number)):
            self._races.read_shared(ticket, cta, of_b, ticket.position)
            if a is not None:
                warp = ticket.agent.warp.index - what.group.first
                part = rows_of(smem_desc(a), warp, form.a_mn_major)
                cells = footprints.matrix_cells(part, lines, grain, mn_major=form.a_mn_major)
                self._races.read_shared(ticket, cta, cells, ticket.position)

    def warpgroup_waited(self, w: Warp, group: Warpgroup, last: int) -> None:
        clock = self._states.clocks[w]
        before = clock.group_waits.get("wgmma", GroupWait(0, 0, 0))
        covered = max(before.covered, last)
        clock.group_waits["wgmma"] = GroupWait(w.at, group.of(w).issued, covered)
        if last:
            clock.know(self._components[group], last)

    def accumulator_used(self, w: Warp, what: Multiplication) -> None:
        """Once for each wgmma: what is missing is one wait, however many registers it has."""
        form, line, *_ = what.operands
        if not self._findings.new("accumulator", line):
            return
        sites = self._findings.sites
        site = next(
            k
            for k, instr in enumerate(sites)
            if instr.line == line and instr.opcode.startswith("wgmma.mma_async")
        )
        place, of = place_of(sites[site]), f"wgmma of {what.group}"
        writes = Access(of, "wgmma.mma_async", "write", "", **place)
        use = Access(w.label, sites[w.at].opcode, "use", "", **place_of(sites[w.at]))
        usual = Reason(
            "wgmma.wait_group (behind a wgmma.commit_group) before the use", "wgmma.wait_group"
        )
        clock, groups = self._states.clocks[w], what.group.of(w).groups
        reason = self._evidence.of_group("wgmma", what.number, clock, groups, clock, usual)
        self._findings.at(
            "race",
            f"{sites[w.at].opcode} uses an accumulator of {form.label}, which is not known to be"
            " complete",
            w.at,
            accesses=(writes, use),
            missing=reason.missing,
            rule=reason.rule,
            why=reason.why,
        )

    def _report_hazards(self, w: Warp) -> None:
        if self._hazards is None:
            self._hazards = hazards(self._program.blocks, self._program.site_of)
        found = self._hazards.pop(w.at, [])
        wrong = [hazard for hazard in found if not hazard.note]
        for hazard in wrong or found:
            sites = self._findings.sites
            instr, other = sites[w.at], sites[hazard.other]
            accesses: tuple[Access, ...] = ()
            if hazard.other:
                accesses = (
                    Access(w.label, other.opcode, hazard.what, "", **place_of(other)),
                    Access(w.label, instr.opcode, "use", "", **place_of(instr)),
                )
            self._findings.at(
                MANUAL if hazard.note else "race",
                hazard.message,
                w.at,
                severity=NOTE if hazard.note else ERROR,
                accesses=accesses,
                missing=hazard.missing,
                rule=hazard.rule,
            )


def rows_of(desc: SmemDesc, warp: int, mn_major: bool) -> SmemDesc:
    """A's part of one of the four warps."""
    if not mn_major:  # groups of 8 rows
        return replace(desc, start=desc.start + ROWS // 8 * warp * desc.stride)
    panel = desc.leading if desc.swizzle.bits else desc.stride
    panels, rest = divmod(2 * ROWS * warp, desc.swizzle.span)
    return replace(desc, start=desc.start + panels * panel + rest)
