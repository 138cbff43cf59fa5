"""Recorded launch whose warps have paths through the machine code of its kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cycle_model.binding.search import Found, Search, Unbound
from cycle_model.binding.target import Landmark, Targets
from cycle_model.sass.flow import Function
from ptxemu.record.recording import Recording, WarpRecord


@dataclass(frozen=True)
class BoundWarp:
    """A recorded warp with its path through the machine code.

    Attributes:
        path: Numbers of the function's instructions.
        at: Positions of the landmarks in `path`.
        cost: Distance between the work on the path and the recorded work, in units of `symbols`.
            Work that the compiler moved across a landmark counts before it and after it.
        work: All recorded work.
    """

    record: WarpRecord
    path: np.ndarray
    at: np.ndarray
    landmarks: tuple[Landmark, ...]
    cost: float
    work: int


class BoundLaunch:
    """Raises `Unbound` where a warp has no path, with the warp and the first landmark that
    differs."""

    def __init__(self, function: Function, recording: Recording) -> None:
        self.function, self.recording = function, recording
        self._targets, self._search = Targets(recording), Search(function)
        self._paths: dict[int, tuple[np.ndarray, np.ndarray, float]] = {}
        self._records: defaultdict[int, list[WarpRecord]] = defaultdict(list)
        for warp in recording.warps:
            self._records[warp.cluster].append(warp)
        self._bound: dict[int, list[BoundWarp]] = {}

    @property
    def clusters(self) -> list[int]:
        """Numbers of the recorded clusters."""
        return sorted(self._records)

    @cached_property
    def ctas_of_cluster(self) -> int:
        return int(np.prod(self.recording.cluster))

    def with_function(self, function: Function) -> BoundLaunch:
        """Return a launch with the same paths through a function with as many instructions."""
        if len(function.instructions) != len(self.function.instructions):
            raise ValueError(
                "the other function has another number of instructions, so paths do not apply"
            )
        other = copy(self)
        other.function = function
        return other

    def with_paths(
        self, function: Function, change: Callable[[BoundWarp], BoundWarp]
    ) -> BoundLaunch:
        """Return a launch whose paths, changed by `change`, go through another function."""
        other = copy(self)
        other.function = function
        other._bound = {k: [change(warp) for warp in self.cluster(k)] for k in self.clusters}
        return other

    def records(self, number: int) -> list[WarpRecord]:
        """Return the records of a cluster's warps."""
        return self._records[number]

    def cluster(self, number: int) -> list[BoundWarp]:
        """Return the bound warps of a cluster, sorted by rank and index."""
        if number not in self._bound:
            warps = sorted(self._records[number], key=lambda each: (each.rank, each.index))
            self._bound[number] = [self._bind(each) for each in warps]
        return self._bound[number]

    def _bind(self, warp: WarpRecord) -> BoundWarp:
        target = self._targets.of(warp)
        try:
            found = self._search.path(target)
        except Unbound as error:
            where = f"warp {warp.index} of CTA {warp.rank} of cluster {warp.cluster}"
            raise Unbound(f"{self.recording.entry}, {where}: {error}", error.reached) from None
        path, at, cost = self._joined(found)
        landmarks = tuple(target.landmarks[number] for number, _ in found[:-1])
        work = sum(sum(each.before) for each in landmarks) + sum(target.rest)
        return BoundWarp(warp, path, at, landmarks, cost, work)

    def _joined(self, found: Found) -> tuple[np.ndarray, np.ndarray, float]:
        """Join a search's ways; the search returns one list for all warps on the same path."""
        if id(found) not in self._paths:
            steps = [step for _, way in found for step in way.steps]
            path = np.concatenate([np.arange(*step, dtype=np.int32) for step in steps])
            lengths = [sum(end - begin for begin, end in way.steps) for _, way in found]
            at = np.cumsum(lengths)[:-1] - 1
            self._paths[id(found)] = path, at, sum(way.cost for _, way in found)
        return self._paths[id(found)]
