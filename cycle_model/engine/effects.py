"""What landmarks and accesses do when they are issued: to units, to memory, to barriers."""

from __future__ import annotations

from cycle_model.engine import layout as L
from cycle_model.engine import settings as P
from cycle_model.engine.heap import push
from cycle_model.engine.sync import barrier_arrival, block, cluster_settled
from ptxemu.native.routines import p_i64, routine


@routine
def memory_done(
    state: p_i64, settings: p_i64, sm: int, start: int, nbytes: int, from_hbm: int, latency: int
) -> int:
    """When bytes that are asked for at a time have come: through the port of the SM and, where L2
    does not have them, through its share of the memory. Rates are bytes in `PART` cycles."""
    at = max(start * L.PART, state[sm + L.L2_FREE])
    state[sm + L.L2_FREE] = at + nbytes * L.PART * L.PART // settings[P.L2_BYTES]
    done = state[sm + L.L2_FREE]
    if from_hbm != 0:
        at = max(start * L.PART, state[sm + L.HBM_FREE])
        state[sm + L.HBM_FREE] = at + nbytes * L.PART * L.PART // settings[P.HBM_BYTES]
        done = max(done, state[sm + L.HBM_FREE])
    return done // L.PART + latency


@routine
def send_signals(
    state: p_i64, heap: p_i64, settings: p_i64, signals: p_i64, event: int, events: p_i64,
    what: int, time: int, remote: int, cause: int,
) -> None:  # fmt: skip
    """Arrivals or bytes for each mbarrier of an event."""
    first = events[event + L.SIGNALS]
    for k in range(events[event + L.SIGNAL_COUNT]):
        signal = (first + k) * L.SIGNAL_WORDS
        amount = signals[signal + L.S_COUNT]
        if what == L.BYTES:
            amount = signals[signal + L.S_BYTES]
        when = time
        if signals[signal + L.S_REMOTE] != 0:
            when += remote
        push(state, heap, when, what, signals[signal + L.S_BARRIER], amount, cause)


