"""Target of a warp's path: its landmarks in order, and the work between them."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import NamedTuple

from cycle_model.binding.symbols import (
    ATOMIC_WORK,
    BARRIER,
    CLUSTER_ARRIVE,
    CLUSTER_WAIT,
    DYNAMIC,
    KINDS,
    TEST,
    Symbol,
    Vector,
    of_ptx,
    stream,
)
from ptxemu.inspect.stops import registers_of
from ptxemu.record.recording import Event, Recording, WarpRecord
from ptxemu.syntax.tree import Instr


class Landmark(NamedTuple):
    """A landmark in the recording of a warp.

    Attributes:
        name: Name in `symbols`.
        events: Recorded effects; none if the instruction's text determines them.
        site: Instruction in the recording.
        before: Work since the previous landmark.
        relaxed: See `symbols`.
    """

    name: str
    events: tuple[Event, ...]
    site: int
    before: Vector
    relaxed: bool = False

    @property
    def stream(self) -> str:
        """See `symbols.stream`."""
        return stream(self.name, self.relaxed)


class Target(NamedTuple):
    """Landmarks of a warp. rest: work after the last one."""

    landmarks: tuple[Landmark, ...]
    rest: Vector

    @property
    def key(self) -> tuple[object, ...]:
        """Key that is equal for warps with the same path."""
        names = tuple((each.name, each.before, each.relaxed) for each in self.landmarks)
        return names, self.rest


class Told(NamedTuple):
    """Landmarks that a path has reached.

    They are all before `first`, and those from `first` on whose bits in `ahead` are set.
    """

    first: int = 0
    ahead: int = 0

    def with_(self, number: int) -> Told:
        """Add landmark `number`."""
        first, ahead = self.first, self.ahead | 1 << number - self.first
        while ahead & 1:
            first, ahead = first + 1, ahead >> 1
        return Told(first, ahead)


class Order:
    """Order of landmarks: the first may come next, or the first later one of another stream."""

    def __init__(self, streams: list[str]) -> None:
        self._streams = streams
        self._next: dict[Told, tuple[int, ...]] = {}

    def next(self, told: Told) -> tuple[int, ...]:
        """Return the numbers of the landmarks that may come next."""
        if told not in self._next:
            other = self._other(told)
            self._next[told] = (told.first,) if other is None else (told.first, other)
        return self._next[told]

    def _other(self, told: Told) -> int | None:
        mine = self._streams[told.first]
        for number in range(told.first + 1, len(self._streams)) if mine else ():
            if not self._streams[number]:
                break
            if self._streams[number] != mine and not told.ahead >> number - told.first & 1:
                return number
        return None


class Targets:
    """Targets of the warps of one recording."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.clustered = max(recording.cluster) > 1

    @cached_property
    def _blocks(self) -> list[list[tuple[int, Symbol]]]:
        """The instructions of each block that leave something in the machine code."""
        symbols = [self._left(site) for site in self.recording.sites]
        return [
            [(site, symbols[site]) for site in block if symbols[site] != Symbol()]
            for block in self.recording.blocks
        ]

    @cached_property
    def _named(self) -> Counter[str]:
        """Count how often instructions name each register."""
        return Counter(
            name
            for site in self.recording.sites
            for operand in (*site.operands, site.guard)
            for name in registers_of(operand)
        )

    def _left(self, site: Instr) -> Symbol:
        """Return the symbol expected in SASS: none for a tensor-memory load with an unused result.

        The compiler removes such a load.
        """
        symbol = of_ptx(site)
        if symbol.landmark.startswith("tmem ld"):
            results = registers_of(site.operands[0])
            if all(self._named[name] == 1 for name in results):
                return Symbol()
        return symbol

    def of(self, warp: WarpRecord) -> Target:
        """Dynamic landmarks are there where something was recorded."""
        events: dict[tuple[int, int], tuple[Event, ...]] = {}
        for event in warp.events:
            where = event.block, event.site
            events[where] = (*events.get(where, ()), event)
        landmarks: list[Landmark] = []
        work = [0] * len(KINDS)
        unheard: int | None = None
        for position, block in enumerate(warp.path.tolist()):
            for site, symbol in self._blocks[block]:
                if not symbol.landmark:
                    if symbol.kind == ATOMIC_WORK:
                        self._require(warp, site, heard=(position, site) in events)
                    work[symbol.kind] += symbol.amount
                    continue
                told = events.get((position, site), ())
                name = self._name(symbol.landmark)
                if not told and symbol.landmark in DYNAMIC:
                    unheard = self._unheard(site, symbol.landmark, unheard)
                    continue
                if unheard not in (None, site):
                    raise self._incomplete(warp, unheard)
                unheard = None
                if not name:
                    continue
                landmarks.append(Landmark(name, told, site, tuple(work), symbol.relaxed))
                work = [0] * len(KINDS)
        if unheard is not None:
            raise self._incomplete(warp, unheard)
        return Target(tuple(landmarks), tuple(work))

    def _require(self, warp: WarpRecord, site: int, *, heard: bool) -> None:
        """Raise an error if an instruction that is no landmark lacks a record without being
        guarded."""
        if not heard and not self._guarded(site):
            raise self._incomplete(warp, site)

    def _unheard(self, site: int, landmark: str, before: int | None) -> int | None:
        """An instruction that was executed and left no event. A guard may have stopped it, and a
        test may have been in vain; a wait is repeated at once. Any other is missing."""
        return before if self._guarded(site) or landmark == TEST else site

    def _guarded(self, site: int) -> bool:
        return self.recording.sites[site].guard is not None

    def _incomplete(self, warp: WarpRecord, site: int) -> ValueError:
        instr = self.recording.sites[site]
        return ValueError(
            f"the recording of warp {warp.index} of CTA {warp.rank} of cluster {warp.cluster} says "
            f"that it executed line {instr.line}, {instr.text.strip()!r}, but not its effect"
        )

    def _name(self, landmark: str) -> str:
        """Machine code asks the launch whether it has clusters; without them, no arrival."""
        if not self.clustered and landmark == CLUSTER_ARRIVE:
            return ""
        return BARRIER if not self.clustered and landmark == CLUSTER_WAIT else landmark
