"""What is missing between two accesses, in the words of the PTX manual."""

from __future__ import annotations

import numpy as np

from ptxemu.check.clocks import ASYNC_GLOBAL, ASYNC_SHARED, EXECUTED, ORDERED, Component, Stamp

# kind of the earlier access's component -> what makes it known to others, and the manual section
MISSING = {
    "warp": ("a barrier, or an mbarrier arrival and a wait, between the two", "mbarrier, barrier"),
    "mbarrier": ("mbarrier.try_wait on the mbarrier that it completes on", "mbarrier.try_wait"),
    "tensor core": (
        "tcgen05.commit to an mbarrier behind it, and a wait on that mbarrier",
        "tcgen05.commit",
    ),
    "tcgen05.alloc": ("a barrier behind the allocation", "tcgen05.alloc"),
    "tcgen05.ld": (
        "tcgen05.wait::ld (or a use of its registers) before the arrival",
        "tcgen05.wait",
    ),
    "tcgen05.st": ("tcgen05.wait::st before the arrival", "tcgen05.wait"),
    "bulk read": (
        "cp.async.bulk.wait_group.read before the source is overwritten",
        "cp.async.bulk.wait_group",
    ),
    "bulk write": ("cp.async.bulk.wait_group (not .read)", "cp.async.bulk.wait_group"),
    "cp.async": (
        "cp.async.wait_group, or cp.async.mbarrier.arrive and a wait",
        "cp.async.wait_group",
    ),
}
WARP_SYNC = ("bar.warp.sync between the lanes of the warp", "bar.warp.sync")
PROXY_FENCE = ("fence.proxy.async between the write and the operation", "membar / fence")
RELEASE = (
    "release and acquire semantics, of a scope that holds both (a relaxed or .cta barrier "
    "orders no memory for the other)",
    "memory consistency model, causality order",
)


def missing(
    earlier: Stamp, component: Component, clock: np.ndarray, *, own: int, asynchronous: bool
) -> tuple[str, str]:
    """(likely missing instruction, manual section) for an agent that knows `clock`."""
    if earlier.component >= clock.shape[1]:
        return MISSING[component.kind]
    known = clock[:, earlier.component]
    if earlier.component == own and not (asynchronous and known[ASYNC_SHARED] < earlier.step):
        return WARP_SYNC
    if known[ORDERED] >= earlier.step and asynchronous and not component.asynchronous:
        if min(known[ASYNC_SHARED], known[ASYNC_GLOBAL]) < earlier.step:
            return PROXY_FENCE
    if known[EXECUTED] >= earlier.step > known[ORDERED] and component.kind == "warp":
        return RELEASE
    return MISSING[component.kind]
