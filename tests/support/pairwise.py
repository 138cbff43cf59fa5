"""Covering arrays: few rows in which every allowed pair of values of two factors occurs.

Greedy and seeded, so the same factors give the same rows everywhere. Each row starts with the pair
that most needs covering; the other factors follow in random order, each with the value that covers
most. The best of several such candidates is kept.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

CANDIDATES = 6  # rows tried for each row kept

Row = dict[str, Hashable]
Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]


@dataclass(frozen=True)
class Rule:
    """A rule of allowed combinations. `allows` is called with the values of `names` once all have
    one."""

    names: tuple[str, ...]
    allows: Callable[..., bool]

    @cached_property
    def needed(self) -> frozenset[str]:
        """The names as a set."""
        return frozenset(self.names)


@dataclass
class Space:
    """Factors with their values, and rules that restrict combinations.

    factors: name -> values.
    rules: rules that every row has to satisfy.
    """

    factors: Mapping[str, Sequence[Hashable]]
    rules: Sequence[Rule] = ()
    _extends: dict[frozenset, bool] = field(default_factory=dict)

    @cached_property
    def ruled(self) -> frozenset[str]:
        """Factors that rules read."""
        return frozenset().union(*(rule.needed for rule in self.rules))

    @cached_property
    def rules_of(self) -> dict[str, list[Rule]]:
        """The rules that read a factor."""
        return {name: [r for r in self.rules if name in r.needed] for name in self.factors}

    def allowed(self, row: Mapping[str, Hashable]) -> bool:
        """Whether the values in `row` so far break no rule."""
        return _kept(self.rules, row)

    def extends(self, row: Mapping[str, Hashable]) -> bool:
        """Whether some complete row agrees with `row`. Only factors that rules read can conflict,
        so only those are tried, and the answer depends only on those."""
        ruled = self.ruled
        key = frozenset([item for item in row.items() if item[0] in ruled])
        if key not in self._extends:
            open_names = [name for name in self.factors if name in ruled and name not in row]
            self._extends[key] = self.allowed(row) and self._completes(dict(row), open_names)
        return self._extends[key]

    def _completes(self, row: Row, names: list[str]) -> bool:
        if not names:
            return True
        name, *rest = names
        for value in self.factors[name]:
            row[name] = value
            if _kept(self.rules_of[name], row) and self._completes(row, rest):
                return True
        row.pop(name, None)
        return False

    def pairs(self) -> Iterator[Pair]:
        """Yield every pair of values that some complete row has."""
        for (first, values), (second, others) in itertools.combinations(self.factors.items(), 2):
            for a, b in itertools.product(values, others):
                if self.extends({first: a, second: b}):
                    yield (first, a), (second, b)


def _kept(rules: Sequence[Rule], row: Mapping[str, Hashable]) -> bool:
    """Whether every rule allows `row`, among those whose factors all have a value."""
    names = row.keys()
    for rule in rules:
        if names >= rule.needed and not rule.allows(*[row[name] for name in rule.names]):
            return False
    return True


def pairs_of(row: Mapping[str, Hashable], order: Sequence[str]) -> set[Pair]:
    """Pairs that `row` covers, with factors in the order of the space."""
    items = [(name, row[name]) for name in order]
    return set(itertools.combinations(items, 2))


def covering(space: Space, seed: int = 0) -> list[dict[str, Any]]:
    """Rows that together cover every allowed pair."""
    order = list(space.factors)
    generator = random.Random(seed)
    missing = dict.fromkeys(space.pairs())  # a set with an order that does not depend on hashes
    rows = []
    while missing:
        first = _neediest(missing)
        candidates = [_candidate(space, missing, first, generator) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda row: len(pairs_of(row, order) & missing.keys()))
        for pair in pairs_of(best, order):
            missing.pop(pair, None)
        rows.append({name: best[name] for name in order})
    return rows


def random_row(space: Space, generator: random.Random) -> dict[str, Any]:
    """A random complete row: each factor gets a random value that can be completed."""
    row: Row = {}
    for name, values in space.factors.items():
        possible = [value for value in values if space.extends(row | {name: value})]
        row[name] = generator.choice(possible)
    return row


def _candidate(
    space: Space, missing: Mapping[Pair, None], first: Sequence[Pair], generator: random.Random
) -> Row:
    """Make a row that begins with one of the pairs `first`."""
    position = {name: number for number, name in enumerate(space.factors)}
    row = dict(generator.choice(first))
    names = [name for name in space.factors if name not in row]
    generator.shuffle(names)

    def gain(item: tuple[str, Hashable]) -> int:
        """Number of missing pairs of `item` with the values in the row."""
        place = position[item[0]]
        pairs = [(item, o) if place < position[o[0]] else (o, item) for o in row.items()]
        return len(missing.keys() & pairs)

    for name in names:
        values = space.factors[name]
        if name in space.ruled:
            values = [value for value in values if space.extends(row | {name: value})]
        gains = [gain((name, value)) for value in values]
        best = [value for value, count in zip(values, gains, strict=True) if count == max(gains)]
        row[name] = generator.choice(best)
    return row


def _neediest(missing: Mapping[Pair, None]) -> list[Pair]:
    """Missing pairs with the value that occurs in most of them."""
    counts = Counter(itertools.chain.from_iterable(missing))
    most = max(counts, key=counts.__getitem__)
    return [pair for pair in missing if most in pair]
