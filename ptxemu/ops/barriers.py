"""bar, barrier.cta, bar.warp.sync, barrier.cluster, fence, membar, fence.proxy: PTX ISA "Parallel
Synchronization", "membar / fence".

A waiting instruction starts its block: when it parks, the block runs again after the wake-up, and
the fragment's token says that the barrier has completed. Memory is sequentially consistent between
warps here, so of fences only the proxy fences have an effect: they make ordinary shared-memory
stores visible to the async proxy (see `Cta.unfenced`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.namespace import mask_bits
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value, constant
from ptxemu.errors import HardwareRefusal
from ptxemu.machine.state import Warp
from ptxemu.numerics import PerLane
from ptxemu.ops.warp import name_lanes
from ptxemu.syntax.tree import Instr


@op(
    "bar.sync bar.cta.sync barrier.sync barrier.cta.sync",
    flags="aligned",
    section="barrier.cta",
    blocking=True,
)
def barrier_sync(c: Lower, i: Instr, f: Match) -> None:
    count = c.src(i.operands[1], "u32") if len(i.operands) > 1 else constant(0, "u32")
    c.effect("barrier_wait(w, {0}, {1})", c.src(i.operands[0], "u32"), count, parks=True)


@op(
    "bar.arrive bar.cta.arrive barrier.arrive barrier.cta.arrive",
    flags="aligned",
    section="barrier.cta",
)
def barrier_arrive(c: Lower, i: Instr, f: Match) -> None:
    c.effect("arrive_barrier(w, {0}, {1})", *c.srcs(i.operands[:2], "u32"))


@op(
    "bar.red bar.cta.red barrier.red barrier.cta.red",
    types="pred u32",
    flags="popc and or aligned",
    section="barrier.cta",
    blocking=True,
)
def barrier_red(c: Lower, i: Instr, f: Match) -> Value:
    mode = f.pick("popc", "and", "or")
    count = c.src(i.operands[2], "u32") if len(i.operands) > 3 else constant(0, "u32")
    return c.effect(
        f"barrier_reduce(w, {{0}}, {{1}}, {{2}}, '{mode}', <mb>)",
        c.src(i.operands[1], "u32"),
        count,
        c.src(i.operands[-1], "pred"),
        results=[("u32" if mode == "popc" else "pred", True)],
        parks=True,
        deps=(),
    )[0]


@op("bar.warp.sync")
def warp_sync(c: Lower, i: Instr, f: Match) -> None:
    """Convergence of the members is all that it does here."""
    name_lanes(c, i.operands[0])
    if c.observed or c.analysis:  # where nobody listens the mask costs nothing
        c.announce("warp_synced(w, {0})", c.src(i.operands[0], "u32"))


@op("barrier.cluster.arrive", flags="release relaxed aligned", section="barrier.cluster")
def cluster_arrive(c: Lower, i: Instr, f: Match) -> None:
    c.effect(f"arrive_cluster(w, {'relaxed' in f.flags})")


@op("barrier.cluster.wait", flags="acquire aligned", section="barrier.cluster", blocking=True)
def cluster_wait(c: Lower, i: Instr, f: Match) -> None:
    c.effect("wait_cluster(w)", parks=True)


# -- what they do ---------------------------------------------------------------------------


_NO_VOTE = 0, 0


def _agreed(w: Warp, operand: PerLane) -> int:
    """A barrier operand, which the lanes of a warp must agree on."""
    if not isinstance(operand, np.ndarray):
        return operand
    values = set(w.lane_values(operand))
    if len(values) > 1:
        raise HardwareRefusal(f"barrier operand differs within a warp: {sorted(values)}")
    return int(values.pop())


def _checked(w: Warp, count: int) -> int:
    """Return the expected count; 0 means all threads of the CTA."""
    total = 32 * len(w.cta.warps)
    if count % 32 or count > total:
        raise HardwareRefusal(
            f"barrier thread count {count}; must be a multiple of 32 up to {total}"
        )
    return count


@runtime
def barrier_wait(
    w: Warp, ident: int, count: int, votes: tuple[Any, ...] = _NO_VOTE
) -> tuple[Any, ...] | None:
    """The votes of all threads (bar.red) once everyone has arrived; None: parked."""
    if ident.__class__ is not int or count.__class__ is not int:
        ident, count = _agreed(w, ident), _agreed(w, count)
    cta, frag = w.cta, w.frag
    barrier = cta.barriers.get(ident) or cta.barrier(ident)
    result, frag.token = frag.token, None
    if result is None:
        for each in w.listeners:
            each.barrier_arrival(w, barrier)
        if votes != _NO_VOTE:
            barrier.vote(*votes)
        barrier.waiters.append((w, frag))
        frag.wait = barrier
        if barrier.add(32, _checked(w, count), w.label):  # wakes this warp too, as the last one
            w.machine.note_progress()
        return None
    for each in w.listeners:
        each.barrier_waited(w, barrier)
    return result


@runtime
def arrive_barrier(w: Warp, ident: int, count: int) -> None:
    ident, count = _agreed(w, ident), _agreed(w, count)
    barrier = w.cta.barrier(ident)
    for each in w.listeners:
        each.barrier_arrival(w, barrier)
    if barrier.add(32, _checked(w, count), w.label):
        w.machine.note_progress()


@runtime
def barrier_reduce(
    w: Warp, ident: int, count: int, predicate: PerLane, mode: str, mb: int
) -> int | bool | None:
    """Return popc, and, or of the predicates of all threads that take part."""
    true = mb if predicate is True else mask_bits(np.broadcast_to(predicate, 32)) & mb
    result = barrier_wait(w, ident, count, (true.bit_count(), mb.bit_count()))
    if result is None:
        return None
    votes, threads = result
    return {"popc": votes, "and": votes == threads, "or": votes > 0}[mode]


@runtime
def arrive_cluster(w: Warp, relaxed: bool) -> None:
    if w.frag.mask & w.cluster_lanes:
        raise HardwareRefusal(
            "barrier.cluster.arrive by a thread that has not waited since its last"
        )
    for each in w.listeners:
        each.cluster_arrival(w, relaxed)
    w.cluster_phase = w.cluster.phase + 1
    w.cluster_lanes |= w.frag.mask
    w.cluster.arrive(w.frag.mask.bit_count())


@runtime
def wait_cluster(w: Warp) -> bool | None:
    if w.frag.mask & ~w.cluster_lanes:
        raise HardwareRefusal("barrier.cluster.wait by a thread that has not arrived")
    if w.cluster.phase >= w.cluster_phase:
        w.cluster_lanes &= ~w.frag.mask
        for each in w.listeners:
            each.cluster_waited(w)
        return True
    w.cluster.waiters.append((w, w.frag))
    w.park(w.cluster)
    return None


# -- fences ----------------------------------------------------------------------------------


_SCOPE = "cta cluster gpu sys"


@op(
    "fence membar",
    flags=f"{_SCOPE} sc acq_rel acquire release sync_restrict::shared::cta::cluster "
    "sync_restrict::shared::cta sync_restrict::shared::cluster gl",
    section="membar, fence",
)
def fence(c: Lower, i: Instr, f: Match) -> None:
    """Orders memory accesses; nothing is reordered here, and only listeners hear of it."""
    c.announce(f"fence(w, {'cta' in f.flags})")


@op("fence.mbarrier_init", flags=f"release {_SCOPE}", section="membar, fence")
def fence_mbarrier_init(c: Lower, i: Instr, f: Match) -> None:
    """Makes mbarrier.init visible in the cluster; it is at once here."""
    c.announce("fence_init(w)")


@op(
    "fence.proxy",
    flags="alias async async::global async::shared::cta async::shared::cluster async.global "
    "global shared::cta shared::cluster async.shared::cta async.shared::cluster async.global",
    section="membar, fence",
)
def fence_proxy(c: Lower, i: Instr, f: Match) -> None:
    flags = {part for flag in f.flags for part in flag.replace("async::", "async ").split()}
    if "alias" in flags:
        return
    spaces = tuple(
        name for name in ("shared", "global") if any(part.startswith(name) for part in flags)
    )
    if "shared" in spaces or not spaces:
        c.effect(f"fence_proxy_async(w, {not spaces or 'shared::cluster' in flags})")
    c.announce(f"fence_proxy(w, {spaces or ('shared', 'global')})")


@op("fence.proxy.tensormap::generic", flags=f"acquire release {_SCOPE}", section="membar, fence")
def fence_tensormap(c: Lower, i: Instr, f: Match) -> None:
    """Tensor maps are read when an instruction that uses them is issued; listeners hear of it."""
    if "release" in f.flags:
        c.announce("map_fenced(w, None)")
    elif c.observed or c.analysis:
        c.announce("map_fenced(w, {0})", c.address(i.operands[0], 64))


@runtime
def fence_proxy_async(w: Warp, everywhere: bool) -> None:
    for cta in w.cluster.ctas if everywhere else (w.cta,):
        cta.fence_async()
