"""All benchmarks in order, and those of some groups."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from workbench.units import dsmem, issue, launches, memory, sync, tma
from workbench.units.benchmark import Benchmark
from workbench.units.launches import Timed

MODULES = (issue, sync, dsmem, memory, tma, launches)


def benchmarks_of(groups: Collection[str]) -> Iterator[Benchmark | Timed]:
    """In an order that does not depend on what is asked for."""
    for module in MODULES:
        for benchmark in module.benchmarks():
            if benchmark.group in groups:
                yield benchmark
