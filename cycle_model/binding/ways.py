"""Ways through the machine code, from a place to the next landmark.

The search proceeds in the order of the work done. It merges ways that reach a place with the same
work, and drops those that have done too much. Its loop is in `explore`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from cycle_model.binding import explore as E
from cycle_model.binding import symbols
from cycle_model.binding.symbols import ACCESSES, NO_WORK, OPTIONAL, Vector, of_function
from cycle_model.sass.flow import Function
from ptxemu.native.library import Library, library_of
from ptxemu.native.routines import p_i64

END = "end"
_NODES = 1 << 12  # for which there is room at first
_SKIPPED = 0.5  # cost of not executing a guarded landmark where it would fit
_JUMPS = {"BRA", "BRX", "JMP", "EXIT", "RET", "CALL", "BSYNC", "BPT", "KILL"}
_DEEPEST = 4  # calls


class Place(NamedTuple):
    """The instruction to go on with, and where calls return to."""

    at: int
    calls: tuple[int, ...] = ()


class Way(NamedTuple):
    """A way that ends with the instruction of a landmark.

    Attributes:
        place: Place at which the way ends.
        cost: Distance of its work from the work wanted.
        steps: Ranges of instructions as (begin, end).
        owed: That distance by kind; an excess is above zero.
        beside: Part of the cost that does not come from `owed`.
    """

    place: Place
    cost: float
    steps: tuple[tuple[int, int], ...]
    owed: Vector
    beside: float


class Run(NamedTuple):
    """Straight code from an instruction to one that may go elsewhere or is a landmark."""

    end: int  # that one
    work: Vector
    maybe: int  # of its work: accesses with a guard, which may not have been executed


class Moves:
    """Possible steps through the machine code."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.symbols = of_function(function.instructions)
        self._runs: dict[int, Run] = {}
        self._after: dict[int, list[int]] = {}

    def run(self, index: int) -> Run:
        """Return the straight run of code that begins at an instruction."""
        found = self._runs.get(index)
        if found is None:
            end, work, maybe = index, list(NO_WORK), 0
            while not self._stops(end):
                symbol = self.symbols[end]
                if symbol.kind >= 0:
                    work[symbol.kind] += symbol.amount
                if symbol.kind in ACCESSES and self.function.instructions[end].guard:
                    maybe += symbol.amount
                end += 1
            found = self._runs[index] = Run(end, tuple(work), maybe)
        return found

    def _stops(self, index: int) -> bool:
        if self.symbols[index].landmark:
            return True
        word = self.function.instructions[index].word
        if index + 1 == len(self.symbols):
            return True
        return word in _JUMPS or index + 1 not in self.function.goals(index)

    def onward(self, place: Place, name: str) -> Iterator[tuple[Place, bool, float]]:
        """Yield (next place, whether the landmark is reached, cost) after the run of a place."""
        end, calls = self.run(place.at).end, place.calls
        item, symbol = self.function.instructions[end], self.symbols[end]
        word = item.word
        if symbol.landmark:
            fits = symbol.landmark == name
            if fits:
                yield Place(end + 1, calls), True, 0.0
            if item.guard or symbol.landmark in OPTIONAL:
                yield Place(end + 1, calls), False, _SKIPPED if fits else 0.0
        elif word == "EXIT":
            if name == END:
                yield Place(len(self.symbols)), True, 0.0
            if item.guard:
                yield Place(end + 1, calls), False, 0.0
        elif word == "CALL" and not item.is_branch:
            goal = self.function.labels.get(item.target or "")
            if goal is not None and len(calls) < _DEEPEST:
                yield Place(goal, (*calls, end + 1)), False, 0.0
        elif word == "RET":
            if calls:
                yield Place(calls[-1], calls[:-1]), False, 0.0
        elif word in ("BPT", "KILL"):
            return
        else:
            for goal in self._goals(end):
                yield Place(goal, calls), False, 0.0

    def _goals(self, index: int) -> list[int]:
        if index not in self._after:
            parts = self.function.instructions[index].opcode.startswith("BRA.DIV")
            goals = {index + 1} if parts else self.function.goals(index)
            self._after[index] = sorted(goal for goal in goals if goal < len(self.symbols))
        return self._after[index]


