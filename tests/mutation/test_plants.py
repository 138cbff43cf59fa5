"""Faults planted in our own kernels: a wait, fence or signal for registers and asynchronous copies
that is missing, too late or too early. The checker reports each, and names what is missing.

A plant is a mutant (`ptxemu.mutation`) of a kernel that `lab.mutation` has a problem for.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lab.bringup.covering import MUTATED
from lab.mutation.subject import LIMIT, SCHEDULES
from ptxemu.findings import ERROR, NOTE
from ptxemu.mutation.catalogue import CLASSES, Mutant, mutants
from ptxemu.mutation.rerun import findings, verdict
from ptxemu.mutation.text import Text

KINDS = {kind.name: kind for kind in CLASSES}
LATE = {name: how for name, how in SCHEDULES.items() if name.startswith("adversarial")}


@dataclass(frozen=True)
class Plant:
    """A fault.

    subject: the kernel and its problem, a name of `MUTATED`.
    kind: the class of mutation.
    number: index among the kernel's places of this kind that the problem reaches.
    cause: part of the finding that says what is missing.
    severity: of that finding. A note names something that no other agent relies on in this problem.
    """

    subject: str
    kind: str
    number: int
    cause: str
    severity: str = ERROR

    def __str__(self) -> str:
        return f"{self.subject}: {self.kind} {self.number}"

    def mutant(self) -> tuple[str, Mutant]:
        """(digest of the kernel, the mutant)."""
        kernels = MUTATED[self.subject].kernels.kernels
        found = [
            (digest, mutant)
            for digest, kernel in kernels.items()
            for mutant in mutants(Text(kernel.ptx, kernel.observed), [KINDS[self.kind]])
            if mutant.executed
        ]
        return found[self.number]


LOADS, STORES = "tcgen05.wait::ld before the arrival", "tcgen05.wait::st before the arrival"
USED_EARLY = "tcgen05.wait::ld between the two"
GROUP, WAIT_GROUP = "cp.async.commit_group", "cp.async.wait_group"
COMMIT = "tcgen05.commit to an mbarrier after it"
SIGNAL = "an mbarrier arrival and a wait"

PLANTS = (
    Plant("decode sm_100a", "remove wait::ld", 0, LOADS),
    Plant("decode sm_100a", "move wait::ld behind arrival", 0, LOADS),
    Plant("decode sm_100a", "remove wait::st", 0, STORES),
    Plant("decode sm_100a", "remove wait::ld", 1, USED_EARLY, NOTE),
    Plant("decode sm_100a", "move wait::ld behind barrier", 0, LOADS),
    Plant("decode sm_100a", "weaken wait::st to wait::ld", 0, STORES),
    Plant("decode sm_100a", "move tcgen05.st behind wait::st", 0, STORES),
    Plant("decode sm_100a", "remove cp.async wait", 0, WAIT_GROUP),
    Plant("decode sm_100a", "weaken cp.async wait: one more", 0, WAIT_GROUP),
    Plant("decode sm_100a", "remove cp.async commit_group", 0, GROUP),
    Plant("decode sm_100a", "move cp.async behind commit_group", 0, GROUP),
    Plant("decode sm_100a", "move mma behind commit", 0, COMMIT),
    Plant("64 base", "remove wait::st", 0, STORES),
    Plant("64 base", "remove wait::st", 1, STORES),
    Plant("64 base", "remove wait::st", 2, STORES),
    Plant("64 base", "weaken wait::st to wait::ld", 2, STORES),
    Plant("64 base", "move wait::st behind arrival", 0, STORES),
    Plant("64 base", "move wait::st behind arrival", 2, STORES),
    Plant("64 base", "move tcgen05.st behind wait::st", 1, STORES),
    Plant("64 base", "remove wait::ld", 0, USED_EARLY, NOTE),
    Plant("index scores tcgen05", "remove wait::ld", 1, LOADS),
    Plant("index scores tcgen05", "move wait::ld behind arrival", 0, LOADS),
    Plant("index scores tcgen05", "remove cp.async wait", 0, WAIT_GROUP),
    Plant("index scores tcgen05", "remove cp.async wait", 1, WAIT_GROUP),
    Plant("index scores tcgen05", "remove cp.async commit_group", 0, GROUP),
    Plant("index scores tcgen05", "move mma behind commit", 0, COMMIT),
    Plant("moe mixed on Blackwell", "remove wait::ld", 1, LOADS),
    Plant("moe mixed on Blackwell", "remove wait::st", 0, STORES),
    Plant("moe mixed on Blackwell", "move ld.shared behind arrival", 0, SIGNAL),
    Plant("moe mixed on Blackwell", "move wait::ld behind arrival", 0, LOADS),
    Plant("moe mixed on Blackwell", "move wait::st behind arrival", 0, STORES),
    Plant("moe 128", "remove wait::ld", 1, LOADS),
    Plant("sm_90a 64 turns", "remove wgmma fence", 0, "wgmma.fence before it"),
    Plant("sm_90a 64 turns", "remove wgmma fence", 1, "wgmma.fence before it"),
    Plant("sm_90a 64 turns", "remove wgmma wait", 0, "wgmma.wait_group"),
    Plant("sm_90a 64 turns", "weaken wgmma wait: one more", 1, "wgmma.wait_group"),
    Plant("sm_90a 64 turns", "remove wgmma commit_group", 0, "wgmma.commit_group"),
    Plant("sm_90a 64 turns", "move wgmma behind commit_group", 1, "wgmma.wait_group"),
    Plant("sm_90a 64 turns", "remove bulk wait_group", 0, "cp.async.bulk.wait_group.read"),
)


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_a_plant_is_reported_with_its_cause(plant: Plant):
    subject = MUTATED[plant.subject]
    assert not subject.kernels.known, "the kernel itself has findings"
    digest, mutant = plant.mutant()
    assert not mutant.equivalent
    found = findings(subject.run, digest, mutant.change.lines, limit=LIMIT)
    causes = {(each.severity, each.missing) for each in found}
    assert any(plant.severity == severity and plant.cause in words for severity, words in causes), (
        causes
    )
    if plant.severity == NOTE:  # the results show it, since registers land as late as possible
        assert verdict(subject.run, digest, mutant.change.lines, LATE, set()).noticed
