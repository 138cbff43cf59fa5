"""Random programs on several processes and threads: bits, findings and errors of a launch alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

import ptxemu
from tests.ptxemu.kernels import launch
from tests.ptxemu.random_programs import (
    EXCHANGES,
    MEMORY_WORDS,
    REGISTERS,
    Generator,
    expected,
    ptx_of,
)
from tests.ptxemu.test_threads import in_threads

THREADS = 4
QUICK, LONG = range(2, 4), 2000  # seeds of a right program and of a race; programs


@dataclass
class Case:
    """A program whose launches all have the same memory, so that reports have equal addresses."""

    seed: int
    exchange: str = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(f"launches {self.seed}")
        self.program = Generator(rng)
        self.kinds = tuple(rng.choice(("lane", "uniform")) for _ in range(REGISTERS))
        self.block, self.grid = rng.choice((32, 20, 64)), rng.choice((2, 3, 5))
        self.exchange = rng.choice(["none", *EXCHANGES])
        self.text = ptx_of(self.program, self.kinds, EXCHANGES[self.exchange])
        self.module = ptxemu.load(self.text)
        self.start = np.random.default_rng(self.seed).integers(
            0, 1 << 32, MEMORY_WORDS, dtype=np.uint32
        )
        self.memory = self.start.copy()
        self.out = np.zeros((self.grid * self.block, REGISTERS), np.uint32)

    def launched(self, **options: object) -> tuple[bytes, bytes, object]:
        """Return both arrays, and the counts with the findings or the error."""
        self.memory[:], self.out[:] = self.start, 0
        try:
            report = launch(
                self.module, self.memory, self.out, grid=(self.grid,), block=(self.block,),
                limit=None, **options,
            )  # fmt: skip
        except ptxemu.PtxEmuError as error:
            told: object = (type(error), str(error))
        else:
            told = (report.counts, report.by_warp, report.findings, report.unused, report.partly)
        return self.memory.tobytes(), self.out.tobytes(), told

    def right(self) -> bytes:
        """Return `out` by the definition of each thread, for programs without an exchange."""
        return expected(self.program, self.kinds, self.start, len(self.out)).tobytes()


def check(seeds: Sequence[int]) -> None:
    """Compare the programs of these seeds; their launches on threads are side by side."""
    cases = [Case(seed) for seed in seeds]
    for checked in (False, True):
        alone = [case.launched(check=checked) for case in cases]
        for case, one in zip(cases, alone, strict=True):
            where = f"seed {case.seed}, {case.exchange}, check={checked}\n{case.text}"
            assert case.exchange != "none" or one[1] == case.right(), where
            assert case.launched(check=checked, processes=2) == one, where
        together = in_threads(lambda k, c=checked: cases[k].launched(check=c), len(cases))
        assert together == alone, f"threads, seeds {seeds}, check={checked}"


def test_random_launches():
    check(QUICK)


def test_many_random_launches():
    for seed in range(0, LONG, THREADS):
        check(range(seed, seed + THREADS))
