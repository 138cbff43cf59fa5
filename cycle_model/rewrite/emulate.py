"""Exponentials on the FMA pipe and the ALU: a share of MUFU.EX2 as FlashAttention-4 computes it.

Of two elements (`ex2_emulation_2` of its utils.py, degree 3): two clamps, an addition that rounds
down, two subtractions for the fraction, three FMAs, and two additions into the exponent. The ten
instructions stand evenly between what follows, as a compiler interleaves them; the exponentials
that are left are no farther apart than most of them were.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np

from cycle_model.binding.bound import BoundLaunch, BoundWarp
from cycle_model.sass.flow import Function
from cycle_model.sass.instruction import Control, Instruction

OF_TWO = (
    *("FMNMX", "FMNMX", "FADD2.RM", "FADD2", "FADD2"),
    *("FFMA2", "FFMA2", "FFMA2", "LEA", "LEA"),
)


def emulate(launch: BoundLaunch, opcode: str, one_in: int) -> BoundLaunch:
    """In loops, two of every 2 * one_in instructions that begin with `opcode`. ValueError where no
    loop has so many."""
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
    """In loops, instructions that begin with `opcode` no farther apart than so many cycles of stall
    counts, where they follow each other as most of them do."""
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
    """Between those that are left, where some are gone or others have come in between."""
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
    """Without some instructions, and with others behind some."""
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
