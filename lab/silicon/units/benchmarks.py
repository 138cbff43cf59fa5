"""All benchmarks in order, and those of some groups."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from lab.silicon.units import dsmem, issue, launches, memory, sync, tcgen05, tma, tmem
from lab.silicon.units.benchmark import Benchmark
from lab.silicon.units.launches import Timed
from lab.silicon.units.ptx import BLACKWELL, HOPPER

MODULES = (issue, sync, dsmem, memory, tma, tcgen05, tmem, launches)
_FAMILY = {"sm_103a": BLACKWELL}  # what has the instructions of another one


def benchmarks_of(groups: Collection[str], arch: str = HOPPER) -> Iterator[Benchmark | Timed]:
    """Benchmarks of GPUs of an architecture, in an order that does not depend on what is asked
    for."""
    family = _FAMILY.get(arch, arch)
    for module in MODULES:
        for benchmark in module.benchmarks():
            if benchmark.group in groups and benchmark.arch in ("", family):
                yield benchmark
