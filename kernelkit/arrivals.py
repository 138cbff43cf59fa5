"""How many arrivals complete one phase of an mbarrier: derived from who signals, never typed.

Sources: PTX ISA, mbarrier.arrive.expect_tx (one arrival, and the bytes it announces),
tcgen05.commit (`mbarrier::arrive::one`), mbarrier.arrive (one per active thread).
"""

from __future__ import annotations

from enum import Enum

from kernelkit import hw
from kernelkit.warps import Role


class Signal(Enum):
    """How a role signals: the payload moved by TMA, by the tensor core, or by its own threads."""

    TMA = "tma"  # one elected thread arrives and announces bytes; the copy completes them
    UMMA = "umma"  # one elected thread commits; the tensor core arrives when it is done
    THREADS = "threads"  # every thread arrives once its own work is ordered before


def arrivals(role: Role, signal: Signal) -> int:
    """Arrivals per phase when all of `role` signals once.

    TMA and UMMA are issued by one elected lane, so their roles must be a single warp.
    """
    if signal is Signal.THREADS:
        count = role.threads
    elif role.warps != 1:
        raise ValueError(
            f"role {role.name} has {role.warps} warps: {signal.value} signals come from one warp"
        )
    else:
        count = 1
    if count > hw.MBARRIER_MAX_ARRIVALS:
        raise ValueError(f"{count} arrivals, limit {hw.MBARRIER_MAX_ARRIVALS}")
    return count
