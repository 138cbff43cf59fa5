"""Barriers of all kinds: who completes them, and who is woken."""

from __future__ import annotations

from cycle_model.engine import layout as L
from cycle_model.engine import settings as P
from cycle_model.engine.heap import push
from ptxemu.native.routines import p_i64, routine


@routine
def wake(state: p_i64, number: int, time: int, cause: int) -> None:
    """A blocked warp may go on at a time."""
    warp = L.WARP + number * L.WARP_WORDS
    state[warp + L.BLOCKED] = L.RUNS
    state[warp + L.WARP_NEXT] = max(time, state[L.NOW])
    state[warp + L.CAUSE] = cause
    state[warp + L.REASON] = L.WOKEN
    scheduler = L.SCHEDULER + state[warp + L.WARP_SCHEDULER] * L.SCHEDULER_WORDS
    state[scheduler + L.NEXT_AT] = min(state[scheduler + L.NEXT_AT], state[warp + L.WARP_NEXT])


@routine
def block(state: p_i64, number: int, why: int, on: int, parity: int) -> None:
    warp = L.WARP + number * L.WARP_WORDS
    state[warp + L.BLOCKED] = why
    state[warp + L.WAITS_FOR] = on
    state[warp + L.WAIT_PARITY] = parity
    state[warp + L.BEGAN] = state[L.NOW]


@routine
def settle(state: p_i64, barrier: int, cause: int) -> None:
    """An mbarrier whose phase may be complete."""
    settings = p_i64(state[L.SETTINGS_AT])
    at = L.MBARRIER + barrier * L.MB_WORDS
    if (
        state[at + L.MB_PENDING] > 0
        or state[at + L.MB_BYTES] != 0
        or state[at + L.MB_EXPECTED] == 0
    ):
        return
    state[at + L.MB_PHASE] += 1
    state[at + L.MB_PENDING] = state[at + L.MB_EXPECTED]
    state[at + L.MB_CAUSE] = cause
    if state[at + L.MB_WAITERS] == 0:
        return
    for number in range(state[L.WARPS_IN_ALL]):
        warp = L.WARP + number * L.WARP_WORDS
        if state[warp + L.BLOCKED] == L.ON_MBARRIER and state[warp + L.WAITS_FOR] == barrier:
            if state[at + L.MB_PHASE] & 1 != state[warp + L.WAIT_PARITY]:
                state[at + L.MB_WAITERS] -= 1
                wake(state, number, state[L.NOW] + settings[P.MBARRIER_WAKE], cause)


@routine
def barrier_arrival(state: p_i64, number: int, ident: int, threads: int, waits: int) -> None:
    """bar.sync or bar.arrive of a warp."""
    settings = p_i64(state[L.SETTINGS_AT])
    warp = L.WARP + number * L.WARP_WORDS
    cta = state[warp + L.WARP_CTA]
    at = L.CTA + cta * L.CTA_WORDS + 2 * ident
    state[at + L.NB_ARRIVED] += 32
    expected = threads
    if expected == 0:
        expected = 32 * state[L.CTA + cta * L.CTA_WORDS + L.CTA_LIVE]
    key = cta * L.BARRIERS + ident
    if state[at + L.NB_ARRIVED] < expected:
        if waits != 0:
            state[at + L.NB_WAITING] += 1
            block(state, number, L.ON_BARRIER, key, 0)
        return
    state[at + L.NB_ARRIVED] = 0
    state[at + L.NB_WAITING] = 0
    after = (
        state[L.NOW] + settings[P.NAMED_BARRIER] + settings[P.NAMED_BARRIER_WARP] * (expected >> 5)
    )
    for other in range(state[L.WARPS_IN_ALL]):
        their = L.WARP + other * L.WARP_WORDS
        if state[their + L.BLOCKED] == L.ON_BARRIER and state[their + L.WAITS_FOR] == key:
            wake(state, other, after, state[L.ISSUED])
    if waits != 0:
        state[warp + L.WARP_NEXT] = max(state[warp + L.WARP_NEXT], after)


@routine
def cluster_settled(state: p_i64, cluster: int, cause: int) -> None:
    """All live warps of a cluster may have arrived."""
    settings = p_i64(state[L.SETTINGS_AT])
    at = L.CLUSTER + cluster * L.CLUSTER_WORDS
    if state[at + L.CL_ARRIVED] < state[at + L.CL_LIVE] or state[at + L.CL_ARRIVED] == 0:
        return
    state[at + L.CL_ARRIVED] = 0
    state[at + L.CL_PHASE] += 1
    for number in range(state[L.WARPS_IN_ALL]):
        warp = L.WARP + number * L.WARP_WORDS
        if state[warp + L.BLOCKED] == L.ON_CLUSTER and state[warp + L.WAITS_FOR] == cluster:
            when = state[L.NOW] + settings[P.CLUSTER_BARRIER]
            push(state, when, L.WAKE, number, 0, cause)


@routine
def warp_left(state: p_i64, number: int) -> None:
    """A warp is done: nobody waits for it any more."""
    settings = p_i64(state[L.SETTINGS_AT])
    cta = L.CTA + state[L.WARP + number * L.WARP_WORDS + L.WARP_CTA] * L.CTA_WORDS
    state[cta + L.CTA_LIVE] -= 1
    cluster = state[cta + L.CTA_CLUSTER]
    state[L.CLUSTER + cluster * L.CLUSTER_WORDS + L.CL_LIVE] -= 1
    cluster_settled(state, cluster, state[L.ISSUED])
    for ident in range(L.BARRIERS):
        at = cta + 2 * ident
        arrived, waiting = (state[at + L.NB_ARRIVED], state[at + L.NB_WAITING])
        if waiting > 0 and ident == 0 and (arrived >= 32 * state[cta + L.CTA_LIVE]):
            state[at + L.NB_ARRIVED] = 0
            state[at + L.NB_WAITING] = 0
            key = state[L.WARP + number * L.WARP_WORDS + L.WARP_CTA] * L.BARRIERS + ident
            for other in range(state[L.WARPS_IN_ALL]):
                their = L.WARP + other * L.WARP_WORDS
                if state[their + L.BLOCKED] == L.ON_BARRIER and state[their + L.WAITS_FOR] == key:
                    wake(state, other, state[L.NOW] + settings[P.NAMED_BARRIER], state[L.ISSUED])
