"""Signals of a warp that come before its loads or stores of tensor memory are complete.

An LDTM returns its scoreboard when its registers hold the data, and so when the columns may be
overwritten. An STTM has none: FENCE.VIEW.ASYNC.T behind it takes one. ptxas makes a signal wait for
either only where the PTX has a `tcgen05.wait`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cycle_model.sass.flow import NO_SCOREBOARD, Function, Instruction

SCOREBOARDS = 6
SIGNAL = re.compile(
    r"SYNCS\.ARRIVE|ARRIVES|BAR\.(?:SYNC|ARV|RED)|UTCBAR|UCGABAR_ARV|(?:ST|RED|ATOM)\w*\..*STRONG"
)
LOAD, STORE, FENCE = "LDTM", "STTM", "FENCE.VIEW.ASYNC.T"
# DEPBAR.LE SB0, 0x0: the count of a scoreboard is waited for; more than 0 leaves some open.
EMPTIED = re.compile(r"\bSB(\d), 0x0\b")


@dataclass(frozen=True)
class EarlySignal:
    """An LDTM or STTM that may be under way when `signal` is issued."""

    access: Instruction
    signal: Instruction

    def __str__(self) -> str:
        return (
            f"{self.signal.opcode} at {self.signal.address:#x} does not wait for"
            f" {self.access.opcode} at {self.access.address:#x}"
        )


@dataclass
class _State:
    """State of the scoreboards.

    open: accesses tracked by each scoreboard.
    unfenced: stores that no scoreboard tracks."""

    open: list[set[Instruction]] = field(
        default_factory=lambda: [set() for _ in range(SCOREBOARDS)]
    )
    unfenced: set[Instruction] = field(default_factory=set)

    def copy(self) -> _State:
        return _State([set(each) for each in self.open], set(self.unfenced))

    def merge(self, other: _State) -> bool:
        """Add the paths of another; return whether that changed anything."""
        before = self.size
        for mine, theirs in zip(self.open, other.open, strict=True):
            mine |= theirs
        self.unfenced |= other.unfenced
        return self.size > before

    @property
    def size(self) -> int:
        return sum(map(len, self.open)) + len(self.unfenced)

    def execute(self, item: Instruction) -> set[Instruction]:
        """Return what is under way when the instruction is issued, which then acts."""
        control = item.control
        emptied = {int(number) for number in EMPTIED.findall(item.operands)}
        for number in range(SCOREBOARDS):
            if control.waits >> number & 1 or number in emptied:
                self.open[number].clear()
        under_way = self.unfenced.union(*self.open)
        if item.opcode.startswith(STORE):
            self.unfenced.add(item)
        elif item.opcode.startswith(FENCE):
            if control.writes != NO_SCOREBOARD:
                self.open[control.writes] |= self.unfenced
            self.unfenced.clear()
        elif item.opcode.startswith(LOAD) and control.writes != NO_SCOREBOARD:
            self.open[control.writes].add(item)
        return under_way


def signals(function: Function) -> list[Instruction]:
    """Instructions by which a warp tells others of what it has done."""
    return [item for item in function.instructions if SIGNAL.match(item.opcode)]


def early_signals(function: Function) -> list[EarlySignal]:
    """On some path of a kernel, in the order of the signals."""
    found: set[EarlySignal] = set()
    before = {0: _State()}
    pending = [0]
    while pending:
        block = function.blocks[pending.pop()]
        state = before[block.index].copy()
        for item in block.instructions:
            under_way = state.execute(item)
            if SIGNAL.match(item.opcode):
                found |= {EarlySignal(access, item) for access in under_way}
        for after in block.successors:
            if after not in before:
                before[after] = state.copy()
                pending.append(after)
            elif before[after].merge(state):
                pending.append(after)
    return sorted(found, key=lambda each: (each.signal.address, each.access.address))
