"""Value of a change: a simulation with other numbers or other instructions.

An edit is a parameter of the GPU and its value (`tmem_load_latency=0`), or a change of the
instructions whose opcode begins with the given word:

    stall MUFU.EX2=4        set their stall count
    apart MUFU.EX2=8        in loops, limit the sum of stall counts from one to the next
    waits LDTM=0            set their mask of scoreboards
    drop STL                issue them without any effect
    emulate MUFU.EX2=1/4    in loops, compute this share on the FMA pipe and the ALU
    move STS@2 by -40       move the second of them, or the one at an address, up by 40
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from cycle_model.binding.bound import BoundLaunch
from cycle_model.parameters.parameter import Gpu
from cycle_model.rewrite import LONGEST_STALL, apart, emulate, move
from cycle_model.sass.flow import NO_SCOREBOARD, Control, Function, Instruction

FORMS = (
    "NAME=NUMBER, 'stall OPCODE=N', 'apart OPCODE=N', 'waits OPCODE=MASK', 'drop OPCODE', "
    "'emulate OPCODE=1/N' or 'move OPCODE[@K] by N'"
)
_MOVE = re.compile(r"move (\S+?)(?:@(\d+))? by ([+-]?\d+)")
# of each way, what its number may be
_RANGES = {"stall": (0, LONGEST_STALL), "apart": (1, 1000), "waits": (0, 63), "drop": (0, 0)}


@dataclass(frozen=True)
class Edit:
    """A change of a parameter or of instructions.

    Attributes:
        what: Name of a parameter, or one of `WAYS`.
        opcode: Beginning of the opcode of changed instructions; "" for a parameter.
        number: Which of these instructions, counted from 1; 0 for all.
    """

    text: str
    what: str
    opcode: str
    value: float
    number: int = 0

    @classmethod
    def parsed(cls, text: str) -> Edit:
        """Parse an edit; raise ValueError for invalid text."""
        text = " ".join(text.split())
        if text.startswith("move "):
            found = _MOVE.fullmatch(text)
            if found is None or found[2] == "0":
                raise ValueError(
                    f"{text!r}: 'move OPCODE by N', 'move OPCODE@K by N', K at least 1"
                )
            return cls(text, "move", found[1], int(found[3]), int(found[2] or 0))
        left, sign, right = text.partition("=")
        way, _, opcode = left.strip().partition(" ")
        if (way == "drop") == bool(sign) or (way in WAYS) != bool(opcode):
            raise ValueError(f"{text!r}: one of {FORMS}" if way in WAYS or not opcode else
                             f"{text!r}: {way!r} is none of {', '.join(WAYS)}")  # fmt: skip
        try:
            value = float(Fraction(right.strip())) if sign else 0.0
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"{text!r}: {right!r} is not a number") from None
        cls._check(text, way, value)
        return cls(text, way, opcode.strip(), value)

    @staticmethod
    def _check(text: str, way: str, value: float) -> None:
        if way == "emulate":
            if not 0 < value <= 1 or Fraction(value).limit_denominator(64).numerator != 1:
                raise ValueError(f"{text!r}: a share such as 1/4, at most 1 and at least 1/64")
            return
        low, high = _RANGES.get(way, (0, float("inf")))
        if not low <= value <= high:
            raise ValueError(f"{text!r}: {value:g} is not within {low} .. {high}")


def edits_of(text: str) -> tuple[Edit, ...]:
    """Parse edits that apply together, separated by semicolons."""
    return tuple(Edit.parsed(part) for part in text.split(";"))


def _stall(value: float, item: Instruction) -> Instruction:
    return replace(item, control=item.control._replace(stall=round(value)))


def _waits(value: float, item: Instruction) -> Instruction:
    return replace(item, control=item.control._replace(waits=round(value)))


def _drop(value: float, item: Instruction) -> Instruction:
    """Turn an instruction into a NOP without cost, so that paths keep their length."""
    free = Control(0, False, NO_SCOREBOARD, NO_SCOREBOARD, 0, 0)
    return replace(item, opcode="NOP", operands="", control=free)


def _each(
    change: Callable[[float, Instruction], Instruction], launch: BoundLaunch, edit: Edit
) -> BoundLaunch:
    """Replace each instruction that the edit selects."""
    items = list(launch.function.instructions)
    for k in _found(launch, edit):
        items[k] = change(edit.value, items[k])
    return launch.with_function(Function(launch.function.name, items, launch.function.labels))


def _apart(launch: BoundLaunch, edit: Edit) -> BoundLaunch:
    _found(launch, edit)
    return apart(launch, edit.opcode, round(edit.value))


def _emulate(launch: BoundLaunch, edit: Edit) -> BoundLaunch:
    _found(launch, edit)
    return emulate(launch, edit.opcode, round(1 / edit.value))


def _move(launch: BoundLaunch, edit: Edit) -> BoundLaunch:
    found = _found(launch, edit)
    if edit.number > len(found):
        raise ValueError(f"{edit.text!r}: there are {len(found)} {edit.opcode}")
    if edit.number:
        found = [found[edit.number - 1]]
    elif len(found) > 1:
        places = ", ".join(f"{launch.function.instructions[k].address:#x}" for k in found[:8])
        raise ValueError(f"{edit.text!r}: there are {len(found)}, at {places}: say which, "
                         f"{edit.opcode}@1 to @{len(found)}, or its address")  # fmt: skip
    return move(launch, found[0], round(edit.value))


WAYS: dict[str, Callable[[BoundLaunch, Edit], BoundLaunch]] = {
    "stall": partial(_each, _stall),
    "apart": _apart,
    "waits": partial(_each, _waits),
    "drop": partial(_each, _drop),
    "emulate": _emulate,
    "move": _move,
}


def _found(launch: BoundLaunch, edit: Edit) -> list[int]:
    """Numbers of the instructions; an address names one."""
    items = launch.function.instructions
    if edit.opcode.startswith("0x"):
        found = [k for k, item in enumerate(items) if f"{item.address:#x}" == edit.opcode.lower()]
    else:
        found = [k for k, item in enumerate(items) if item.opcode.startswith(edit.opcode)]
    if not found:
        raise ValueError(f"{edit.text!r}: {launch.function.name} has no {edit.opcode}")
    return found


def edited(gpu: Gpu, edits: Iterable[Edit]) -> Gpu:
    """Return `gpu` with the edited parameters; raise ValueError for an unknown one."""
    return gpu.changed(**{edit.what: edit.value for edit in edits if not edit.opcode})


def rewritten(launch: BoundLaunch, edits: Iterable[Edit]) -> BoundLaunch:
    """Apply the edits of instructions one after another.

    Raises ValueError if no instruction has the opcode or the change is not possible.
    """
    for edit in edits:
        if edit.opcode:
            launch = WAYS[edit.what](launch, edit)
    return launch
