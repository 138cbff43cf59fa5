"""Completion of a warp's `tcgen05.ld` before it signals: PTX ISA, "tcgen05.ld", "tcgen05.wait".

A load is complete after `tcgen05.wait::ld`. Before that wait, the scoreboard delays the use of a
loaded register, but not the signals in between. ptxas 12.9, 13.0 and 13.5 move arithmetic,
shuffles, votes, redux and MMAs of loaded registers after a later `mbarrier.arrive` or `st.release`.
The signal is then issued while the load is in progress. ptxas does not move a write to memory after
a signal, so the load is complete if such a write needs the loaded data. 29 of the 41 Blackwell
examples of CUTLASS of August 2026 have no wait and rely on this: they store their accumulators
before they release them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from ptxemu.check.agents import OpenLoad
from ptxemu.check.evidence import MISSING
from ptxemu.check.findings import Findings
from ptxemu.check.footprints import Cells
from ptxemu.check.manual import Manual
from ptxemu.check.races import Races
from ptxemu.check.state import States
from ptxemu.codegen.blocks import Block
from ptxemu.codegen.flow import names
from ptxemu.codegen.program import Program
from ptxemu.findings import Access, Finding, place_of
from ptxemu.machine.state import Warp
from ptxemu.machine.tmem import PendingLoad
from ptxemu.syntax.tree import Addr, Instr

_LOAD, _WAIT, _STORE = "tcgen05.ld.", "tcgen05.wait::ld", "tcgen05.st."
_WRITES = ("st", "stmatrix", "red", "atom")
_OWN = ("local", "param")  # memory of which no other thread hears
_WITHOUT_TARGET = ("st", "stmatrix", "red", "bar", "barrier", "bra", "cp", "fence")
_ASKED = (*_WRITES, "bar", "barrier", "mbarrier", "tcgen05", "cp", "fence", "membar", "wgmma")
_NONE = frozenset[int]()

Sites = frozenset[int]  # of tcgen05.ld
Origins = dict[str, Sites]  # by register: unfinished loads that its value depends on


class TensorLoads:
    """Follows the loads of all warps of one launch."""

    def __init__(
        self, program: Program, states: States, findings: Findings, races: Races, manual: Manual
    ) -> None:
        self._program = program
        self._states = states
        self._findings = findings
        self._races = races
        self._manual = manual

    @cached_property
    def _flying(self) -> Mapping[int, Sites]:
        return flying(self._program.blocks, self._program.site_of)

    def issued(self, w: Warp, load: PendingLoad, cells: Cells) -> None:
        """Called for a tcgen05.ld of cells."""
        step = self._races.move(w, cells, False)
        self._states.clocks[w].open_loads[load] = OpenLoad(step, w.at)

    def used(self, w: Warp, load: PendingLoad) -> None:
        """Called when a register is used before a wait, once for each load."""
        clock = self._states.clocks[w]
        known = clock.open_loads[load]
        known.used = True
        self._manual.used(w, known.site)
        clock.load_matters(known.step)
        if known.signal is not None:
            self._report(w, known.site, known.signal)

    def waited(self, w: Warp) -> None:
        """Called for tcgen05.wait::ld."""
        clock = self._states.clocks[w]
        clock.open_loads.clear()
        clock.complete("tcgen05.ld")

    def before_signal(self, w: Warp) -> None:
        """Record loads that are complete at this instruction.

        Called before a warp publishes its work, or accesses tensor memory itself.
        """
        clock = self._states.clocks[w]
        if not clock.open_loads:
            return
        under_way = self._flying.get(w.at, _NONE)
        for load, known in list(clock.open_loads.items()):
            if known.site not in under_way:
                del clock.open_loads[load]
        steps = (known.step for known in clock.open_loads.values())
        first_open = min(steps, default=clock.issued["tcgen05.ld"] + 1)
        clock.know(clock.streams["tcgen05.ld"], first_open - 1)

    def signals(self, w: Warp) -> None:
        """Check an mbarrier arrival or a release, after which ptxas moves uses of registers.

        A load in progress that no wait completes is an error, whatever agent receives the
        signal. A load with a wait after the signal may be of other columns.
        """
        self.before_signal(w)
        for known in self._states.clocks[w].open_loads.values():
            if known.used:
                self._report(w, known.site, w.at)
            elif known.signal is None:
                known.signal = w.at

    def _report(self, w: Warp, load: int, signal: int) -> None:
        if not self._findings.new("early signal", load, signal):
            return
        sites = self._findings.sites
        missing, rule = MISSING["tcgen05.ld"]
        what = (load, "read"), (signal, "signal")
        accesses = tuple(
            Access(w.label, sites[site].opcode, kind, "", **place_of(sites[site]))
            for site, kind in what
        )
        message = f"{sites[signal].opcode} may come before tcgen05.ld is complete"
        place = place_of(sites[signal])
        self._findings.report(
            Finding("tmem", message, **place, accesses=accesses, missing=missing, rule=rule)
        )


def flying(blocks: list[Block], site_of: Mapping[int, int]) -> dict[int, Sites]:
    """Return loads that may be in progress on some path at each instruction, by its site.

    Only loads whose data is still needed are included. site_of: by id of an instruction.
    """
    found: dict[int, Sites] = {}
    before: dict[int, Origins] = {0: {}}
    pending = [0]
    while pending:
        index = pending.pop()
        origins = dict(before[index])
        for step in blocks[index].steps:
            _execute(origins, step.instr, site_of[id(step.instr)])
            if step.instr.root in _ASKED:
                found[site_of[id(step.instr)]] = _all(origins.values())
        _write(origins, _guarded(blocks, index))
        for after in blocks[index].successors:
            if after == len(blocks):
                continue
            needed = {name: origins[name] for name in origins.keys() & blocks[after].live_in}
            if after not in before:
                before[after] = needed
                pending.append(after)
            elif _merged(before[after], needed):
                pending.append(after)
    return found


def _merged(known: Origins, more: Origins) -> bool:
    """Add the paths of another; return whether that changed anything."""
    changed = False
    for name, sites in more.items():
        if not sites <= known.get(name, _NONE):
            known[name] = known.get(name, _NONE) | sites
            changed = True
    return changed


def _execute(origins: Origins, instr: Instr, site: int) -> None:
    """Apply an instruction's effect to the origins of registers."""
    if instr.opcode.startswith(_WAIT):
        origins.clear()
        return
    if not origins and not instr.opcode.startswith(_LOAD):
        return
    if instr.opcode.startswith(_LOAD):
        origins.update((name, frozenset((site,))) for name in names(instr.operands[0]))
        return
    _write(origins, instr)
    needed = _needed(origins, instr)
    for name in _targets(instr):
        sites = needed | origins.get(name, _NONE) if instr.guard else needed
        if sites:
            origins[name] = sites
        else:
            origins.pop(name, None)