@routine
def tma_load(
    state: p_i64, heap: p_i64, settings: p_i64, events: p_i64, signals: p_i64, event: int,
    sm: int, cause: int,
) -> None:  # fmt: skip
    """A: rows, B: bytes in all, C: whether they come from the memory behind L2."""
    now = state[L.NOW]
    start = max(now, state[sm + L.TMA_ISSUE_FREE])
    state[sm + L.TMA_ISSUE_FREE] = start + settings[P.TMA_ISSUE]
    rows, nbytes, far = events[event + L.A], events[event + L.B], events[event + L.C]
    at = max(start * L.PART, state[sm + L.TMA_FREE])
    state[sm + L.TMA_FREE] = at + rows * settings[P.TMA_ROW]
    state[sm + L.TMA_BUSY] += rows * settings[P.TMA_ROW]
    latency = settings[P.TMA_LATENCY_L2]
    if far != 0:
        latency = settings[P.TMA_LATENCY_HBM]
    done = memory_done(state, settings, sm, start, nbytes, far, latency)
    done = max(done, state[sm + L.TMA_FREE] // L.PART + latency)
    send_signals(state, heap, settings, signals, event, events, L.BYTES, done,
                 settings[P.TMA_REMOTE], cause)  # fmt: skip


@routine
def tma_store(state: p_i64, settings: p_i64, events: p_i64, event: int, sm: int, warp: int) -> None:
    """The copy belongs to the open group of the warp."""
    start = max(state[L.NOW], state[sm + L.TMA_ISSUE_FREE])
    state[sm + L.TMA_ISSUE_FREE] = start + settings[P.TMA_ISSUE]
    at = max(start * L.PART, state[sm + L.STORE_FREE])
    state[sm + L.STORE_FREE] = at + events[event + L.A] * settings[P.TMA_STORE_ROW]
    read = state[sm + L.STORE_FREE] // L.PART + settings[P.TMA_STORE_READ]
    state[warp + L.BULK_READ_OPEN] = max(state[warp + L.BULK_READ_OPEN], read)
    done = state[sm + L.STORE_FREE] // L.PART + settings[P.TMA_STORE_LATENCY]
    state[warp + L.BULK_OPEN] = max(state[warp + L.BULK_OPEN], done)


@routine
def multiply(state: p_i64, settings: p_i64, events: p_i64, event: int, sm: int, cause: int) -> None:
    """A: parts of cycles that it takes, B: 1 where A is in tensor memory, 2 with a pair. In order
    behind what the queue has."""
    start = max((state[L.NOW] + settings[P.MMA_ISSUE]) * L.PART, state[sm + L.TENSOR_FREE])
    took, how = events[event + L.A], events[event + L.B]
    if state[sm + L.TENSOR_LAST] != how:
        took += settings[P.MMA_SWITCH] * L.PART
    state[sm + L.TENSOR_FREE] = start + took
    state[sm + L.TENSOR_BUSY] += took
    state[sm + L.TENSOR_LAST] = how
    state[sm + L.TENSOR_CAUSE] = cause


@routine
def commit(
    state: p_i64, heap: p_i64, settings: p_i64, events: p_i64, signals: p_i64, event: int,
    sm: int, cause: int,
) -> None:  # fmt: skip
    how = state[sm + L.TENSOR_LAST]
    latency = settings[P.COMMIT_LATENCY_SMEM_1]
    if how == 1:
        latency = settings[P.COMMIT_LATENCY_TMEM_1]
    if how == 2:
        latency = settings[P.COMMIT_LATENCY_SMEM_2]
    if how == 3:
        latency = settings[P.COMMIT_LATENCY_TMEM_2]
    done = max(state[L.NOW] + settings[P.MMA_ISSUE], state[sm + L.TENSOR_FREE] // L.PART) + latency
    if state[sm + L.TENSOR_FREE] // L.PART > state[L.NOW]:
        cause = max(cause, state[sm + L.TENSOR_CAUSE])
    send_signals(state, heap, settings, signals, event, events, L.ARRIVALS, done, 0, cause)


@routine
def group_time(state: p_i64, warp: int, ring: int, count: int, allowed: int) -> int:
    """When all groups but the newest are done; groups are done in order."""
    last = count - allowed
    if last <= 0:
        return 0
    return state[warp + ring + ((last - 1) & (L.GROUPS - 1))]


@routine
def close_group(state: p_i64, warp: int, ring: int, count: int, time: int) -> None:
    before = 0
    if count > 0:
        before = state[warp + ring + ((count - 1) & (L.GROUPS - 1))]
    state[warp + ring + (count & (L.GROUPS - 1))] = max(before, time)


@routine
def global_access(state: p_i64, settings: p_i64, events: p_i64, event: int, sm: int) -> int:
    """A: bytes, B: whether they come from the memory behind L2. When they have come."""
    latency = settings[P.GLOBAL_LATENCY_L2]
    if events[event + L.B] != 0:
        latency = settings[P.GLOBAL_LATENCY_HBM]
    return memory_done(
        state, settings, sm, state[L.NOW], events[event + L.A], events[event + L.B], latency
    )


@routine
def wait(state: p_i64, settings: p_i64, signals: p_i64, events: p_i64, event: int,
         number: int) -> None:  # fmt: skip
    signal = events[event + L.SIGNALS] * L.SIGNAL_WORDS
    barrier, parity = signals[signal + L.S_BARRIER], signals[signal + L.S_COUNT]
    at = L.MBARRIER + barrier * L.MB_WORDS
    warp = L.WARP + number * L.WARP_WORDS
    if state[at + L.MB_PHASE] & 1 == parity:
        block(state, number, L.ON_MBARRIER, barrier, parity)
        state[at + L.MB_WAITERS] += 1
    else:
        ready = state[L.NOW] + settings[P.MBARRIER_READY]
        state[warp + L.WARP_NEXT] = max(state[warp + L.WARP_NEXT], ready)


@routine
def perform(
    state: p_i64, heap: p_i64, settings: p_i64, events: p_i64, signals: p_i64, event: int,
    number: int, cause: int,
) -> int:  # fmt: skip
    """What an event does; when its result is there, or 0 where it has none of its own."""
    warp = L.WARP + number * L.WARP_WORDS
    sm = L.SM + state[warp + L.WARP_SM] * L.SM_WORDS
    what = events[event + L.WHAT]
    now = state[L.NOW]
    if what == L.E_INIT:
        for k in range(events[event + L.SIGNAL_COUNT]):
            signal = (events[event + L.SIGNALS] + k) * L.SIGNAL_WORDS
            at = L.MBARRIER + signals[signal + L.S_BARRIER] * L.MB_WORDS
            state[at + L.MB_EXPECTED] = signals[signal + L.S_COUNT]
            state[at + L.MB_PENDING] = signals[signal + L.S_COUNT]
            state[at + L.MB_PHASE] = 0
            state[at + L.MB_BYTES] = 0
    elif what == L.E_ARRIVE:
        for k in range(events[event + L.SIGNAL_COUNT]):
            signal = (events[event + L.SIGNALS] + k) * L.SIGNAL_WORDS
            state[L.MBARRIER + signals[signal + L.S_BARRIER] * L.MB_WORDS + L.MB_BYTES] += signals[
                signal + L.S_BYTES
            ]
        when = now + settings[P.MBARRIER_ARRIVE]
        send_signals(state, heap, settings, signals, event, events, L.ARRIVALS, when,
                     settings[P.MBARRIER_ARRIVE_REMOTE], cause)  # fmt: skip
    elif what == L.E_WAIT:
        wait(state, settings, signals, events, event, number)
    elif what == L.E_LOAD:
        tma_load(state, heap, settings, events, signals, event, sm, cause)
    elif what == L.E_STORE:
        tma_store(state, settings, events, event, sm, warp)
    elif what == L.E_SEND:
        at = max(now * L.PART, state[sm + L.DSMEM_FREE])
        state[sm + L.DSMEM_FREE] = (
            at + events[event + L.A] * L.PART * L.PART // settings[P.DSMEM_RATE]
        )
        when = state[sm + L.DSMEM_FREE] // L.PART + settings[P.DSMEM_LATENCY]
        send_signals(state, heap, settings, signals, event, events, L.BYTES, when, 0, cause)
    elif what == L.E_MMA:
        multiply(state, settings, events, event, sm, cause)
    elif what == L.E_COMMIT:
        commit(state, heap, settings, events, signals, event, sm, cause)
    elif what == L.E_FILL:
        start = max((now + settings[P.MMA_ISSUE]) * L.PART, state[sm + L.TENSOR_FREE])
        state[sm + L.TENSOR_FREE] = start + events[event + L.A]
    elif what == L.E_BULK_COMMIT:
        count = state[warp + L.BULK_COUNT]
        close_group(state, warp, L.BULK_DONE, count, state[warp + L.BULK_OPEN])
        close_group(state, warp, L.BULK_READ, count, state[warp + L.BULK_READ_OPEN])
        state[warp + L.BULK_COUNT] = count + 1
        state[warp + L.BULK_OPEN] = 0
        state[warp + L.BULK_READ_OPEN] = 0
    elif what == L.E_COPY_COMMIT:
        close_group(state, warp, L.COPY_DONE, state[warp + L.COPY_COUNT], state[warp + L.COPY_OPEN])
        state[warp + L.COPY_COUNT] += 1
        state[warp + L.COPY_OPEN] = 0
    elif what == L.E_GROUP_WAIT:
        done = 0
        if events[event + L.B] == 0:
            done = group_time(
                state, warp, L.BULK_DONE, state[warp + L.BULK_COUNT], events[event + L.A]
            )
        elif events[event + L.B] == 1:
            done = group_time(
                state, warp, L.BULK_READ, state[warp + L.BULK_COUNT], events[event + L.A]
            )
        else:
            done = group_time(
                state, warp, L.COPY_DONE, state[warp + L.COPY_COUNT], events[event + L.A]
            )
        state[warp + L.WARP_NEXT] = max(state[warp + L.WARP_NEXT], done)
    elif what == L.E_COPY:
        done = global_access(state, settings, events, event, sm) + settings[P.COPY_LATENCY]
        state[warp + L.COPY_OPEN] = max(state[warp + L.COPY_OPEN], done)
    elif what == L.E_COPY_ARRIVE:
        count = state[warp + L.COPY_COUNT]
        done = max(state[warp + L.COPY_OPEN], group_time(state, warp, L.COPY_DONE, count, 0))
        when = max(done, now + settings[P.MBARRIER_ARRIVE])
        send_signals(state, heap, settings, signals, event, events, L.ARRIVALS, when, 0, cause)
    elif what == L.E_BARRIER or what == L.E_BARRIER_ARRIVE:
        waits = 1 if what == L.E_BARRIER else 0
        barrier_arrival(
            state, heap, settings, number, events[event + L.A], events[event + L.B], waits
        )
    elif what == L.E_CLUSTER_ARRIVE:
        cluster = state[L.CTA + state[warp + L.WARP_CTA] * L.CTA_WORDS + L.CTA_CLUSTER]
        at = L.CLUSTER + cluster * L.CLUSTER_WORDS
        state[warp + L.CLUSTER_PHASE] = state[at + L.CL_PHASE] + 1
        state[at + L.CL_ARRIVED] += 1
        cluster_settled(state, heap, settings, cluster, cause)
    elif what == L.E_CLUSTER_WAIT:
        cluster = state[L.CTA + state[warp + L.WARP_CTA] * L.CTA_WORDS + L.CTA_CLUSTER]
        if (
            state[L.CLUSTER + cluster * L.CLUSTER_WORDS + L.CL_PHASE]
            < state[warp + L.CLUSTER_PHASE]
        ):
            block(state, number, L.ON_CLUSTER, cluster, 0)
    elif what == L.E_CANCEL:
        when = now + settings[P.CANCEL_LATENCY]
        send_signals(state, heap, settings, signals, event, events, L.BYTES, when, 0, cause)
    elif what == L.E_GLOBAL_LOAD:
        return global_access(state, settings, events, event, sm)
    elif what == L.E_GLOBAL_STORE:
        at = max(now * L.PART, state[sm + L.L2_FREE])
        state[sm + L.L2_FREE] = at + events[event + L.A] * L.PART * L.PART // settings[P.L2_BYTES]
    elif what == L.E_SHARED:
        passes = events[event + L.A]
        state[sm + L.LSU_FREE] = max(state[sm + L.LSU_FREE], now) + passes
        return state[sm + L.LSU_FREE] + settings[P.SHARED_LATENCY]
    return 0
