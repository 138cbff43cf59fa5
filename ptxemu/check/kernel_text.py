"""Errors and notes that the text of a kernel alone shows, before anything runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ptxemu.check.findings import Findings
from ptxemu.codegen.flow import names
from ptxemu.findings import NOTE, Finding, place_of
from ptxemu.machine.shape import register_count_known
from ptxemu.syntax.tree import Addr, Entry, Instr, Not

_GROUPS = ("cta_group::1", "cta_group::2")


def check_text(findings: Findings, entry: Entry) -> None:
    """Apply all rules on the instructions and directives of a kernel."""
    _one_cta_group(findings)
    _register_counts(findings, entry)


def _register_counts(findings: Findings, entry: Entry) -> None:
    """Check that ptxas keeps the setmaxnreg of a kernel.

    It has to know the registers of a thread at entry, from .maxnreg, or from .minnctapersm with
    .maxntid or .reqntid; `__launch_bounds__(threads, 1)` in CUDA C++ gives the latter two.
    """
    moves = [instr for instr in findings.sites if instr.root == "setmaxnreg"]
    if moves and not register_count_known(entry.directives):
        findings.report(
            Finding(
                "setmaxnreg",
                "ptxas drops every setmaxnreg of this kernel, since its text does not fix the"
                " registers of a thread at entry",
                NOTE,
                missing=".maxnreg, or .minnctapersm with .maxntid or .reqntid"
                " (__launch_bounds__(threads, 1) in CUDA C++)",
                rule="setmaxnreg; performance-tuning directives",
                **place_of(moves[0]),
            )
        )


def _one_cta_group(findings: Findings) -> None:
    """Check that all tcgen05 instructions name the same .cta_group (PTX ISA, tcgen05, "CTA Pair").

    ptxas refuses other kernels, even if the instruction never runs.
    """
    first: dict[str, Instr] = {}
    for instr in findings.sites:
        for group in _GROUPS:
            if instr.root == "tcgen05" and group in instr.parts:
                first.setdefault(group, instr)
    if len(first) == len(_GROUPS):
        one, other = sorted(first.values(), key=lambda instr: instr.line)
        findings.report(
            Finding(
                "cta_group",
                f"tcgen05 instructions of a kernel name different CTA groups, line {one.line} the"
                " other one",
                missing="the same .cta_group in all tcgen05 instructions",
                rule="tcgen05, CTA pair",
                **place_of(other),
            )
        )


# Waits that may fail, and whether the program uses the result.
#
# `mbarrier.try_wait` and `test_wait` may return false at any time. A warp knows of a phase only if
# the result decides what it executes next. A result that never reaches a branch, a guard or memory
# gives no knowledge. PTX ISA, "mbarrier.test_wait / try_wait".

_WAITS = ("mbarrier.try_wait", "mbarrier.test_wait")


def unheeded(sites: Sequence[Instr]) -> frozenset[int]:
    """Return the waits, as indices in `sites`, whose result decides nothing."""
    waits = {site: _target(instr) for site, instr in enumerate(sites) if _waits(instr)}
    guards = {name for instr in sites for name in _guard(instr)}
    unclear = {site: name for site, name in waits.items() if name not in guards}
    if not unclear:
        return frozenset()
    readers: dict[str, list[Instr]] = defaultdict(list)
    for instr in sites:
        for name in _sources(instr):
            readers[name].append(instr)
    return frozenset(site for site, name in unclear.items() if not _decides(name, readers, guards))


def _decides(name: str, readers: dict[str, list[Instr]], guards: set[str]) -> bool:
    """Whether a value that follows from `name` is a guard, or leaves the registers."""
    reached, pending = {name}, [name]
    while pending:
        for instr in readers.get(pending.pop(), ()):
            targets = _registers(instr.operands[:1])
            if instr.root in ("st", "red", "atom", "call") or not targets:
                return True
            for target in targets:
                if target in guards:
                    return True
                if target not in reached:
                    reached.add(target)
                    pending.append(target)
    return False


def _waits(instr: Instr) -> bool:
    return instr.opcode.startswith(_WAITS)


def _target(instr: Instr) -> str:
    return next(iter(_registers(instr.operands[:1])), "")


def _guard(instr: Instr) -> list[str]:
    guard = instr.guard
    return [] if guard is None else [(guard.reg if isinstance(guard, Not) else guard).name]


def _sources(instr: Instr) -> list[str]:
    """Return the registers that are read; a store reads its first operand, the address."""
    first = instr.operands[:1]
    return _registers(instr.operands[1:]) + (
        _registers(first) if first and isinstance(first[0], Addr) else []
    )


def _registers(operands: Iterable[object]) -> list[str]:
    return [name for operand in operands for name in names(operand)]
