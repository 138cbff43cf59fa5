"""The search for the path of a warp through the machine code.

From one landmark to the next there are few ways. Of all that come by the right landmark, that one
is taken whose work is nearest to what the recording says, added up over the whole path (Viterbi);
of equal ones the shorter. Between landmarks the search goes breadth first, merges ways that have
met with the same work done, and gives up those that have done too much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Any, NamedTuple

from cycle_model.binding.symbols import KINDS, NO_WORK, OPTIONAL, Vector, of_function
from cycle_model.binding.target import Order, Target, Told
from cycle_model.sass.flow import Function

END = "end"
_SLACK = (64, 512, 4096)  # of work that code motion may have brought from elsewhere
_KEPT = 4  # ways to a place that have done as much work
_STEPS = 32, 8  # in which that is counted
_NEAR = 0.02  # of all work
_FORGIVEN = 0.75  # of accesses that a guard may have kept from being executed
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


State = tuple[Place, Told]


class Step(NamedTuple):
    """How a state is reached best: cost of the whole path, the last way and the number of the
    landmark it leads to, where that begins."""

    cost: float
    way: Way | None
    landmark: int
    before: State


_Begun = tuple[int, float, int, int, Place, Vector, int, float, Any]
Layer = dict[State, Step]  # of paths that came by so many landmarks
Found = list[tuple[int, Way]]  # numbers of landmarks in the order of the machine code, and ways


class _Run(NamedTuple):
    """Straight code from an instruction to one that may go elsewhere or is a landmark."""

    end: int  # that one
    work: Vector
    maybe: int  # of its work: accesses with a guard, which may not have been executed


class Unbound(ValueError):
    """No path fits. reached: landmarks that some path came by."""

    def __init__(self, message: str, reached: int) -> None:
        super().__init__(message)
        self.reached = reached


class Search:
    """In one kernel; what was found is kept, as loops ask for it again and again."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.symbols = of_function(function.instructions)
        self._runs: dict[int, _Run] = {}
        self._after: dict[int, list[int]] = {}
        self._leading: dict[tuple[Place, str], set[Place]] = {}
        self._ways: dict[tuple[Place, str, Vector, int], list[Way]] = {}
        self._paths: dict[tuple[object, ...], Found] = {}

    def path(self, target: Target) -> Found:
        """One way to each landmark, and one to the end. Raises `Unbound`."""
        key = target.key
        if key not in self._paths:
            self._paths[key] = self._best(target)
        return self._paths[key]

    def _best(self, target: Target) -> Found:
        """With as little slack as will do: a way that is near may lead nowhere."""
        failed: Unbound | None = None
        for level in range(len(_SLACK)):
            try:
                return self._along(target, level)
            except Unbound as error:
                if failed is None or error.reached > failed.reached:
                    failed = error
        assert failed is not None
        raise failed

    def _along(self, target: Target, level: int) -> Found:
        wanted = [(each.name, each.before) for each in target.landmarks] + [(END, target.rest)]
        order = Order([*(each.stream for each in target.landmarks), ""])
        begin = Place(0), Told()
        layers: list[Layer] = [{begin: Step(0.0, None, 0, begin)}]
        for _ in wanted:
            found: Layer = {}
            for state, step in layers[-1].items():
                place, told = state
                for number in order.next(told):
                    after = told.with_(number)
                    for way in self.ways(place, *wanted[number], level):
                        total = step.cost + way.cost
                        reached = way.place, after
                        if reached not in found or total < found[reached].cost:
                            found[reached] = Step(total, way, number, state)
            if not found:
                raise self._unbound(target, layers[-1])
            layers.append(found)
        return _backwards(layers)

    def ways(self, start: Place, name: str, work: Vector, level: int = 0) -> list[Way]:
        """All ways from a place to the next landmark, the best one for each place it leads to.
        level: of the slack with which to begin."""
        key = start, name, work, level
        if key not in self._ways:
            self._ways[key] = self._found(start, name, work, level)
        return self._ways[key]

    def _found(self, start: Place, name: str, work: Vector, level: int) -> list[Way]:
        """Looked for more closely where what was found at first is not near."""
        for slack in _SLACK[level:]:
            for step in _STEPS:
                found = self._explored(start, name, work, slack, step)
                if not found or min(way.cost for way in found) <= _NEAR * sum(work):
                    break
            if found:
                break
        return found

    def _explored(
        self, start: Place, name: str, wanted: Vector, slack: int, step: int
    ) -> list[Way]:
        """In the order of the work that has been done. Of ways that have met after as much work,
        those go on whose kinds of work are nearest to the shares that they have in all of it."""
        useful = self._useful(start, name)
        if start not in useful:
            return []
        limit = [amount + slack + amount // 2 for amount in wanted]
        whole = max(sum(wanted), 1)
        most = (whole + whole // 2 + 2 * slack) // step
        best: dict[Place, Way] = {}
        seen: set[tuple[Place, Vector]] = {(start, NO_WORK)}
        kept: Counter[tuple[Place, int]] = Counter()
        # work, how far its shares are from those wanted, length, its own number, the way
        queue: list[_Begun] = [(0, 0.0, 0, 0, start, NO_WORK, 0, 0.0, None)]
        while queue:
            steps, _, length, _, place, work, maybe, cost, trail = heappop(queue)
            kept[place, steps] += 1
            if kept[place, steps] > _KEPT or steps > most:
                continue
            run = self._run(place.at)
            work, maybe = _sum(work, run.work), maybe + run.maybe
            if any(map(int.__gt__, work, limit)):
                continue
            length += run.end - place.at + 1
            trail = trail, (place.at, run.end + 1)
            for after, arrived, more in self._onward(run.end, place.calls, name):
                if arrived:
                    off = _distance(work, wanted) - _FORGIVEN * min(maybe, _excess(work, wanted))
                    total = cost + more + off + _PER_INSTRUCTION * length
                    if after not in best or total < best[after].cost:
                        best[after] = Way(after, total, _unrolled(trail))
                elif after in useful and (after, work) not in seen:
                    seen.add((after, work))
                    done = sum(work)
                    shares = zip(work, wanted, strict=True)
                    far = (
                        sum([abs(part / done - share / whole) for part, share in shares])
                        if done
                        else 2.0
                    )
                    item = done // step, far, length, len(seen), after, work, maybe
                    heappush(queue, (*item, cost + more, trail))
        return list(best.values())

    def _useful(self, start: Place, name: str) -> set[Place]:
        """Places between a start and a landmark from which that can be reached."""
        key = start, name
        if key not in self._leading:
            arrive, sources = self._between(start, name)
            found, queue = set(arrive), list(arrive)
            while queue:
                fresh = sources.get(queue.pop(), set()) - found
                found |= fresh
                queue.extend(fresh)
            self._leading[key] = found
        return self._leading[key]

    def _between(self, start: Place, name: str) -> tuple[list[Place], dict[Place, set[Place]]]:
        """(places that lead straight to the landmark, places before each place)."""
        arrive: list[Place] = []
        sources: dict[Place, set[Place]] = {start: set()}
        queue = [start]
        while queue:
            place = queue.pop()
            for after, arrived, _ in self._onward(self._run(place.at).end, place.calls, name):
                if arrived:
                    arrive.append(place)
                    continue
                if after not in sources:
                    sources[after] = set()
                    queue.append(after)
                sources[after].add(place)
        return arrive, sources

    def _run(self, index: int) -> _Run:
        found = self._runs.get(index)
        if found is None:
            end, work, maybe = index, list(NO_WORK), 0
            while not self._stops(end):
                symbol = self.symbols[end]
                if symbol.kind >= 0:
                    work[symbol.kind] += symbol.amount
                if symbol.kind in _ACCESSES and self.function.instructions[end].guard:
                    maybe += symbol.amount
                end += 1
            symbol = self.symbols[end]
            found = self._runs[index] = _Run(end, tuple(work), maybe)
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
            for goal in self._goals(end):
                yield Place(goal, calls), False, 0.0

    def _goals(self, index: int) -> list[int]:
        if index not in self._after:
            parts = self.function.instructions[index].opcode.startswith("BRA.DIV")
            goals = {index + 1} if parts else self.function.goals(index)
            self._after[index] = sorted(goal for goal in goals if goal < len(self.symbols))
        return self._after[index]

    def _unbound(self, target: Target, states: Iterable[State]) -> Unbound:
        names = [each.name for each in target.landmarks] + [END]
        number = max(told.first for _, told in states)
        places = [place for place, told in states if told.first == number]
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
        while queue and len(seen) < 10_000:
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


_ACCESSES = {k for k, name in enumerate(KINDS) if name.endswith((" load", " store"))}
_JUMPS = {"BRA", "BRX", "JMP", "EXIT", "RET", "CALL", "BSYNC", "BPT", "KILL"}
_DEEPEST = 4  # calls


def _sum(one: Vector, other: Vector) -> Vector:
    return tuple(map(int.__add__, one, other)) if other is not NO_WORK else one


def _distance(one: Vector, other: Vector) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


def _excess(work: Vector, wanted: Vector) -> int:
    """Accesses beyond those that are wanted."""
    return sum(max(work[kind] - wanted[kind], 0) for kind in _ACCESSES)


def _unrolled(trail: Any) -> tuple[tuple[int, int], ...]:
    """From a chain of pairs, the last step first."""
    steps = []
    while trail is not None:
        trail, step = trail
        steps.append(step)
    return tuple(steps[::-1])


def _backwards(layers: list[Layer]) -> Found:
    """The ways of the cheapest path to the last layer."""
    state = min(layers[-1], key=lambda each: layers[-1][each].cost)
    found: Found = []
    for layer in reversed(layers[1:]):
        _, way, number, state = layer[state]
        assert way is not None, "only the first layer has none"
        found.append((number, way))
    return found[::-1]
