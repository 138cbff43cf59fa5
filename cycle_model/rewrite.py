"""Machine code as another compiler might have written it, with the paths of warps through it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cycle_model.binding.bound import BoundLaunch, BoundWarp
from cycle_model.sass.flow import JUMPS, NO_SCOREBOARD, Control, Function, Instruction

# Instructions without a result in a register; in all others the first operand is the result.
_NO_RESULT = (
    *("ST", "RED.", "REDG", "REDAS", "BAR", "BRA", "BRX", "BSSY", "BSYNC", "BREAK", "EXIT", "NOP"),
    *("FENCE", "MEMBAR"),
    *("UTC", "UTMA", "UBLK", "DEPBAR", "LDGDEPBAR", "LDGSTS", "ARRIVES", "SYNCS.EXCH", "WARPSYNC"),
    *("SYNCS.ARRIVE", "ERRBAR", "CCTL", "NANOSLEEP", "UCGABAR", "ACQBULK", "PREEXIT", "WARPGROUP"),
)
_NAME = re.compile(r"\b(UR|R|UP|P)(\d+)((?:\.\w+)*)")
_MATRIX, _DESCRIPTORS = 4, 8  # registers of an operand of mma.sync, of a tensor copy
_WIDTH = re.compile(r"\.(64|128|256)\b")


class Registers(NamedTuple):
    writes: frozenset[str]
    reads: frozenset[str]


@cache
def registers_of(item: Instruction) -> Registers:
    """Return registers such as R4, UR4, P0, UP0, without those that are always zero or true."""
    parts = [part.strip() for part in item.operands.split(",")]
    results = 0 if item.opcode.startswith(_NO_RESULT) else 1
    while results and results < len(parts) and re.fullmatch(r"!?U?P(T|\d+)", parts[results]):
        results += 1  # carries and second predicates follow the first result
    if results and re.fullmatch(r"U?P(T|\d+)", parts[0]) and len(parts) > 1:
        results = max(results, 2)
    writes = {name for part in parts[:results] for name in _names(item, part)}
    reads = {name for part in parts[results:] for name in _names(item, part)}
    if item.opcode.startswith("R2P"):
        writes |= {f"P{k}" for k in range(7)}
    reads |= {item.guard.lstrip("!")} if item.guard else set()
    return Registers(frozenset(writes), frozenset(reads))


def _names(item: Instruction, part: str) -> set[str]:
    found: set[str] = set()
    for kind, number, modifiers in _NAME.findall(part):
        width = 1 if "P" in kind else _width(item, part, modifiers)
        found |= {f"{kind}{int(number) + k}" for k in range(width)}
    return found


def _width(item: Instruction, part: str, modifiers: str) -> int:
    """Registers of an operand, from the first on."""
    if item.word in ("LDTM", "STTM"):
        return 1 if "tmem" in part else item.repetition
    if item.word.startswith(("UTMA", "UBLK")):
        return _DESCRIPTORS
    if "[" in part:
        return 2 if ".64" in modifiers or "desc" in part else 1
    if item.word.endswith("MMA"):
        return _MATRIX
    if "HI_LO" in modifiers or ".WIDE" in item.opcode or item.word in ("FFMA2", "FADD2", "FMUL2"):
        return 2
    found = _WIDTH.search(item.opcode)
    return int(found[1]) // 32 if found else 1


def between(first: Instruction, then: Instruction) -> str:
    """Return a register that fixes the order of two instructions, or ""."""
    one, other = registers_of(first), registers_of(then)
    shared = one.writes & (other.reads | other.writes) | one.reads & other.writes
    return min(shared, default="")


# An instruction moved up or down, as a compiler might have placed it.
#
# It may not pass an instruction it depends on, one that depends on it, or a jump. All warps have to
# execute all of the instructions it passes. Control words stay valid: the instruction after it
# waits for the same scoreboards as well, and the instruction before its old place gets its stall.
# Its distance to a producer or a consumer without a scoreboard is at least `SETTLED` cycles, unless
# it was less before.

SETTLED = 13  # cycles after which every result of fixed latency is there, a predicate's for a guard
LONGEST_STALL = 15
_WALLS = (*JUMPS, "CALL", "BAR", "SYNCS.PHASECHK")


def move(launch: BoundLaunch, index: int, by: int) -> BoundLaunch:
    """Move an instruction by `by` places, upwards if negative.

    Raises ValueError if it cannot pass an instruction on the way.
    """
    goal = index + by
    items = launch.function.instructions
    if not 0 <= goal < len(items):
        raise ValueError(
            f"{_name(items[index])} cannot move by {by:+}: it would leave the function"
        )
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
    """Describe why a range cannot change: a warp executes only a part of it; "" if none does."""
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


# Exponentials on the FMA pipe and the ALU: a share of MUFU.EX2 as FlashAttention-4 computes it.
#
# Two elements need (`ex2_emulation_2` of its utils.py, degree 3): two clamps, an addition that
# rounds down, two subtractions for the fraction, three FMAs, and two additions into the exponent.
# The ten instructions are spread evenly, as a compiler interleaves them. The remaining exponentials
# are no farther apart than most of them were.

OF_TWO = (
    *("FMNMX", "FMNMX", "FADD2.RM", "FADD2", "FADD2"),
    *("FFMA2", "FFMA2", "FFMA2", "LEA", "LEA"),
)


def emulate(launch: BoundLaunch, opcode: str, one_in: int) -> BoundLaunch:
    """Emulate two of every 2 * one_in instructions in loops that begin with `opcode`.

    Raises ValueError if no loop has so many.
    """
    items = list(launch.function.instructions)
    gone: set[int] = set()
    added: dict[int, list[Instruction]] = {}
    for begin, end in looping(launch.function):
        found = [k for k in range(begin, end) if items[k].opcode.startswith(opcode)]
        pairs = [found[k - 2 : k] for k in range(2 * one_in, len(found) + 1, 2 * one_in)]
        if not pairs:
            continue
        gaps = common_gap(items, found)
        for (first, second), after in zip(pairs, [*pairs[1:], [end]], strict=True):
            gone |= {first, second}
            span = range(second, after[0])
            for k, word in enumerate(OF_TWO):
                work = Instruction(items[second].address, "", word, "", Control(1))
                added.setdefault(span[len(span) * k // len(OF_TWO)], []).append(work)
        _close(items, [k for k in found if k not in gone], gone, added, gaps)
    if not gone:
        raise ValueError(f"no block of a loop of {launch.function.name} has {2 * one_in} {opcode}")
    return _lengthened(launch, items, gone, added)


def apart(launch: BoundLaunch, opcode: str, cycles: int) -> BoundLaunch:
    """Limit the stall counts between neighbouring `opcode` instructions in loops to `cycles`.

    Only neighbours at most as far apart as most of them are changed.
    """
    items = list(launch.function.instructions)
    known = False
    for begin, end in looping(launch.function):
        found = [k for k in range(begin, end) if items[k].opcode.startswith(opcode)]
        if len(found) < 2:
            continue
        known, usual = True, common_gap(items, found)
        for first, second in pairwise(found):
            if cycles < _gap(items, first, second) <= usual:
                _shorten(items, range(first, second), _gap(items, first, second) - cycles)
    if not known:
        raise ValueError(f"no block of a loop of {launch.function.name} has two {opcode}")
    return launch.with_function(Function(launch.function.name, items, launch.function.labels))


def looping(function: Function) -> list[tuple[int, int]]:
    """Begin and end of the blocks that are in a loop."""
    begins = np.cumsum([0, *(len(block.instructions) for block in function.blocks)]).tolist()
    inside = sorted(set().union(*function.loops.values())) if function.loops else []
    return [(begins[block], begins[block + 1]) for block in inside]


def common_gap(items: list[Instruction], found: list[int]) -> int:
    """Cycles of stall counts from one to the next, as most have it."""
    gaps = Counter(_gap(items, first, second) for first, second in pairwise(found))
    return gaps.most_common(1)[0][0]


def _gap(items: list[Instruction], first: int, second: int) -> int:
    return sum(max(item.control.stall, 1) for item in items[first:second])


def _close(
    items: list[Instruction], left: list[int], gone: set[int],
    added: dict[int, list[Instruction]], usual: int,
) -> None:  # fmt: skip
    """Adjust stall counts between the remaining instructions after removals and insertions."""
    for first, second in pairwise(left):
        span = [k for k in range(first, second) if k not in gone]
        more = sum(len(added.get(k, ())) for k in range(first, second))
        excess = sum(max(items[k].control.stall, 1) for k in span) + more - usual
        if more or len(span) < second - first:
            _shorten(items, span, excess)


def _shorten(items: list[Instruction], span: range | list[int], excess: int) -> None:
    """Stall counts add up to less, the longest first; each is 1 at least."""
    for k in sorted(span, key=lambda k: -items[k].control.stall):
        cut = min(max(excess, 0), items[k].control.stall - 1)
        if cut > 0:
            control = items[k].control
            items[k] = replace(items[k], control=control._replace(stall=control.stall - cut))
            excess -= cut


def _lengthened(
    launch: BoundLaunch, items: list[Instruction], gone: set[int],
    added: dict[int, list[Instruction]],
) -> BoundLaunch:  # fmt: skip
    """Return a launch without some instructions, and with others after some."""
    runs = [[] if k in gone else [item] for k, item in enumerate(items)]
    for k, more in added.items():
        runs[k] += more
    counts = np.array([len(run) for run in runs])
    begins = np.append(0, np.cumsum(counts))
    labels = {name: int(begins[at]) for name, at in launch.function.labels.items()}
    function = Function(launch.function.name, [i for run in runs for i in run], labels)
    known: dict[int, np.ndarray] = {}

    def changed(warp: BoundWarp) -> BoundWarp:
        if id(warp.path) not in known:
            times = counts[warp.path]
            inside = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
            known[id(warp.path)] = (np.repeat(begins[warp.path], times) + inside).astype(np.int32)
        before = np.append(0, np.cumsum(counts[warp.path]))
        return replace(warp, path=known[id(warp.path)], at=before[warp.at])

    return launch.with_paths(function, changed)
