"""What is missing between two accesses, in the words of the PTX manual."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxemu.check.agents import Agent, Ticket, foreign_seen
from ptxemu.check.clocks import ASYNC_GLOBAL, ASYNC_SHARED, EXECUTED, ORDERED
from ptxemu.check.findings import Side

# kind of the earlier access's component -> what makes it known to others, and the manual section
MISSING = {
    "warp": ("a barrier, or an mbarrier arrival and a wait, between the two", "mbarrier, barrier"),
    "mbarrier": (
        "mbarrier.try_wait on the mbarrier that it completes on (consumer_wait of a pipeline)",
        "mbarrier.try_wait",
    ),
    "tensor core": (
        "tcgen05.commit to an mbarrier behind it, and a wait on that mbarrier (of a pipeline:"
        " release or commit, and producer_acquire or consumer_wait)",
        "tcgen05.commit",
    ),
    "wgmma": (
        "wgmma.wait_group, and an arrival or a barrier behind it, before its operands are"
        " overwritten",
        "wgmma.wait_group",
    ),
    "tcgen05.alloc": (
        "a barrier between the access and the allocation or deallocation",
        "tcgen05.alloc",
    ),
    "tcgen05.ld": (
        "tcgen05.wait::ld before the arrival, behind which ptxas may move uses of the registers; in"
        " CuTe DSL cute.arch.fence_view_async_tmem_load()",
        "tcgen05.wait",
    ),
    "tcgen05.st": (
        "tcgen05.wait::st before the arrival; in CuTe DSL cute.arch.fence_view_async_tmem_store()",
        "tcgen05.wait",
    ),
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
FLAG = (
    "a release by the other cluster and an acquire of it, at one address of global memory",
    "memory consistency model, release and acquire patterns",
)
WARP_SYNC = (
    "a barrier between the two (bar.warp.sync will do if it is among the lanes of this warp alone)",
    "bar.warp.sync",
)
OVERLAP = (
    "columns of their own for what one and the same instruction reads and writes: they overlap",
    "tcgen05.mma",
)
PROXY_FENCE = (
    "fence.proxy.async between the write and the operation; in CuTe DSL, for shared memory,"
    " cute.arch.fence_view_async_shared()",
    "membar / fence",
)
RELEASE = (
    "a barrier, or release and acquire semantics, of a scope that holds both (what is relaxed or "
    ".cta orders no memory for the other)",
    "memory consistency model, causality order",
)


def missing(before: Side, by: Agent) -> tuple[str, str]:
    """(likely missing instruction, manual section) where `by`, a warp or an asynchronous operation
    of one, is not ordered after the access `before` of its cluster."""
    earlier, clock = before.stamp, by.rows
    component = before.component
    if isinstance(by, Ticket) and (earlier.component, earlier.step) == by.position:
        return OVERLAP
    if not _heard(component.owner, component.kind, earlier.step, clock[EXECUTED]):
        return MISSING["warp"]
    if earlier.component >= clock.shape[1]:
        return MISSING[component.kind]
    known = clock[:, earlier.component]
    proxy = ASYNC_GLOBAL if before.space.startswith("global") else ASYNC_SHARED
    unfenced = by.asynchronous and known[proxy] < earlier.step
    copied = earlier.component == by.copied and known[ORDERED] >= earlier.step
    if copied or (earlier.component == by.own and not unfenced):
        return WARP_SYNC
    if known[ORDERED] >= earlier.step and unfenced and not component.asynchronous:
        return PROXY_FENCE
    if known[EXECUTED] >= earlier.step > known[ORDERED] and component.kind == "warp":
        return RELEASE
    return MISSING[component.kind]


def missing_abroad(before: Side, by: Agent, cluster: int) -> tuple[str, str]:
    """The same where `before` is of another cluster."""
    earlier, component = before.stamp, before.component
    seen = foreign_seen(by, cluster, False)
    if (
        by.asynchronous
        and earlier.component < len(seen)
        and seen[earlier.component] >= earlier.step
    ):
        return PROXY_FENCE
    if component.owner is not None and _heard(component.owner, component.kind, earlier.step, seen):
        return MISSING[component.kind]
    return FLAG


def _heard(owner: Any, kind: str, step: int, seen: np.ndarray) -> bool:
    """The warp has told something after it issued this operation: what is missing is not that, but
    that it was told of the completion, too."""
    if owner is None or kind == "tensor core":
        return True
    if kind == "bulk write":
        kind = "bulk read"  # its two halves were issued as one
    told = seen[owner.own] if owner.own < len(seen) else 0
    return bool(told >= owner.begun[kind][step - 1])