class Graph:
    """Places between a start and a landmark, and the goals after it, as tables of `explore`.

    Only places from which the landmark can be reached are included, the start first. The graph is
    empty if there is no way.
    """

    def __init__(self, moves: Moves, start: Place, name: str) -> None:
        onward = _between(moves, start, name)
        useful = _leading(onward)
        self.places = [place for place in onward if place in useful] if start in useful else []
        numbers = {place: number for number, place in enumerate(self.places)}
        goals: dict[Place, int] = {}
        rows: list[list[int]] = []
        edges: list[int] = []
        costs: list[float] = []
        for place in self.places:
            first = len(edges)
            for after, arrived, cost in onward[place]:
                if arrived:
                    edges.append(len(numbers) + goals.setdefault(after, len(goals)))
                elif after in useful:
                    edges.append(numbers[after])
                else:
                    continue
                costs.append(cost)
            run = moves.run(place.at)
            rows.append([run.end + 1 - place.at, run.maybe, first, len(edges), 0, 0, *run.work])
        self.goals = list(goals)
        self.steps = [
            (place.at, place.at + row[0]) for place, row in zip(self.places, rows, strict=True)
        ]
        self._tables = (
            *(np.array(table, np.int64) for table in (rows, edges)),
            np.array(costs),
            *(np.empty(len(goals), kind) for kind in (np.int64, np.float64, np.int64)),
        )
        self.reached, self.costs, self.order = self._tables[3:]
        self.work = self._tables[0][:, E.RUN_WORK :] if rows else np.empty((0, len(NO_WORK)))
        self.addresses = [table.ctypes.data for table in self._tables]


def _between(moves: Moves, start: Place, name: str) -> dict[Place, list[tuple[Place, bool, float]]]:
    """Ways on from each place that is before the landmark."""
    onward: dict[Place, list[tuple[Place, bool, float]]] = {}
    queue = [start]
    while queue:
        place = queue.pop()
        if place not in onward:
            onward[place] = list(moves.onward(place, name))
            queue.extend(after for after, arrived, _ in onward[place] if not arrived)
    return onward


def _leading(onward: dict[Place, list[tuple[Place, bool, float]]]) -> set[Place]:
    """Places from which a goal can be reached."""
    sources: dict[Place, list[Place]] = {}
    found: set[Place] = set()
    for place, edges in onward.items():
        for after, arrived, _ in edges:
            if arrived:
                found.add(place)
            else:
                sources.setdefault(after, []).append(place)
    queue = list(found)
    while queue:
        fresh = [place for place in sources.get(queue.pop(), ()) if place not in found]
        found.update(fresh)
        queue.extend(fresh)
    return found


@cache
def _library() -> Library | None:
    return library_of(E, symbols)


class Explorer:
    """Room for the nodes of a search, used again by the next one."""

    def __init__(self) -> None:
        self.frame = np.zeros(E.FRAME_WORDS, np.int64)
        self._make_room(_NODES)

    def _make_room(self, capacity: int) -> None:
        self.capacity = capacity
        self.nodes = np.empty((capacity, E.NODE_WORDS), np.int64)
        self._others = (
            np.empty((capacity, E.NUMBER_WORDS)),
            np.empty(capacity, np.int64),
            np.zeros(2 * capacity, np.int32),
        )
        self._addresses = [each.ctypes.data for each in (self.nodes, *self._others)]

    def explored(
        self, graph: Graph, wanted: Vector, limit: list[int], step: int, most: int
    ) -> list[Way]:
        """Return the best way to each goal, in the order in which they were reached."""
        while not self._run(graph, wanted, limit, step, most):
            self._make_room(4 * self.capacity)
        reached, costs = graph.reached.tolist(), graph.costs.tolist()
        order = graph.order[: self.frame[E.ARRIVED]].tolist()
        return [self._way(graph, wanted, k, reached[k], costs[k]) for k in order]

    def _way(self, graph: Graph, wanted: Vector, goal: int, node: int, cost: float) -> Way:
        done = self.nodes[node, E.NODE_WORK :] + graph.work[self.nodes[node, E.PLACE]]
        owed = tuple((done - wanted).tolist())
        beside = cost - sum(map(abs, owed))
        return Way(graph.goals[goal], cost, self._steps(graph, node), owed, beside)

    def _run(self, graph: Graph, wanted: Vector, limit: list[int], step: int, most: int) -> bool:
        graph.reached.fill(-1)
        head = [step, most, self.capacity, 2 * self.capacity - 1, 0, 0, 0, 0]
        places, goals = graph.addresses[:3], graph.addresses[3:]
        words = [*head, *places, *self._addresses, *goals, 0, 0, *wanted, *limit, *NO_WORK]
        self.frame[:] = words
        found = _library()
        if found is None:
            return bool(E.explore(p_i64(self.frame), len(graph.places)))
        return bool(found.routine(E.explore)(self.frame.ctypes.data, len(graph.places)))

    def _steps(self, graph: Graph, node: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of instructions from the start through a node."""
        steps = []
        while node >= 0:
            steps.append(graph.steps[self.nodes[node, E.PLACE]])
            node = self.nodes[node, E.BEFORE]
        return tuple(steps[::-1])
