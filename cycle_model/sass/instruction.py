"""One SASS instruction, and what its control word asks of the scheduler.

The compiler, not the hardware, keeps an instruction from coming too early. Where it knows when a
result is there, the instruction before waits: `stall`. Where it does not, as for memory, the
instruction that makes the result takes one of six scoreboards when it is issued and returns it when
the result is there (`writes`) or when its operands have been read (`reads`), and who needs it waits
until the scoreboards of its mask (`waits`) are free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

TARGET = re.compile(r"`\(([^)]+)\)")
NO_SCOREBOARD = 7

# What kinds of instructions begin with. Spills: to local memory and back.
SPILLS = ("STL", "LDL")
BARRIERS = (
    *("SYNCS", "BAR", "DEPBAR", "LDGDEPBAR", "FENCE", "MEMBAR", "WARPSYNC", "NOP", "NANOSLEEP"),
)
SELECTION = ("FSETP", "FSEL", "ISETP", "SEL", "PLOP3", "P2R", "R2P", "UISETP", "USEL")

Kinds = dict[str, tuple[str, ...]]  # kind -> what its opcodes begin with; the first match counts


def kind_of(opcode: str, kinds: Kinds) -> str:
    """The kind of an instruction."""
    return next(kind for kind, heads in kinds.items() if opcode.startswith(heads))


class Control(NamedTuple):
    """stall: cycles until the warp may issue again, 0 to 15; yields: another warp should go first;
    writes, reads: the scoreboard that it takes until its result is written, its operands are read,
    7 for none; waits: a mask of scoreboards; reuse: operand slots that it keeps."""

    stall: int = 1
    yields: bool = False
    writes: int = NO_SCOREBOARD
    reads: int = NO_SCOREBOARD
    waits: int = 0
    reuse: int = 0

    @classmethod
    def decoded(cls, high: int) -> Control:
        """From the upper 64 of the 128 bits of an instruction."""
        return cls(
            stall=high >> 41 & 15,
            yields=not high >> 45 & 1,
            writes=high >> 46 & 7,
            reads=high >> 49 & 7,
            waits=high >> 52 & 63,
            reuse=high >> 58 & 15,
        )


NOTHING_ASKED = Control()


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction; `guard` is its predicate ('P0', '!UP1') or empty."""

    address: int
    guard: str
    opcode: str
    operands: str
    control: Control = NOTHING_ASKED

    @property
    def word(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def text(self) -> str:
        """As nvdisasm prints it."""
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {self.operands}".rstrip()

    @property
    def target(self) -> str | None:
        """The label it names, if any."""
        match = TARGET.search(self.operands)
        return match[1] if match else None

    @property
    def is_branch(self) -> bool:
        """BRA, or what ptxas writes for one that all lanes take together: a call of a label of the
        function itself, from which nothing returns."""
        calls = self.word == "CALL" and (self.target or "").startswith(".L_")
        return calls or self.opcode.startswith("BRA")

    @property
    def conditional(self) -> bool:
        """A branch that may fall through: guarded, or with a predicate before its target."""
        return bool(self.guard) or bool(self.operands.partition("`")[0].strip())

    @property
    def repetition(self) -> int:
        """TMEM columns of a 32x32b LDTM or STTM: 32 for LDTM.x32."""
        match = re.search(r"\.x(\d+)", self.opcode)
        return int(match[1]) if match else 1


def kinds_of(instructions: Iterable[Instruction], kinds: Kinds) -> dict[str, int]:
    """Instructions by kind; every kind stands in the result."""
    counts = dict.fromkeys(kinds, 0)
    for item in instructions:
        counts[kind_of(item.opcode, kinds)] += 1
    return counts
