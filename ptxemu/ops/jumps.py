"""brx.idx: PTX ISA "brx.idx", "Control Flow Directives: .branchtargets".

Lanes that choose different targets part, as at a branch.
"""

from __future__ import annotations

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.errors import HardwareRefusal
from ptxemu.machine.fragment import Fragment
from ptxemu.machine.state import SPLIT, Warp
from ptxemu.numerics import PerLane
from ptxemu.syntax.tree import Instr


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