def _write(origins: Origins, instr: Instr | None) -> None:
    """Complete the loads whose data a write to memory needs."""
    needed = _needed(origins, instr) if instr and _keeps_its_place(instr) else _NONE
    for name, sites in list(origins.items()) if needed else ():
        origins[name] = sites - needed
        if not origins[name]:
            del origins[name]


def _guarded(blocks: list[Block], index: int) -> Instr | None:
    """The instruction under a predicate that a block ends with. It waits for its operands whatever
    the predicate is."""
    steps = blocks[index + 1].steps if index + 1 < len(blocks) else []
    return steps[0].instr if steps and steps[0].instr.guard else None


def _needed(origins: Origins, instr: Instr) -> Sites:
    return _all(origins.get(name, _NONE) for name in _read(instr))


def _keeps_its_place(instr: Instr) -> bool:
    """Whether it writes memory, so that no later signal comes before it."""
    if instr.opcode.startswith(_STORE):
        return True
    return instr.root in _WRITES and not any(space in instr.parts for space in _OWN)


def _targets(instr: Instr) -> list[str]:
    if not instr.operands or instr.root in _WITHOUT_TARGET or instr.root == "tcgen05":
        return []
    return [] if isinstance(instr.operands[0], Addr) else names(instr.operands[0])


def _read(instr: Instr) -> list[str]:
    operands = instr.operands[1:] if _targets(instr) else instr.operands
    return [name for operand in (*operands, instr.guard) for name in names(operand)]


def _all(sites: Iterable[Sites]) -> Sites:
    return _NONE.union(*sites)
