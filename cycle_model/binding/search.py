"""The search for the path of a warp through the machine code.

From one landmark to the next there are few ways. Of all that come by the right landmark, that one
is taken whose work is nearest to what the recording says, added up over the whole path (Viterbi);
of equal ones the shorter. Between landmarks the search goes breadth first, merges ways that have
met with the same work done, and gives up those that have done too much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from cycle_model.binding.symbols import NO_WORK, OPTIONAL, Change, Vector, of_sass, unchanged
from cycle_model.binding.target import Target
from cycle_model.sass.flow import Function

END = "end"
_SLACK = (64, 512, 1 << 40)  # of work that code motion may have brought from elsewhere
_MOST_WAYS = 200_000  # between two landmarks
_SKIPPED = 0.5  # cost of not executing a guarded landmark where it would fit
_PER_INSTRUCTION = 1e-4


class Place(NamedTuple):
    """The instruction to go on with, and where calls return to."""

    at: int
    calls: tuple[int, ...] = ()


class Way(NamedTuple):
    """To a landmark, which its last instruction is. steps: ranges of instructions, begin and end;
    cost: how far its work is from what it should be."""

    place: Place
    cost: float
    steps: tuple[tuple[int, int], ...]


class Step(NamedTuple):
    """How a place is reached best: cost of the whole path, the last way, where that begins."""

    cost: float
    way: Way | None
    before: Place


Layer = dict[Place, Step]  # of one landmark


class _Run(NamedTuple):
    """Straight code from an instruction to one that may go elsewhere or is a landmark."""

    end: int  # that one
    work: Vector


class Unbound(ValueError):
    """No path fits. reached: landmarks that some path came by."""

    def __init__(self, message: str, reached: int) -> None:
        super().__init__(message)
        self.reached = reached


class Search:
    """In one kernel; what was found is kept, as loops ask for it again and again."""

    def __init__(self, function: Function, change: Change = unchanged) -> None:
        self.function = function
        self.symbols = [change(of_sass(item)) for item in function.instructions]
        self._runs: dict[int, _Run] = {}
        self._ways: dict[tuple[Place, str, Vector], list[Way]] = {}
        self._paths: dict[tuple[object, ...], list[Way]] = {}
        self._nearby: dict[Place, set[str]] = {}

    def path(self, target: Target) -> list[Way]:
        """One way to each landmark, and one to the end. Raises `Unbound`."""
        key = target.key
        if key not in self._paths:
            self._paths[key] = self._best(target)
        return self._paths[key]

    def _best(self, target: Target) -> list[Way]:
        wanted = [(each.name, each.before) for each in target.landmarks] + [(END, target.rest)]
        layers: list[Layer] = [{Place(0): Step(0.0, None, Place(0))}]
        for number, (name, work) in enumerate(wanted):
            found: Layer = {}
            for place, step in layers[-1].items():
                for way in self.ways(place, name, work):
                    total = step.cost + way.cost
                    if way.place not in found or total < found[way.place].cost:
                        found[way.place] = Step(total, way, place)
            if not found:
                raise self._unbound(target, number, layers[-1])
            layers.append(found)
        return _backwards(layers)

    def ways(self, start: Place, name: str, work: Vector) -> list[Way]:
        """All ways from a place to the next landmark, the best one for each place it leads to."""
        key = start, name, work
        if key not in self._ways:
            found: list[Way] = []
            for slack in _SLACK if self._comes(start, name) else ():
                found = self._explored(start, name, work, slack)
                if found:
                    break
            self._ways[key] = found
        return self._ways[key]

    def _comes(self, start: Place, name: str) -> bool:
        """Whether any way from a place may come to that landmark, whatever its work; telling that
        first saves the search of all ways, to the last one, where there is none."""
        if start not in self._nearby:
            self._nearby[start] = self._near(start)
        return name in self._nearby[start]

    def _explored(self, start: Place, name: str, wanted: Vector, slack: int) -> list[Way]:
        limit = [amount + slack + amount // 2 for amount in wanted]
        best: dict[Place, Way] = {}
        seen: set[tuple[Place, Vector]] = {(start, NO_WORK)}
        queue: deque[tuple[Place, Vector, float, int, object]] = deque()
        queue.append((start, NO_WORK, 0.0, 0, None))
        while queue and len(seen) < _MOST_WAYS:
            place, work, cost, length, trail = queue.popleft()
            run = self._run(place.at)
            work = _sum(work, run.work)
            if any(map(int.__gt__, work, limit)):
                continue
            length += run.end - place.at + 1
            trail = trail, (place.at, run.end + 1)
            for after, arrived, more in self._onward(run.end, place.calls, name):
                if arrived:
                    total = cost + more + _distance(work, wanted) + _PER_INSTRUCTION * length
                    if after not in best or total < best[after].cost:
                        best[after] = Way(after, total, _unrolled(trail))
                elif (after, work) not in seen:
                    seen.add((after, work))
                    queue.append((after, work, cost + more, length, trail))
        return list(best.values())

    def _run(self, index: int) -> _Run:
        found = self._runs.get(index)
        if found is None:
            end, work = index, list(NO_WORK)
            while not self._stops(end):
                symbol = self.symbols[end]
                if symbol.kind >= 0:
                    work[symbol.kind] += symbol.amount
                end += 1
            symbol = self.symbols[end]
            found = self._runs[index] = _Run(end, tuple(work))
        return found

    def _stops(self, index: int) -> bool:
        if self.symbols[index].landmark:
            return True
        word = self.function.instructions[index].word
        if index + 1 == len(self.symbols):
            return True
        return word in _JUMPS or index + 1 not in self.function.goals(index)

    def _onward(
        self, end: int, calls: tuple[int, ...], name: str
    ) -> Iterator[tuple[Place, bool, float]]:
        """(where to go on, whether the landmark is reached, cost) behind the end of a run."""
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
        elif word == "CALL":
            goal = self.function.labels.get(item.target or "")
            if goal is not None and len(calls) < _DEEPEST:
                yield Place(goal, (*calls, end + 1)), False, 0.0
        elif word == "RET":
            if calls:
                yield Place(calls[-1], calls[:-1]), False, 0.0
        elif word in ("BPT", "KILL"):
            return
        else:
            if item.opcode.startswith("BRA.DIV"):
                goals = {end + 1}
            else:
                goals = self.function.goals(end)
            for goal in sorted(goals):
                if goal < len(self.symbols):
                    yield Place(goal, calls), False, 0.0

    def _unbound(self, target: Target, number: int, places: Iterable[Place]) -> Unbound:
        names = [each.name for each in target.landmarks] + [END]
        before = ", ".join(names[max(number - 3, 0) : number]) or "the entry"
        where = sorted({f"{self._address(place):#x}" for place in places})[:4]
        reachable = sorted({n for place in places for n in self._near(place)})
        return Unbound(
            f"landmark {number} of {len(names)}, {names[number]!r}, does not follow on {before} in "
            f"the machine code: from {', '.join(where)} come {', '.join(reachable) or 'none'}",
            number,
        )

    def _address(self, place: Place) -> int:
        items = self.function.instructions
        return items[min(place.at, len(items) - 1)].address

    def _near(self, start: Place) -> set[str]:
        """Landmarks that can come next."""
        found: set[str] = set()
        seen, queue = {start}, [start]
        while queue and len(seen) < _MOST_WAYS:
            place = queue.pop()
            run = self._run(place.at)
            landmark = self.symbols[run.end].landmark
            if landmark:
                found.add(landmark)
            for after, arrived, _ in self._onward(run.end, place.calls, END):
                if arrived:
                    found.add(END)
                elif after not in seen:
                    seen.add(after)
                    queue.append(after)
        return found


_JUMPS = {"BRA", "BRX", "JMP", "EXIT", "RET", "CALL", "BSYNC", "BPT", "KILL"}
_DEEPEST = 4  # calls


def _sum(one: Vector, other: Vector) -> Vector:
    return tuple(map(int.__add__, one, other)) if other is not NO_WORK else one


def _distance(one: Vector, other: Vector) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


def _unrolled(trail: Any) -> tuple[tuple[int, int], ...]:
    """From a chain of pairs, the last step first."""
    steps = []
    while trail is not None:
        trail, step = trail
        steps.append(step)
    return tuple(steps[::-1])


def _backwards(layers: list[Layer]) -> list[Way]:
    """The ways of the cheapest path to the last layer."""
    place = min(layers[-1], key=lambda each: layers[-1][each].cost)
    ways: list[Way] = []
    for layer in reversed(layers[1:]):
        _, way, place = layer[place]
        assert way is not None, "only the first layer has none"
        ways.append(way)
    return ways[::-1]
