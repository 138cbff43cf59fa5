"""bra, exit, ret, trap, nop-like hints: PTX ISA "Control Flow Instructions", "Miscellaneous".

Control transfer itself is the terminator of a block (syntax.resolve); nothing is emitted here.
"""

from __future__ import annotations

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.errors import HardwareRefusal
from ptxemu.machine.state import Warp
from ptxemu.syntax.tree import Instr


@op("bra exit ret trap", flags="uni")
def terminator(c: Lower, i: Instr, f: Match) -> None:
    """The block's terminator."""


@op("nanosleep", types="u32")
def sleep(c: Lower, i: Instr, f: Match) -> None:
    """Time is not modelled."""


@op("setmaxnreg", types="u32", flags="inc dec sync aligned")
def set_registers(c: Lower, i: Instr, f: Match) -> None:
    """Register budgets have no effect here; notes say where a warpgroup is not of one mind."""
    c.effect(f"require_warpgroup(w, {i.operands[0].value})")


@op("griddepcontrol", flags="launch_dependents wait")
def grid_dependency(c: Lower, i: Instr, f: Match) -> None:
    """Launches run one after the other, so every dependency is met; listeners hear of the wait."""
    if "wait" in f.flags:
        c.announce("grid_waited(w)")


@op("pmevent brkpt", section="pmevent, brkpt")
@op("pmevent.mask", section="pmevent")
def ignored(c: Lower, i: Instr, f: Match) -> None:
    """Profiler and debugger hooks."""


@runtime
def require_warpgroup(w: Warp, count: int) -> None:
    """The count must be legal; `Cta.check_warpgroups` looks at the whole warpgroup at the end."""
    if count % 8 or not 24 <= count <= 256:
        raise HardwareRefusal(f"setmaxnreg {count}; must be a multiple of 8 from 24 to 256")
    w.register_counts.append(count)


@runtime
def clock(w: Warp) -> int:
    """Instructions executed by this warp so far; time is not modelled."""
    return sum(n * c for n, c in zip(w.program.lengths, w.counts, strict=True))
