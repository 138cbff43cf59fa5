"""An instruction moved up or down, as a compiler might have placed it.

It may not pass what it depends on, what depends on it, or a jump, and all warps have to go through
all of what it passes. Control words stay valid: whoever came behind it waits for what it waited
for, the instruction before its old place takes over its stall, and its distance to a producer or a
consumer without a scoreboard is not less than `SETTLED` cycles, if it was not before.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cycle_model.binding.bound import BoundLaunch, BoundWarp
from cycle_model.rewrite.operands import between
from cycle_model.sass.flow import JUMPS, Function
from cycle_model.sass.instruction import NO_SCOREBOARD, Instruction

SETTLED = 13  # cycles after which every result of fixed latency is there, a predicate's for a guard
LONGEST_STALL = 15
_WALLS = (*JUMPS, "CALL", "BAR", "SYNCS.PHASECHK")


def move(launch: BoundLaunch, index: int, by: int) -> BoundLaunch:
    """By so many instructions, upwards where it is below 0. ValueError for what it cannot pass."""
    goal = index + by
    items = launch.function.instructions
    if not 0 <= goal < len(items):
        raise ValueError(f"{_name(items[index])} cannot move by {by:+}: there is no such place")
    step = 1 if by > 0 else -1
    for at in range(index + step, goal + step, step):
        why = _obstacle(items, index, at) or _parting(launch, *sorted((index, at)))
        if why:
            who, most = _name(items[index]), at - step - index
            raise ValueError(f"{who} cannot move by {by:+}, {most:+} at most: {why}")
    if not by:
        return launch
    low, high = sorted((index, goal))
    shift = np.zeros(len(items), np.int64)
    shift[low : high + 1] = -step
    shift[index] = by
    function = Function(launch.function.name, _moved(items, index, goal), launch.function.labels)

    def changed(warp: BoundWarp) -> BoundWarp:
        return replace(warp, at=warp.at + shift[warp.path[warp.at]])

    return launch.with_paths(function, changed)


def _obstacle(items: list[Instruction], index: int, at: int) -> str:
    """Why an instruction may not pass another, or ""."""
    mine, other = items[index], items[at]
    if other.opcode.startswith(_WALLS):
        return f"{_name(other)} is a jump or a wait"
    register = between(*((mine, other) if at > index else (other, mine)))
    if register:
        return f"{_name(other)} needs or makes {register}, too"
    first, then = (mine, other) if at > index else (other, mine)
    taken = {first.control.writes, first.control.reads} - {NO_SCOREBOARD}
    waited = [board for board in sorted(taken) if then.control.waits >> board & 1]
    return f"{_name(then)} waits for scoreboard {waited[0]} of {_name(first)}" if waited else ""


def _parting(launch: BoundLaunch, low: int, high: int) -> str:
    """Where a warp goes through a part of it only."""
    span = np.arange(low, high + 1)
    paths = {id(w.path): w.path for k in launch.clusters for w in launch.cluster(k)}
    for path in paths.values():
        begins = np.flatnonzero(path == low)
        inside = int(((path >= low) & (path <= high)).sum())
        begins = begins[begins + len(span) <= len(path)]
        whole = len(begins) == 0 or (path[begins[:, None] + span - low] == span).all()
        if not whole or inside != len(begins) * len(span):
            where = launch.function.instructions[low]
            return f"not every warp that comes to {_name(where)} goes straight on from there"
    return ""


def _moved(items: list[Instruction], index: int, goal: int) -> list[Instruction]:
    out, mine = list(items), items[index]
    after, before = out[index + 1 : index + 2], out[index - 1 : index]
    if after:
        waits = after[0].control.waits | mine.control.waits
        out[index + 1] = replace(after[0], control=after[0].control._replace(waits=waits))
    if before:
        stall = _stall(before[0]) + _stall(mine)
        out[index - 1] = _stalling(before[0], stall)
    waits = mine.control.waits if goal < index else 0  # below, others have waited
    mine = replace(mine, control=mine.control._replace(stall=1, waits=waits))
    del out[index]
    out.insert(goal, mine)
    lacking = _lacking(items, index, out, goal)
    if goal < index and goal:
        out[goal - 1] = _stalling(out[goal - 1], _stall(out[goal - 1]) + lacking)
    elif goal > index:
        out[goal] = _stalling(mine, 1 + lacking)
    return out


def _lacking(items: list[Instruction], index: int, out: list[Instruction], goal: int) -> int:
    """Cycles to the nearest producer (above) or consumer (below) that the new place lacks."""
    step = -1 if goal < index else 1
    lacking, near, far = 0, 0, 0
    for distance in range(1, SETTLED + abs(goal - index) + 1):
        at = goal + step * distance
        if not 0 <= at < len(out):
            break
        near += _stall(out[at] if step < 0 else out[at - 1])
        if near >= SETTLED:
            break
        pair = (out[at], out[goal]) if step < 0 else (out[goal], out[at])
        if pair[0].control.writes == NO_SCOREBOARD and between(*pair):
            far = sum(map(_stall, items[min(at, index) : max(at, index)]))
            lacking = max(lacking, min(far, SETTLED) - near)
    return lacking


def _stall(item: Instruction) -> int:
    return max(item.control.stall, 1)


def _stalling(item: Instruction, stall: int) -> Instruction:
    return replace(item, control=item.control._replace(stall=min(stall, LONGEST_STALL)))


def _name(item: Instruction) -> str:
    return f"{item.opcode} at {item.address:#x}"
