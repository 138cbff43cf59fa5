"""Search for the path of a warp through the machine code.

From one landmark to the next there are few ways (`ways`). Of all paths through the right landmarks,
the search chooses the one whose work, summed over the path, is nearest to the recorded work
(Viterbi); of equal ones the shorter. The compiler moves work across landmarks, such as stores to
tensor memory and arrivals between exponentials. A surplus or deficit before a landmark is therefore
carried on, and counts where a warp waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import add
from typing import NamedTuple

from cycle_model.binding.symbols import NO_WORK, SETTLING, Vector
from cycle_model.binding.target import Order, Target, Told
from cycle_model.binding.ways import END, Explorer, Graph, Moves, Place, Way
from cycle_model.sass.flow import Function

_SLACK = (64, 512, 4096)  # of work that code motion may have brought from elsewhere
_STEPS = 32, 8  # in which work is counted that ways have done that meet
_NEAR = 0.02  # of all work

State = tuple[Place, Told]


class Step(NamedTuple):
    """Best way to reach a state.

    Attributes:
        cost: Cost of the whole path.
        way: The last way.
        landmark: Number of the landmark that the way leads to.
        before: State in which the way begins.
        owed: Work by kind since the warp last waited, see `Way`.
        settled: Cost without `owed`.
    """

    cost: float
    way: Way | None
    landmark: int
    before: State
    owed: Vector
    settled: float


Layer = dict[State, Step]  # of paths that came by so many landmarks
Found = list[tuple[int, Way]]  # numbers of landmarks in the order of the machine code, and ways


class Unbound(ValueError):
    """No path fits. reached: number of landmarks that some path reached."""

    def __init__(self, message: str, reached: int) -> None:
        super().__init__(message)
        self.reached = reached


class Search:
    """Search for paths in one kernel; results are kept, as loops repeat the same queries."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self._moves, self._explorer = Moves(function), Explorer()
        self._graphs: dict[tuple[Place, str], Graph] = {}
        self._ways: dict[tuple[Place, str, Vector, int], list[Way]] = {}
        self._paths: dict[tuple[object, ...], Found] = {}

    def path(self, target: Target) -> Found:
        """Return one way to each landmark and one to the end; raise `Unbound` if there is none."""
        key = target.key
        if key not in self._paths:
            self._paths[key] = self._best(target)
        return self._paths[key]

    def _best(self, target: Target) -> Found:
        """Search with as little slack as possible, and with more if the nearest ways lead
        nowhere."""
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
        layers: list[Layer] = [{begin: Step(0.0, None, 0, begin, NO_WORK, 0.0)}]
        for _ in wanted:
            found: Layer = {}
            for state, step in layers[-1].items():
                place, told = state
                for number in order.next(told):
                    after = told.with_(number)
                    for way in self.ways(place, *wanted[number], level):
                        owed = tuple(map(add, step.owed, way.owed))
                        settled = step.settled + way.beside
                        cost = settled + sum(map(abs, owed))
                        reached = way.place, after
                        if reached in found and cost >= found[reached].cost:
                            continue
                        if wanted[number][0] in SETTLING:
                            owed, settled = NO_WORK, cost
                        found[reached] = Step(cost, way, number, state, owed, settled)
            if not found:
                raise self._unbound(target, layers[-1])
            layers.append(found)
        return _backwards(layers)

    def ways(self, start: Place, name: str, work: Vector, level: int = 0) -> list[Way]:
        """Return the best way to each place after the next landmark. level: slack to begin with."""
        key = start, name, work, level
        if key not in self._ways:
            self._ways[key] = self._found(start, name, work, level)
        return self._ways[key]

    def _found(self, start: Place, name: str, work: Vector, level: int) -> list[Way]:
        """Find ways, with finer steps if the first results are not near.

        If they are off by more than the slack, search with more: a rejected way may be nearer.
        """
        best: dict[Place, Way] = {}
        for slack in _SLACK[level:]:
            for step in _STEPS:
                for way in self._explored(start, name, work, slack, step):
                    if way.place not in best or way.cost <= best[way.place].cost:
                        best[way.place] = way
                off = min((way.cost for way in best.values()), default=math.inf)
                if not best or off <= _NEAR * sum(work):
                    break
            if off <= slack:
                break
        return list(best.values())

    def _explored(
        self, start: Place, name: str, wanted: Vector, slack: int, step: int
    ) -> list[Way]:
        """Return the best way to each place after the landmark."""
        key = start, name
        if key not in self._graphs:
            self._graphs[key] = Graph(self._moves, start, name)
        if not self._graphs[key].places:
            return []
        limit = [amount + slack + amount // 2 for amount in wanted]
        whole = max(sum(wanted), 1)
        most = (whole + whole // 2 + 2 * slack) // step
        return self._explorer.explored(self._graphs[key], wanted, limit, step, most)

    def _unbound(self, target: Target, states: Iterable[State]) -> Unbound:
        names = [each.name for each in target.landmarks] + [END]
        number = max(told.first for _, told in states)
        places = [place for place, told in states if told.first == number]
        before = ", ".join(names[max(number - 3, 0) : number]) or "the entry"
        where = sorted({f"{self._address(place):#x}" for place in places})[:4]
        reachable = sorted({n for place in places for n in self._near(place)})
        return Unbound(
            f"landmark {number} of {len(names)}, {names[number]!r}, does not follow {before} in "
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
            landmark = self._moves.symbols[self._moves.run(place.at).end].landmark
            if landmark:
                found.add(landmark)
            for after, arrived, _ in self._moves.onward(place, END):
                if arrived:
                    found.add(END)
                elif after not in seen:
                    seen.add(after)
                    queue.append(after)
        return found


def _backwards(layers: list[Layer]) -> Found:
    """The ways of the cheapest path to the last layer."""
    state = min(layers[-1], key=lambda each: layers[-1][each].cost)
    found: Found = []
    for layer in reversed(layers[1:]):
        step = layer[state]
        assert step.way is not None, "only the first layer has none"
        found.append((step.landmark, step.way))
        state = step.before
    return found[::-1]
