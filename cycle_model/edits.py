"""What a change would be worth: a simulation with other numbers, or with other instructions.

An edit is a word and a value: a parameter of the GPU (`tmem_load_latency=0`), or one of the
instructions whose opcode begins as it says (`stall MUFU.EX2=4`, `waits LDTM=0`, `drop STL`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from cycle_model.binding.bound import BoundLaunch
from cycle_model.parameters.parameter import Gpu
from cycle_model.sass.flow import Function
from cycle_model.sass.instruction import NO_SCOREBOARD, Control, Instruction


@dataclass(frozen=True)
class Edit:
    """what: a parameter, or one of `WAYS` and the beginning of an opcode."""

    text: str
    what: str
    opcode: str
    value: float

    @classmethod
    def parsed(cls, text: str) -> Edit:
        """Raises ValueError for what is no edit."""
        left, sign, right = text.partition("=")
        way, _, opcode = left.strip().partition(" ")
        if (way == "drop") == bool(sign):
            raise ValueError(f"{text!r}: NAME=NUMBER, 'stall OPCODE=N' or 'drop OPCODE'")
        if opcode and way not in WAYS:
            raise ValueError(f"{text!r}: {way!r} is none of {', '.join(WAYS)}")
        try:
            value = float(right) if sign else 0.0
        except ValueError:
            raise ValueError(f"{text!r}: {right!r} is no number") from None
        return cls(text, way, opcode.strip(), value)


def _stall(item: Instruction, value: float) -> Instruction:
    return replace(item, control=item.control._replace(stall=round(value)))


def _waits(item: Instruction, value: float) -> Instruction:
    return replace(item, control=item.control._replace(waits=round(value)))


def _drop(item: Instruction, value: float) -> Instruction:
    """It is issued, and neither does nor costs anything else: paths keep their length."""
    free = Control(0, False, NO_SCOREBOARD, NO_SCOREBOARD, 0, 0)
    return replace(item, opcode="NOP", operands="", control=free)


WAYS: dict[str, Callable[[Instruction, float], Instruction]] = {
    "stall": _stall,
    "waits": _waits,
    "drop": _drop,
}


def edited(gpu: Gpu, edits: Iterable[Edit]) -> Gpu:
    """With the parameters that edits change; ValueError for an unknown one."""
    return gpu.changed(**{edit.what: edit.value for edit in edits if not edit.opcode})


def rewritten(launch: BoundLaunch, edits: Iterable[Edit]) -> BoundLaunch:
    """With the instructions that edits change, on the same paths. ValueError where no instruction
    begins so."""
    items = list(launch.function.instructions)
    for edit in edits:
        if not edit.opcode:
            continue
        found = [k for k, item in enumerate(items) if item.opcode.startswith(edit.opcode)]
        if not found:
            raise ValueError(f"{edit.text!r}: {launch.function.name} has no {edit.opcode}")
        for k in found:
            items[k] = WAYS[edit.what](items[k], edit.value)
    function = Function(launch.function.name, items, launch.function.labels)
    return launch.with_function(function)
