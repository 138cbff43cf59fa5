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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ptxemu.check import footprints
from ptxemu.check.agents import GroupWait, Ticket
from ptxemu.check.clocks import ALL_LANES
from ptxemu.check.evidence import Evidence, Reason
from ptxemu.check.findings import Findings
from ptxemu.check.races import Races
from ptxemu.check.state import States
from ptxemu.codegen.blocks import Block
from ptxemu.codegen.flow import names
from ptxemu.codegen.program import Program
from ptxemu.findings import ERROR, MANUAL, NOTE, Access, place_of
from ptxemu.machine.state import Multiplication, Warp, Warpgroup
from ptxemu.machine.umma_desc import SmemDesc
from ptxemu.machine.wgmma import ROWS, smem_desc
from ptxemu.syntax.tree import Addr, Instr, Reg, Vec

# The registers of wgmma against ordinary instructions, read off the program along all its paths:
# PTX ISA, "wgmma.fence", "wgmma.mma_async".
#
# A `wgmma.fence` comes before a warpgroup's first operation, and between an access of a register
# and an operation that has it as accumulator or as part of A. Until a `wgmma.wait_group` covers an
# operation, its registers of A stay as they are. Moves count as no access, and a constant is always
# there: compilers put both where the manual would want a fence, and ptxas takes them away again.
# That accumulators were only read is a note: CUTLASS's dense_gemm_fp8_2xacc.py adds them up and
# multiplies on without a fence.

_FENCE = "wgmma.fence before it, after the access"
_OLDEST = 9  # groups: wgmma.wait_group allows at most 7


@dataclass(frozen=True)
class Hazard:
    """Hazard at a wgmma.mma_async.

    Attributes:
        other: Site of the ordinary instruction, 0 if there is none.
        what: Its access.
        note: Whether only the manual's text requires what is missing.
    """

    message: str
    missing: str
    rule: str
    other: int = 0
    what: str = ""
    note: bool = False


@dataclass(eq=False)
class _State:
    """On some path: fenced on all; written, read: registers accessed since the last fence, with the
    site; flying: registers of A in use, with how many groups were committed since, and the site."""

    fenced: bool = True
    written: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    flying: dict[str, tuple[int, int]] = field(default_factory=dict)

    def copy(self) -> _State:
        return _State(self.fenced, dict(self.written), dict(self.read), dict(self.flying))

    def merge(self, other: _State) -> bool:
        """Add the paths of another; whether that changed anything."""
        changed = self.fenced and not other.fenced
        self.fenced &= other.fenced
        for mine, theirs in ((self.written, other.written), (self.read, other.read)):
            for name, site in theirs.items():
                if name not in mine:
                    mine[name] = site
                    changed = True
        for name, (age, site) in other.flying.items():
            if name not in self.flying or age < self.flying[name][0]:
                self.flying[name] = (age, site)
                changed = True
        return changed


def hazards(blocks: list[Block], site_of: Mapping[int, int]) -> dict[int, list[Hazard]]:
    """Return the hazards at each wgmma.mma_async, by site.

    site_of: sites by the id of an instruction.
    """
    instrs = [[step.instr for step in block.steps] for block in blocks]
    walk = _Walk(site_of, _relevant(instr for block in instrs for instr in block))
    before: dict[int, _State] = {0: _State(fenced=False)}
    pending = [0]
    while pending:
        index = pending.pop()
        state = before[index].copy()
        for instr in instrs[index]:
            walk.step(state, instr)
        for after in blocks[index].successors:
            if after not in before:
                before[after] = state.copy()
                pending.append(after)
            elif before[after].merge(state):
                pending.append(after)
    return {site: list(found.values()) for site, found in walk.found.items()}


def _relevant(instrs: Iterable[Instr]) -> set[str]:
    """Return the registers of A and D, and those that are moved to them."""
    found: set[str] = set()
    moves: list[tuple[str, str]] = []
    for instr in instrs:
        if instr.opcode.startswith("wgmma.mma_async"):
            found.update(name for each in instr.operands[:2] for name in _listed(each))
        elif instr.root == "mov":
            moves += _moved(instr)
    size = -1
    while size != len(found):
        size = len(found)
        found.update(source for target, source in moves if target in found)
    return found


