"""How many arrivals complete one phase of an mbarrier: derived from who signals, never typed.

Sources: PTX ISA, mbarrier.arrive.expect_tx (one arrival, and the bytes it announces),
tcgen05.commit (`mbarrier::arrive::one`), mbarrier.arrive (one per active thread).
In a CTA pair a thread can only wait on a barrier of its own CTA, so the barrier lies where the
waiting role plays, and `Reach` says how a signal gets there.
"""

from __future__ import annotations

from enum import Enum

from kernelkit.plan import hw
from kernelkit.plan.warps import Role


class Signal(Enum):
    """How a role signals: the payload moved by TMA, by the tensor core, or by its own threads."""

    TMA = "tma"  # one elected thread arrives and announces bytes; the copy completes them
    UMMA = "umma"  # one elected thread commits; the tensor core arrives when it is done
    THREADS = "threads"  # every thread arrives once its own work is ordered before
    WARPS = "warps"  # one thread of each warp arrives once the warp's wgmmas are done


class Reach(Enum):
    """Which CTA's barrier a signal completes."""

    OWN = "own"  # of the CTA that signals
    LEADER = "leader"  # both CTAs of a pair signal, its leader waits
    BOTH = "both"  # the leader signals, both CTAs of the pair wait
    EACH = "each"  # both CTAs of the pair signal, and both wait for both


def arrivals(role: Role, signal: Signal, reach: Reach = Reach.OWN, every_team: bool = False) -> int:
    """Arrivals per phase on one barrier when all of `role` signals once, in every CTA it plays in.

    TMA and UMMA are issued by one elected lane, so their roles must be a single warp. The one
    arrival for TMA is the leader's, which announces the bytes of both CTAs. every_team: all teams
    of the role signal, not the one whose stage it is.
    """
    if signal in (Signal.THREADS, Signal.WARPS):
        count = role.threads if every_team else role.team_threads
        count *= 2 if reach in (Reach.LEADER, Reach.EACH) else 1
        if signal is Signal.WARPS:
            count //= hw.WARP_THREADS
    elif role.warps != 1:
        raise ValueError(
            f"role {role.name} has {role.warps} warps: {signal.value} signals come from one warp"
        )
    else:
        count = 1
    if count > hw.MBARRIER_MAX_ARRIVALS:
        raise ValueError(f"{count} arrivals, limit {hw.MBARRIER_MAX_ARRIVALS}")
    return count
