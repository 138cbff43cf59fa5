"""Open calls of the threads of a warp: where each returns to, and the registers it needs there.

Registers of a function are shared by all its calls, so a call keeps those that are used after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from ptxemu.codegen.namespace import ZEROS, bits_mask, choose, get, put
from ptxemu.errors import HardwareRefusal
from ptxemu.machine.fragment import lanes_of
from ptxemu.machine.state import Warp

MOST_OPEN = 1000  # calls of a thread


@dataclass(eq=False)
class Kept:
    """Where a call of some lanes returns to.

    registers: contents by slot.
    undefined: lanes of undefined data by register, see `check.taint`.
    """

    back: int
    names: tuple[str, ...]
    registers: dict[int, np.ndarray] = field(default_factory=dict)
    undefined: dict[str, int] = field(default_factory=dict)


_OPEN: WeakKeyDictionary[Warp, list[list[Kept]]] = WeakKeyDictionary()


def _open_calls(w: Warp) -> list[list[Kept]]:
    """The calls of each lane."""
    if w not in _OPEN:
        _OPEN[w] = [[] for _ in range(32)]
    return _OPEN[w]


def enter(w: Warp, mask: int, back: int, names: tuple[str, ...], function: str) -> None:
    """The lanes of `mask` call: `back` is the block behind the call, `names` what it reads.

    HardwareRefusal beyond MOST_OPEN open calls of a thread.
    """
    kept = Kept(back, names)
    for name in names:
        for slot, type_ in w.program.registers.slots(name):
            kept.registers[slot] = _content(w, slot, type_)
    if w.follower is not None:
        live, masks = w.program.blocks[back].live_in, w.follower.masks
        kept.undefined = {name: bits for name, bits in masks.items() if name in live}
    lanes, calls = lanes_of(mask), _open_calls(w)
    for lane in lanes:
        calls[lane].append(kept)
    deepest = max(lanes, key=lambda lane: len(calls[lane]))
    if len(calls[deepest]) > MOST_OPEN:
        raise HardwareRefusal(
            f"{len(calls[deepest])} open calls in lane {deepest} of {w.name()}, the last one of"
            f" {function}: a recursion that does not end? The emulator keeps {MOST_OPEN}"
        )


def leave(w: Warp, lanes: Iterable[int]) -> dict[int, int]:
    """These lanes return: their registers are as they were; returns the lanes by block."""
    groups: dict[Kept, int] = {}
    calls = _open_calls(w)
    for lane in lanes:
        kept = calls[lane].pop()
        groups[kept] = groups.get(kept, 0) | 1 << lane
    chosen: dict[int, int] = {}
    for kept, mask in groups.items():
        chosen[kept.back] = chosen.get(kept.back, 0) | mask
        _restore(w, kept, mask)
    return chosen


def _content(w: Warp, slot: int, type_: str) -> np.ndarray:
    frame = w.program.frame
    if frame is not None and slot in frame.offsets:
        return get(w.file_bytes, frame.offsets[slot], ZEROS[type_].dtype.type)
    return np.array(w.R[slot])


def _restore(w: Warp, kept: Kept, mask: int) -> None:
    frame, active = w.program.frame, bits_mask(mask)
    for name in kept.names:
        for slot, type_ in w.program.registers.slots(name):
            kind, value = ZEROS[type_].dtype.type, kept.registers[slot]
            if frame is not None and slot in frame.offsets:
                put(w.file_bytes, frame.offsets[slot], value, kind, active)
            else:
                w.R[slot] = choose(active, value, w.R[slot], kind)
    if w.follower is not None:
        _restore_undefined(w.follower.masks, kept, mask | mask << 32)


def _restore_undefined(masks: dict[str, int], kept: Kept, both: int) -> None:
    for name in {*kept.undefined, *(masks.keys() & set(kept.names))}:
        bits = masks.get(name, 0) & ~both | kept.undefined.get(name, 0) & both
        if bits:
            masks[name] = bits
        else:
            masks.pop(name, None)
