"""Which steps of a bring-up run beside which, and on which GPU.

With one GPU what only checks runs several at a time, and what measures has the machine for itself.
With several GPUs what measures has the first one, and what checks runs beside it on the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from lab.bringup.steps import Step

ANY = ""  # the GPU that a process sees first


@dataclass
class Lane:
    """Steps in their order, `jobs` at a time, the GPUs in turn. free: a GPU for each step that may
    run now; who takes one puts it back."""

    steps: Sequence[Step]
    jobs: int
    gpus: Sequence[str]
    free: SimpleQueue[str] = field(default_factory=SimpleQueue, init=False)

    def __post_init__(self) -> None:
        for number in range(self.jobs):
            self.free.put(self.gpus[number % len(self.gpus)])


def rounds_of(steps: Sequence[Step], jobs: int, gpus: Sequence[str]) -> Iterator[list[Lane]]:
    """Lanes that run side by side, one such list behind the other: what the others rest on, checks
    and measurements, what needs no GPU."""
    first, *others = gpus or [ANY]
    begin = [step for step in steps if not (step.checks or step.measures)]
    checks = [step for step in steps if step.checks and not step.on_host]
    measured = [step for step in steps if step.measures]
    host = [step for step in steps if step.on_host]
    apart = Lane(checks, jobs, others or [first]), Lane(measured, 1, [first])
    yield [Lane(begin, 1, [first])]
    yield from [[*apart]] if others else ([lane] for lane in apart)
    yield [Lane(host, jobs, [first])]
