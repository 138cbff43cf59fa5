"""Ask a function for everything that its page has, as rules: where they hold, what follows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kernelkit.compile.arch import written_for
from lab.support.space import GPU, GPUS, Row, Space, Verdict, boxes, limit_of

ASKED_OF = ("sm_100a", "sm_90a", "sm_120a")  # one GPU for each set of kernels
YES = "yes"
MOST_ASKED = 6  # values of which all are asked, where more are sampled
KERNELS, OPTIONS, TOGETHER = "kernels", "options", "together"
Point = tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """What follows for a call whose factors have one of these values.

    where: factor -> values.
    result: a kernel, YES, or the number of a note.
    """

    where: Mapping[str, frozenset[str]]
    result: str

    def holds(self, row: Row) -> bool:
        """Whether a row has such values."""
        return all(row[name] in values for name, values in self.where.items())


@dataclass
class Support:
    """What one function accepts: its factors, rules by section, and notes by number.

    A note is the text of a refusal. about: see `Space`.
    """

    about: str
    factors: Mapping[str, Sequence[str]]
    rules: dict[str, list[Rule]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def refusals(self, row: Row) -> set[str]:
        """The notes that refuse a row; none where it is accepted."""
        every = itertools.chain.from_iterable(self.rules.values())
        return {rule.result for rule in every if rule.holds(row)} & self.notes.keys()

    def result(self, verdict: Verdict) -> str:
        """Return the kernel, or the number of the refusal's limit, which becomes a note."""
        if verdict.accepted:
            return verdict.kernel
        number = self.number_of(verdict)
        if number is None:
            number = str(len(self.notes) + 1)
            self.notes[number] = verdict.refusal
        return number

    def number_of(self, verdict: Verdict) -> str | None:
        """Return the number of a refusal's limit, None for one without a note."""
        found = (n for n, text in self.notes.items() if limit_of(text) == verdict.limit)
        return next(found, None)

    def add(self, section: str, names: Sequence[str], points: Mapping[Point, str]) -> None:
        """Add the rules of points, which have a value for each of the factors `names`."""
        for result in dict.fromkeys(points.values()):
            for box in boxes(point for point, found in points.items() if found == result):
                where = dict(zip(names, box, strict=True))
                self.rules.setdefault(section, []).append(Rule(where, result))

    def spread(
        self, names: Sequence[str], points: Mapping[Point, str], kept: int
    ) -> dict[Point, str]:
        """Let a result that does not depend on a factor hold for all of its values, asked or not.

        kept: factors at the beginning of `names` for which that is not done.
        """
        for place in range(kept, len(names)):
            without: dict[Point, set[str]] = {}
            for point, result in points.items():
                without.setdefault((*point[:place], *point[place + 1 :]), set()).add(result)
            if all(len(results) == 1 for results in without.values()):
                points = {
                    (*rest[:place], value, *rest[place:]): result
                    for rest, (result,) in without.items()
                    for value in self.factors[names[place]]
                }
        return dict(points)


def ask(space: Space) -> Support:
    """Ask a function about its space."""
    support = Support(space.about, space.factors)
    support.add(KERNELS, space.table, dict(_kernels(space, support)))
    values = itertools.product(*(space.factors[name] for name in space.contexts))
    rows = [space.default | dict(zip(space.contexts, each, strict=True)) for each in values]
    contexts = [row for row in rows if not support.refusals(row)]
    for name in space.options:
        points = dict(_option(space, support, contexts, name))
        support.add(OPTIONS, (name, *space.contexts), points)
    others = [name for name in space.factors if name not in space.contexts]
    for one, other in itertools.combinations(others, 2):
        if one in space.options or other in space.options:
            points = dict(_pairs(space, support, contexts, (one, other)))
            support.add(TOGETHER, (one, other, GPU), points)
    return support


def _kernels(space: Space, support: Support) -> Iterator[tuple[Point, str]]:
    """Yield the points of the table, and what runs or refuses them."""
    *names, sampled = space.table
    default, *samples = space.factors[sampled]
    alike: dict[Point, list[str]] = {}

    def found(*point: str) -> str:
        row = {**space.default, **dict(zip(space.table, point, strict=True))}
        return support.result(space.verdict(row))

    for values in itertools.product(*(space.factors[name] for name in names)):
        result = found(*values, default)
        yield (*values, default), result
        alike.setdefault((*values[:-1], result), []).append(values[-1])
    for (*values, result), lasts in alike.items():
        asked: Sequence[str] = lasts
        if len(samples) > MOST_ASKED:
            asked = [] if result in support.notes else _ends(lasts)
        for sample in samples:
            results = {found(*values, last, sample) for last in asked} or {result}
            for last in lasts:
                same = len(results) == 1
                each = next(iter(results)) if same else found(*values, last, sample)
                yield (*values, last, sample), each


def _ends(values: Sequence[str]) -> Sequence[str]:
    """A few values, or the smallest and the largest of more, by their first number."""
    if len(values) <= MOST_ASKED:
        return values
    first = {value: int(value.partition("/")[0]) for value in values}
    return min(values, key=first.__getitem__), max(values, key=first.__getitem__)


def _option(
    space: Space, support: Support, contexts: Sequence[Row], name: str
) -> Iterator[tuple[Point, str]]:
    """Yield every value of an option in every context, and YES or its note."""
    names = name, *space.contexts
    for value in space.factors[name][1:]:
        points = {}
        for context in contexts:
            verdict = space.verdict({**context, name: value})
            point = value, *(context[where] for where in space.contexts)
            points[point] = YES if verdict.accepted else support.result(verdict)
        yield from support.spread(names, points, kept=1).items()


def _pairs(
    space: Space, support: Support, contexts: Sequence[Row], names: tuple[str, str]
) -> Iterator[tuple[Point, str]]:
    """Yield pairs of values that are refused together, though each is accepted, and their note."""
    one, other = names
    asked = [[row for row in contexts if row[GPU] == gpu] for gpu in ASKED_OF]
    for pair in itertools.product(space.factors[one][1:], space.factors[other][1:]):
        points = {}
        for rows in asked:
            row = next((row for row in rows if _each_alone(support, row, names, pair)), None)
            if row is not None:
                verdict = space.verdict({**row, **dict(zip(names, pair, strict=True))})
                result = YES if verdict.accepted else support.result(verdict)
                served = [gpu for gpu in GPUS if written_for(gpu) == written_for(row[GPU])]
                points |= {(*pair, gpu): result for gpu in served}
        found = support.spread((*names, GPU), points, kept=2)
        yield from ((point, result) for point, result in found.items() if result != YES)


def _each_alone(support: Support, row: Row, names: Sequence[str], values: Sequence[str]) -> bool:
    """Whether each of two values is accepted without the other."""
    pairs = zip(names, values, strict=True)
    return not any(support.refusals({**row, name: value}) for name, value in pairs)
