"""Why a mutant that nothing tells from its kernel survives, in one of few categories. A reason is
said of a class of mutation and of instructions; `equivalence` has rules, here are arguments."""

from __future__ import annotations

from dataclasses import dataclass

EDGE = "ordered by another edge"
NAME = "a name and nothing else"
HARDWARE = "shows in the timing of hardware alone"
NOT_REACHED = "not reached by this problem"
UNEXPLAINED = "unexplained"
CATEGORIES = (EDGE, NAME, HARDWARE, NOT_REACHED)


@dataclass(frozen=True)
class Reason:
    """Of the mutants of a class, all three by a part of their text, '' for any."""

    category: str
    argument: str
    kind: str
    instruction: str = ""
    subject: str = ""

    def holds(self, subject: str, kind: str, instruction: str) -> bool:
        return self.subject in subject and self.kind in kind and self.instruction in instruction


REASONS: tuple[Reason, ...] = (
    Reason(
        EDGE,
        "the mbarrier beside it completes later than the right one in every order of this problem: "
        "the checker finds all accesses ordered",
        "misdirect wait",
    ),
    Reason(
        EDGE,
        "every warp has waited in the prologue, as keys are not ready before",
        "dependency wait",
        subject="decode sm_100a dependent launch",
    ),
    Reason(
        EDGE,
        "behind a branch of one thread, whose own arrival at the next barrier publishes what it "
        "wrote; or in front of copies into what ldmatrix, an instruction of the whole warp, has "
        "read",
        "remove warp barrier",
        subject="decode",
    ),
    Reason(
        NOT_REACHED,
        "every warp has one turn, and nothing of another turn follows",
        "remove warp barrier",
        subject="permutation in two",
    ),
    Reason(
        HARDWARE,
        "it keeps ptxas from moving loads behind it; lanes read what they brought themselves",
        "remove warp barrier",
        subject="compressor",
    ),
    Reason(
        NOT_REACHED,
        "no CTA has a second piece, whose sums take the place of the first",
        "remove named barrier",
        subject="checksum",
    ),
    Reason(
        NAME,
        "all threads that meet there execute this instruction, and nobody stands at the other "
        "barrier then",
        "change barrier id",
    ),
    Reason(
        NOT_REACHED,
        "the ring does not come round to this stage, so nobody waits for it to be free",
        "init count +1",
    ),
    Reason(
        NOT_REACHED,
        "the ring does not come round to this stage, so nobody waits for it to be free",
        "misdirect commit",
    ),
    Reason(
        NOT_REACHED,
        "the ring does not come to this stage",
        "remove mbarrier.init",
        subject="index scores",
    ),
    Reason(
        EDGE,
        "the relaxed cluster barrier orders the allocation, by which its address is known (as "
        "NVIDIA's fmha_bwd.py has it), and mbarriers have a fence of their own",
        "remove named barrier",
        "bar.sync 0",
        subject="pair",
    ),
)


def reason_of(subject: str, kind: str, instruction: str) -> Reason | None:
    """The first reason that holds."""
    return next((each for each in REASONS if each.holds(subject, kind, instruction)), None)
