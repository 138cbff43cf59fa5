"""brx.idx, and calls with a frame: PTX ISA "brx.idx", "call", "Control Flow Directives".

Lanes that choose different targets part, as at a branch.
"""

from __future__ import annotations

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.errors import HardwareRefusal
from ptxemu.machine.fragment import Fragment, lanes_of
from ptxemu.machine.frames import enter, leave
from ptxemu.machine.state import SPLIT, Warp
from ptxemu.numerics import PerLane
from ptxemu.syntax.tree import Instr, Reg


@op("brx.idx", flags="uni")
def branch_by_index(c: Lower, i: Instr, f: Match) -> None:
    """The index is the terminator's operand; `codegen.blocks` has the targets."""
    c.jump = c.src(i.operands[0], "u32")
    c.settle(c.jump)


@runtime
def jump_by_index(w: Warp, index: PerLane, targets: tuple[int, ...], mask: int) -> int:
    """Return the next block, or SPLIT if the lanes of `mask` choose different ones.

    The manual leaves an index beyond the list undefined; here it raises HardwareRefusal.
    """
    if not isinstance(index, np.ndarray):
        return targets[_checked(w, index, len(targets))]
    chosen: dict[int, int] = {}
    for lane, value in zip(w.lanes(), w.lane_values(index), strict=True):
        target = targets[_checked(w, value, len(targets), f" lane {lane}")]
        chosen[target] = chosen.get(target, 0) | 1 << lane
    return part(w, chosen)


@op("call.frame", section="call")
def call_with_frame(c: Lower, i: Instr, f: Match) -> None:
    """Operands, as `syntax.frames` makes them: function or register, return label, functions."""
    if isinstance(i.operands[0], Reg):
        c.jump = c.src(i.operands[0], "u64")
        c.settle(c.jump)


@op("ret.frame", section="ret")
def return_with_frame(c: Lower, i: Instr, f: Match) -> None:
    """Where to, each lane has kept at its call."""


@runtime
def call_frame(
    w: Warp, name: str, function: int, back: int, kept: tuple[str, ...], mask: int
) -> int:
    """Lanes call the function whose body begins with block `function`."""
    enter(w, mask, back, kept, name.lstrip("@"))
    return function


@runtime
def call_address(
    w: Warp, address: PerLane, table: dict[int, int], back: int, kept: tuple[str, ...], mask: int
) -> int:
    """Lanes call functions by their addresses; table: the functions that the call may mean."""
    chosen: dict[int, int] = {}
    for lane, value in zip(w.lanes(), w.lane_values(address), strict=True):
        if value not in table:
            raise HardwareRefusal(
                f"lane {lane} of {w.name()} calls address {value:#x}: no function with these"
                " arguments whose address the module takes"
            )
        chosen[table[value]] = chosen.get(table[value], 0) | 1 << lane
    for function, lanes in chosen.items():
        name = w.program.blocks[function].label or ""
        enter(w, lanes, back, kept, name.lstrip("@"))
    return part(w, chosen)


@runtime
def return_from_frame(w: Warp, mask: int) -> int:
    """Lanes return from a function."""
    return part(w, leave(w, lanes_of(mask)))


def _checked(w: Warp, index: int, count: int, lane: str = "") -> int:
    if index < count:
        return index
    raise HardwareRefusal(
        f"brx.idx with index {index} in {w.name()}{lane}; its .branchtargets has {count} labels"
    )


def part(w: Warp, chosen: dict[int, int]) -> int:
    """The lanes of the running fragment go to several blocks: chosen, their masks by block."""
    (first, mask), *others = chosen.items()
    if not others:
        return first
    w.frag.pc, w.frag.mask, w.frag.lanes = first, mask, None
    w.frags += [Fragment(target, lanes) for target, lanes in others]
    return SPLIT
