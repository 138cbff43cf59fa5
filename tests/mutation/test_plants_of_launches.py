"""Faults planted in our own kernels: directives that contradict the launch, targets that lack an
instruction, waits for the wrong phase, and scopes that are too narrow. Each is reported, and the
report names the cause.

`test_plants.py` has those of registers and asynchronous copies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from lab.bringup.covering import MUTATED
from lab.mutation.subject import LIMIT
from ptxemu.mutation.rerun import (
    BROKEN,
    CHECKER,
    DEADLOCK,
    REFUSED,
    UNNOTICED,
    Kernel,
    findings,
    verdict,
)

ROUND_ROBIN = {"round-robin": {"check": True, "limit": LIMIT}}


@dataclass(frozen=True)
class Plant:
    """A fault.

    subject: the kernel and its problem, a name of `MUTATED`.
    line: pattern of the line.
    other: its replacement.
    number: index among the matching lines that the problem executes; -1 for all of them.
    by: what notices it; BROKEN is PTX that ptxas would refuse.
    cause: a part of the report.
    """

    subject: str
    line: str
    other: str
    by: str
    cause: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.subject}: {self.line} {self.other} {self.number}".replace("\\", "")

    def lines(self, kernel: Kernel) -> dict[int, str]:
        """Return the changed lines of the kernel by number."""
        executed = kernel.observed.executed or frozenset()
        found = [
            (number, line)
            for number, line in enumerate(kernel.ptx.splitlines(), 1)
            if re.search(self.line, line) and (number in executed or "." in line.split()[0][:1])
        ]
        chosen = found if self.number < 0 else [found[self.number]]
        return {number: re.sub(self.line, self.other, line) for number, line in chosen}


DECODE, PAIR = "decode sm_100a", "256 pair"
THREADS, TARGET = r"\.reqntid 224, 1, 1", r"\.target sm_100a"
WAIT = r"(mbarrier\.try_wait\.parity\.shared\.b64 \w+, \[[^]]+\]), "
FIRST, ANY = f"{WAIT}0,", WAIT + r"%r\d+,"  # of a literal parity, or of a computed one
ARRIVAL = r"mbarrier\.arrive\.shared::cluster\.b64"
NARROW = r"mbarrier.arrive.release.cta.shared::cluster.b64"
PAIR_WAIT, PAIR_NARROW = (
    r"mbarrier\.try_wait\.parity\.shared\.b64",
    "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64",
)

PLANTS = (
    Plant(DECODE, THREADS, ".reqntid 192, 1, 1", REFUSED, "requires (192, 1, 1) (.reqntid)"),
    Plant(DECODE, THREADS, ".maxntid 128, 1, 1", REFUSED, "allows (128, 1, 1) (.maxntid)"),
    Plant(DECODE, THREADS, r"\g<0>\n.reqnctapercluster 8, 1, 1", REFUSED, "(.reqnctapercluster)"),
    Plant(DECODE, THREADS, r"\g<0>\n.maxclusterrank 1", REFUSED, "(.maxclusterrank)"),
    Plant(DECODE, THREADS, r"\g<0>\n.maxntid 224, 1, 1", BROKEN, "cannot both be given"),
    Plant(DECODE, THREADS, r"\g<0>\n.blocksareclusters", BROKEN, "counts clusters"),
    Plant("64 base", r"\.reqntid 384, 1, 1", r"\g<0>\n.explicitcluster", REFUSED,
          "without a cluster"),
    Plant(DECODE, TARGET, ".target sm_90a", BROKEN, "tcgen05.alloc"),
    Plant(DECODE, TARGET, ".target sm_110a", BROKEN, "redux.sync.max.NaN.f32 needs sm_100a"),
    Plant(DECODE, TARGET, ".target sm_120a", BROKEN, "of .target sm_120a"),
    Plant(DECODE, TARGET, ".target sm_89", REFUSED, "clusters need compute capability 9.0"),
    Plant(DECODE, FIRST, r"\1, 1,", CHECKER, "race: tcgen05.mma is not ordered after cp.async"),
    Plant(DECODE, FIRST, r"\1, 3,", CHECKER, "race: tcgen05.mma is not ordered after cp.async"),
    Plant(DECODE, FIRST, r"\1, -1,", CHECKER, "race: tcgen05.mma is not ordered after cp.async"),
    Plant(DECODE, ANY, r"\1, 0,", DEADLOCK, "no warp can go on", -1),
    Plant(DECODE, ANY, r"\1, -2,", DEADLOCK, "no warp can go on", -1),
    Plant(DECODE, ANY, r"\1, 1,", CHECKER, "uninitialised: ", 0),
)  # fmt: skip
NO_FAULTS = (  # since only bit 0 of a parity counts
    Plant(DECODE, FIRST, r"\1, 2,", UNNOTICED, ""),
    Plant(DECODE, FIRST, r"\1, -2,", UNNOTICED, ""),
)
SCOPES = (
    Plant(PAIR, ARRIVAL, NARROW, CHECKER, "an arrival at the mbarrier of a peer is of scope .cta"),
    Plant(PAIR, PAIR_WAIT, PAIR_NARROW, CHECKER, "what a peer has signalled is of scope .cta", -1),
)


@pytest.mark.parametrize("plant", [*PLANTS, *NO_FAULTS], ids=str)
def test_a_plant_is_reported_with_its_cause(plant: Plant):
    subject = MUTATED[plant.subject]
    ((digest, kernel),) = subject.kernels.kernels.items()
    lines = plant.lines(kernel)
    found = verdict(subject.run, digest, lines, ROUND_ROBIN, subject.kernels.known)
    assert found.by == plant.by, found
    assert plant.cause in found.how


@pytest.mark.parametrize("plant", SCOPES, ids=str)
def test_a_scope_that_is_too_narrow_is_reported(plant: Plant):
    subject = MUTATED[plant.subject]
    ((digest, kernel),) = subject.kernels.kernels.items()
    found = findings(subject.run, digest, plant.lines(kernel), limit=LIMIT)
    assert any(plant.cause in each.message for each in found), found
