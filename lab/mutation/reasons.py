"""Why a mutant that nothing tells from its kernel survives, in one of few categories. A reason is
said of a class of mutation and of instructions; `equivalence` has rules, here are arguments."""

from __future__ import annotations

from dataclasses import dataclass

EDGE = "ordered by another edge"
NAME = "a name and nothing else"
UNREAD = "nobody reads what it writes"
HARDWARE = "shows in the timing of hardware alone"
NOT_REACHED = "not reached by this problem"
UNEXPLAINED = "unexplained"
CATEGORIES = (EDGE, NAME, UNREAD, HARDWARE, NOT_REACHED)


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
        HARDWARE,
        "it keeps ptxas from moving loads behind it; lanes read what they brought themselves",
        "remove warp barrier",
        subject="compressor",
    ),
    Reason(
        UNREAD,
        "the copy is of the last row of a window, which no later token replaces: no bytes of it",
        "cp.async behind commit_group",
        subject="compressor csa",
    ),
    Reason(
        EDGE,
        "fence.proxy.async of the thread that initialises, behind it and before the same barrier, "
        "for the scale factors: it makes the inits visible to the async proxy, too",
        "init",
        "fence.mbarrier_init",
        subject="index scores",
    ),
    Reason(
        EDGE,
        "fence.proxy.async of the thread that initialises, behind it and before the same barrier, "
        "for the scale factors: it makes the inits visible to the async proxy, too",
        "init fence behind barrier",
        subject="index scores",
    ),
    Reason(
        EDGE,
        "who meets behind it fences P before any product reads V: the first warpgroup for both",
        "proxy fence",
        subject="sm_90a 512",
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
        EDGE,
        "tiles have one step, and the queue holds fewer of them than the ring has stages: the tile "
        "that fills a stage again was published when all warps were done with the one before it",
        "change init count -1",
        "mbarrier.init",
        subject="moe mixed, one step",
    ),
    Reason(
        NOT_REACHED,
        "nothing stands in front of the first launch of this problem, and a later one follows one "
        "that has waited for the same",
        "dependency wait",
        subject="moe mixed rows",
    ),
    Reason(
        NOT_REACHED,
        "nothing stands in front of the first launch of this problem",
        "dependency wait",
        subject="moe permutation",
    ),
    Reason(
        EDGE,
        "nothing stands in front of the first launch of this problem; the warp that routes reads "
        "nothing of the launch in front, and writes when it has sums of warps that have waited",
        "dependency wait",
        subject="moe route tokens",
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