def _moved(instr: Instr) -> list[tuple[str, str]]:
    """(target, source) of a move of registers."""
    target, source = instr.operands[:2]
    if isinstance(target, Reg) and isinstance(source, Reg):
        return [(target.name, source.name)]
    return []


def _listed(operand: object) -> list[str]:
    """Return the registers of a fragment; none for a descriptor."""
    return names(operand) if isinstance(operand, Vec) else []


@dataclass(eq=False)
class _Walk:
    """Walk through the instructions of a kernel.

    Attributes:
        site_of: Sites of instructions.
        relevant: Registers to track.
        found: Hazards at each site, by message.
    """

    site_of: Mapping[int, int]
    relevant: set[str]
    found: dict[int, dict[str, Hazard]] = field(default_factory=dict)

    def step(self, state: _State, instr: Instr) -> None:
        """Apply an instruction's effect to the state."""
        if instr.opcode.startswith("wgmma."):
            self._warpgroup(state, instr)
            return
        moves = _moved(instr) if instr.root == "mov" else []
        if moves:
            for accesses in (state.written, state.read):
                for target, source in moves:
                    accesses.pop(target, None)
                    if source in accesses and target in self.relevant:
                        accesses[target] = accesses[source]
            return
        self._ordinary(state, instr)

    def _ordinary(self, state: _State, instr: Instr) -> None:
        site = self.site_of[id(instr)]
        targets: list[str] = []
        operands = instr.operands
        if operands and not isinstance(operands[0], Addr):
            targets, operands = names(operands[0]), operands[1:]
        for operand in operands:
            for name in self.relevant.intersection(names(operand)):
                state.read[name] = site
        constant = instr.root == "mov" and not any(names(operand) for operand in operands)
        for name in self.relevant.intersection(targets):
            if constant:
                state.written.pop(name, None)
                continue
            state.written[name] = site
            if name in state.flying:
                self._overwritten(name, site, state.flying.pop(name)[1])

    def _warpgroup(self, state: _State, instr: Instr) -> None:
        if instr.opcode.startswith("wgmma.fence"):
            state.fenced, state.written, state.read = True, {}, {}
        elif instr.opcode.startswith("wgmma.commit_group"):
            state.flying = {
                name: (min(age + 1, _OLDEST), site) for name, (age, site) in state.flying.items()
            }
        elif instr.opcode.startswith("wgmma.wait_group"):
            allowed = int(getattr(instr.operands[0], "value", 0))
            state.flying = {
                name: each for name, each in state.flying.items() if not 0 < each[0] > allowed
            }
        elif instr.opcode.startswith("wgmma.mma_async"):
            self._multiply(state, instr)

    def _multiply(self, state: _State, instr: Instr) -> None:
        site = self.site_of[id(instr)]
        d, a = _listed(instr.operands[0]), _listed(instr.operands[1])
        if not state.fenced:
            text = "no wgmma.fence precedes the first wgmma"
            self._add(site, Hazard(text, "wgmma.fence before it", "wgmma.fence"))
            state.fenced = True  # told once
        for what, accesses, registers in (
            ("write", state.written, [*d, *a]),
            ("read", state.read, d),
        ):
            other = next((accesses[name] for name in registers if name in accesses), 0)
            if other:
                text = f"wgmma is not ordered after a {what} of its registers"
                note = what == "read"
                self._add(site, Hazard(text, _FENCE, "wgmma.fence", other, what, note))
        for name in d:
            state.written.pop(name, None)
            state.read.pop(name, None)
        for name in a:
            state.flying[name] = (0, site)

    def _overwritten(self, name: str, writer: int, site: int) -> None:
        text = "a register of A is written while wgmma may still read it"
        missing = "wgmma.wait_group (after a wgmma.commit_group) before the write"
        self._add(site, Hazard(text, missing, "wgmma.wait_group", writer, "write"))

    def _add(self, site: int, hazard: Hazard) -> None:
        self.found.setdefault(site, {}).setdefault(hazard.message, hazard)


class Warpgroups:
    """Warpgroups of one launch."""

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
        """Report early uses once per wgmma: one wait is missing, however many registers it has."""
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
            "wgmma.wait_group (after a wgmma.commit_group) before the use", "wgmma.wait_group"
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
