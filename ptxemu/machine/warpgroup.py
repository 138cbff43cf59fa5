"""A warpgroup: four warps whose wgmma instructions are one operation each.

Warps come to an instruction in any order and do not wait for one another there; the operation
begins when the last has come, and those of a warpgroup complete in order. What a warp finds at its
`wgmma.wait_group` decides how long it waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxemu.errors import HardwareRefusal
from ptxemu.machine.async_ops import Work, WorkQueue
from ptxemu.machine.wgmma import Form

if TYPE_CHECKING:
    from ptxemu.machine.cta import Cta
    from ptxemu.machine.listener import Waiters
    from ptxemu.machine.warp import Warp

WARPS = 4
Fragment = tuple[Any, ...]  # a register each: 32 lanes, or the bits that all of them have
Operands = tuple[Form, int, Any, int, bool]  # form, line, A's descriptor or None, B's, scale-d


@dataclass(eq=False)
class Part:
    """What one warp brings to an operation: A and D before it, `out`, uint32 (registers, 32), which
    its results come to, and the register with the metadata of a sparse A, none of a dense one."""

    warp: Warp
    a: Fragment
    d: Fragment
    out: np.ndarray
    metadata: Fragment = ()
    late: bool = True  # the warp has not waited for it


@dataclass(eq=False)
class Multiplication:
    """One wgmma.mma_async of a warpgroup, number `number` of it from 1."""

    group: Warpgroup
    number: int
    operands: Operands
    parts: list[Part | None] = field(default_factory=lambda: [None] * WARPS)
    work: Work | None = None  # once all warps have come
    waiters: Waiters = field(default_factory=list)

    def __str__(self) -> str:
        """In a deadlock report, what is parked here waits for."""
        absent = [self.group.first + k for k, part in enumerate(self.parts) if part is None]
        form, line, *_ = self.operands
        return (
            f"{form.label} at line {line} of {self.group}: not executed by"
            f" warp{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        )


@dataclass(eq=False)
class Progress:
    """Of one warp: operations it has executed, the last one of each group it has committed, and
    those it has not waited for."""

    issued: int = 0
    groups: list[int] = field(default_factory=list)
    pending: deque[Multiplication] = field(default_factory=deque)


class Warpgroup:
    """Warps `first` to `first` + 3 of a CTA."""

    def __init__(self, cta: Cta, first: int) -> None:
        self.cta = cta
        self.first = first
        self.queue = WorkQueue()
        self.gathering: dict[int, Multiplication] = {}  # by number
        self.progress = [Progress() for _ in range(WARPS)]

    def __str__(self) -> str:
        return f"warps {self.first}-{self.first + WARPS - 1} of {self.cta.name()}"

    def of(self, w: Warp) -> Progress:
        return self.progress[w.index - self.first]

    def add(self, part: Part, operands: Operands) -> Multiplication | None:
        """A warp comes to its next operation, which is returned if it was the last to come."""
        w = part.warp
        own = self.of(w)
        own.issued += 1
        found = self.gathering.setdefault(own.issued, Multiplication(self, own.issued, operands))
        if found.operands != operands:
            raise HardwareRefusal(
                f"{w.name()} executes {_told(operands)}, another warp of its warpgroup"
                f" {_told(found.operands)}; all four execute one instruction, with equal operands"
            )
        found.parts[w.index - self.first] = part
        own.pending.append(found)
        if None in found.parts:
            return None
        return self.gathering.pop(own.issued)

    def require_whole(self) -> None:
        """At the end of the CTA, each operation has been executed by all four warps."""
        for each in self.gathering.values():
            raise HardwareRefusal(f"the CTA has ended, and {each}", line=each.operands[1])

    def commit(self, w: Warp) -> None:
        own = self.of(w)
        own.groups.append(own.issued)

    def awaited(self, w: Warp, allowed: int) -> Iterator[Multiplication]:
        """Operations of all but the newest `allowed` groups of a warp, oldest first."""
        own = self.of(w)
        last = own.groups[-1 - allowed] if len(own.groups) > allowed else 0
        yield from (each for each in own.pending if each.number <= last)

    def complete(self, w: Warp, last: int) -> None:
        """The warp knows that operations up to number `last` are complete."""
        own = self.of(w)
        while own.pending and own.pending[0].number <= last:
            part = own.pending.popleft().parts[w.index - self.first]
            assert part is not None, "it was executed"
            part.late = False

    def reading(self, w: Warp, registers: np.ndarray) -> Multiplication | None:
        """The operation whose results `registers` are to be, if the warp has not waited for it."""
        for each in self.of(w).pending:
            part = each.parts[w.index - self.first]
            if part is not None and part.out is registers:
                return each
        return None


def _told(operands: Operands) -> str:
    form, line, a, b, accumulate = operands
    of_a = "A in registers" if a is None else f"A {a:#x}"
    return f"{form.label} at line {line} with {of_a}, B {b:#x}, scale-d {int(accumulate)}"


def warpgroup_of(w: Warp) -> Warpgroup:
    """The warpgroup of a warp, all of whose lanes are active. Raises HardwareRefusal where it has
    not four warps of 32 threads."""
    first = w.index // WARPS * WARPS
    found = w.cta.warpgroups.get(first)
    if found is None:
        if len(w.cta.warps) < first + WARPS:
            raise HardwareRefusal(f"wgmma by {w.name()}, whose warpgroup has not four warps")
        found = w.cta.warpgroups[first] = Warpgroup(w.cta, first)
    return found
