"""bra, exit, ret, trap, nop-like hints: PTX ISA "Control Flow Instructions", "Miscellaneous".

Control transfer itself is the terminator of a block (syntax.resolve); nothing is emitted here.
"""

from __future__ import annotations

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.errors import HardwareRefusal
from ptxemu.machine.warp import Warp
from ptxemu.syntax.tree import Instr


@op("bra exit ret trap", flags="uni")
def terminator(c: Lower, i: Instr, f: Match) -> None:
    """The block's terminator."""


@op("nanosleep", types="u32")
def sleep(c: Lower, i: Instr, f: Match) -> None:
    """Time is not modelled."""


@op("setmaxnreg", types="u32", flags="inc dec sync aligned")
def set_registers(c: Lower, i: Instr, f: Match) -> None:
    """Register budgets have no effect here; that the whole warpgroup asks for one is checked."""
    c.effect(f"require_warpgroup(w, {i.operands[0].value})")


@op("griddepcontrol", flags="launch_dependents wait")
def grid_dependency(c: Lower, i: Instr, f: Match) -> None:
    """Launches run one after the other, so every dependency is met; listeners hear of the wait."""
    if "wait" in f.flags:
        c.announce("grid_waited(w)")


@op("pmevent brkpt")
def ignored(c: Lower, i: Instr, f: Match) -> None:
    """Profiler and debugger hooks."""


@runtime
def require_warpgroup(w: Warp, count: int) -> None:
    """The count must be legal and the warpgroup whole; `Cta.check_warpgroups` compares the counts
    of its warps at the end."""
    if count % 8 or not 24 <= count <= 256:
        raise HardwareRefusal(f"setmaxnreg {count}; must be a multiple of 8 from 24 to 256")
    first = w.index // 4 * 4
    group = w.cta.warps[first : first + 4]
    if len(group) < 4:
        raise HardwareRefusal(
            f"setmaxnreg in warp {w.index}: its warpgroup has {len(group)} warps, not 4"
        )
    w.register_counts.append(count)


@runtime
def clock(w: Warp) -> int:
    """Instructions executed by this warp so far; time is not modelled."""
    return sum(n * c for n, c in zip(w.program.lengths, w.counts, strict=True))
