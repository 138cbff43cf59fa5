"""Effects of issued instructions on units, memory and barriers, and events that follow later."""

from __future__ import annotations

from cycle_model.engine import layout as L
from cycle_model.engine import settings as P
from ptxemu.native.routines import p_i64, routine


@routine
def before(state: p_i64, one: int, other: int) -> int:
    heap = p_i64(state[L.HEAP_AT])
    a, b = (one * L.HEAP_WORDS, other * L.HEAP_WORDS)
    if heap[a + L.H_TIME] != heap[b + L.H_TIME]:
        return 1 if heap[a + L.H_TIME] < heap[b + L.H_TIME] else 0
    return 1 if heap[a + L.H_ORDER] < heap[b + L.H_ORDER] else 0


@routine
def swap(state: p_i64, one: int, other: int) -> None:
    heap = p_i64(state[L.HEAP_AT])
    for k in range(L.HEAP_WORDS):
        kept = heap[one * L.HEAP_WORDS + k]
        heap[one * L.HEAP_WORDS + k] = heap[other * L.HEAP_WORDS + k]
        heap[other * L.HEAP_WORDS + k] = kept


@routine
def push(state: p_i64, time: int, what: int, a: int, b: int, cause: int) -> None:
    """Add an event to the heap, in the next cycle at the earliest."""
    heap = p_i64(state[L.HEAP_AT])
    count = state[L.HEAP_COUNT]
    if count >= state[L.HEAP_SIZE]:
        state[L.STUCK] = 2
        return
    at = count * L.HEAP_WORDS
    heap[at + L.H_TIME] = max(time, state[L.NOW] + 1)
    heap[at + L.H_ORDER] = state[L.EVENT_SEQUENCE]
    heap[at + L.H_WHAT] = what
    heap[at + L.H_A] = a
    heap[at + L.H_B] = b
    heap[at + L.H_CAUSE] = cause
    state[L.EVENT_SEQUENCE] += 1
    state[L.HEAP_COUNT] = count + 1
    place = count
    while place > 0 and before(state, place, (place - 1) // 2) != 0:
        swap(state, place, (place - 1) // 2)
        place = (place - 1) // 2


@routine
def drop_first(state: p_i64) -> None:
    count = state[L.HEAP_COUNT] - 1
    state[L.HEAP_COUNT] = count
    swap(state, 0, count)
    place = 0
    going = 1
    while going != 0:
        least = place
        if 2 * place + 1 < count and before(state, 2 * place + 1, least) != 0:
            least = 2 * place + 1
        if 2 * place + 2 < count and before(state, 2 * place + 2, least) != 0:
            least = 2 * place + 2
        if least == place:
            going = 0
        else:
            swap(state, place, least)
            place = least


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
    """Complete the phase of an mbarrier if all arrivals and bytes have come."""
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
    """Complete the cluster barrier if all live warps have arrived."""
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
    """End a warp, so that no barrier waits for it."""
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


@routine
def memory_done(state: p_i64, sm: int, start: int, nbytes: int, from_hbm: int, latency: int) -> int:
    """Return the time when bytes requested at `start` have arrived.

    They pass the port of the SM and, if L2 lacks them, its share of the memory bandwidth. Rates are
    bytes in `PART` cycles.
    """
    settings = p_i64(state[L.SETTINGS_AT])
    at = max(start * L.PART, state[sm + L.L2_FREE])
    took = nbytes * L.PART * L.PART // settings[P.L2_BYTES]
    state[sm + L.L2_FREE] = at + took
    state[sm + L.L2_BUSY] += took
    done = state[sm + L.L2_FREE]
    if from_hbm != 0:
        at = max(start * L.PART, state[sm + L.HBM_FREE])
        took = nbytes * L.PART * L.PART // settings[P.HBM_BYTES]
        state[sm + L.HBM_FREE] = at + took
        state[sm + L.HBM_BUSY] += took
        done = max(done, state[sm + L.HBM_FREE])
    return done // L.PART + latency


@routine
def write_back(state: p_i64, sm: int, nbytes: int) -> None:
    """Write bytes to L2, in parallel with reads, and in the long run to memory."""
    settings = p_i64(state[L.SETTINGS_AT])
    at = max(state[L.NOW] * L.PART, state[sm + L.L2_WRITE_FREE])
    took = nbytes * L.PART * L.PART // settings[P.L2_BYTES_WRITTEN]
    state[sm + L.L2_WRITE_FREE] = at + took
    state[sm + L.L2_WRITE_BUSY] += took
    if settings[P.HBM_BYTES_WRITTEN] > 0:
        at = max(state[L.NOW] * L.PART, state[sm + L.HBM_FREE])
        took = nbytes * L.PART * L.PART // settings[P.HBM_BYTES_WRITTEN]
        state[sm + L.HBM_FREE] = at + took
        state[sm + L.HBM_BUSY] += took


@routine
def send_signals(state: p_i64, event: int, what: int, time: int, remote: int, cause: int) -> None:
    """Arrivals or bytes for each mbarrier of an event."""
    events = p_i64(state[L.EVENTS_AT])
    signals = p_i64(state[L.SIGNAL_TABLE_AT])
    first = events[event + L.SIGNALS]
    for k in range(events[event + L.SIGNAL_COUNT]):
        signal = (first + k) * L.SIGNAL_WORDS
        amount = signals[signal + L.S_COUNT]
        if what == L.BYTES:
            amount = signals[signal + L.S_BYTES]
        when = time
        if signals[signal + L.S_REMOTE] != 0:
            when += remote
        push(state, when, what, signals[signal + L.S_BARRIER], amount, cause)


@routine
def tma_load(state: p_i64, event: int, sm: int, cause: int) -> None:
    """Load tiles by TMA.

    A is rows, B all bytes, C whether they come from the memory behind L2, and 2 more if the rows
    are named one by one. D is the bytes that occupy the SM's share of L2.
    """
    settings = p_i64(state[L.SETTINGS_AT])
    events = p_i64(state[L.EVENTS_AT])
    now = state[L.NOW]
    start = max(now, state[sm + L.TMA_ISSUE_FREE])
    rows, nbytes, far = (events[event + L.A], events[event + L.B], events[event + L.C])
    issue = settings[P.TMA_ISSUE]
    if far >= L.GATHERS:
        far -= L.GATHERS
        issue = settings[P.TMA_GATHER]
    state[sm + L.TMA_ISSUE_FREE] = start + issue
    at = max(start * L.PART, state[sm + L.TMA_FREE])
    state[sm + L.TMA_FREE] = at + rows * settings[P.TMA_ROW]
    state[sm + L.TMA_BUSY] += rows * settings[P.TMA_ROW]
    latency = settings[P.TMA_LATENCY_L2]
    if far != 0:
        latency = settings[P.TMA_LATENCY_HBM]
    done = memory_done(state, sm, start, events[event + L.D], far, latency)
    done = max(done, state[sm + L.TMA_FREE] // L.PART + latency)
    # What has come is written, which takes the tensor core's turns at shared memory once there
    # was no idle time to do it in.
    writing = nbytes * L.PART * L.PART // settings[P.SMEM_BYTES]
    idle = min(state[sm + L.SMEM_IDLE], writing)
    state[sm + L.SMEM_IDLE] -= idle
    state[sm + L.SMEM_FREE] += writing - idle
    done += nbytes * settings[P.TMA_WRITE] // (128 * L.PART)
    state[L.UNIT_BEGIN] = start
    state[L.UNIT_END] = done
    send_signals(state, event, L.BYTES, done, settings[P.TMA_REMOTE], cause)


@routine
def tma_store(state: p_i64, event: int, sm: int, warp: int) -> None:
    """The copy belongs to the open group of the warp."""
    settings = p_i64(state[L.SETTINGS_AT])
    events = p_i64(state[L.EVENTS_AT])
    start = max(state[L.NOW], state[sm + L.TMA_ISSUE_FREE])
    state[sm + L.TMA_ISSUE_FREE] = start + settings[P.TMA_ISSUE]
    at = max(start * L.PART, state[sm + L.STORE_FREE])
    state[sm + L.STORE_FREE] = at + events[event + L.A] * settings[P.TMA_STORE_ROW]
    read = state[sm + L.STORE_FREE] // L.PART + settings[P.TMA_STORE_READ]
    state[warp + L.BULK_READ_OPEN] = max(state[warp + L.BULK_READ_OPEN], read)
    done = state[sm + L.STORE_FREE] // L.PART + settings[P.TMA_STORE_LATENCY]
    state[warp + L.BULK_OPEN] = max(state[warp + L.BULK_OPEN], done)
    state[L.UNIT_BEGIN] = start
    state[L.UNIT_END] = done
    write_back(state, sm, events[event + L.B])


@routine
def multiply(state: p_i64, event: int, sm: int, cause: int) -> None:
    """Issue an MMA, in order after those queued.

    A is its duration in parts of cycles. B is 1 if A is in tensor memory, 2 with a pair. C is the
    parts in which it has shared memory alone. D is the parts from the next MMA's earliest start to
    the result.
    """
    settings = p_i64(state[L.SETTINGS_AT])
    events = p_i64(state[L.EVENTS_AT])
    start = max((state[L.NOW] + settings[P.MMA_ISSUE]) * L.PART, state[sm + L.TENSOR_FREE])
    took, how = (events[event + L.A], events[event + L.B])
    if state[sm + L.TENSOR_LAST] != how:
        took += settings[P.MMA_SWITCH] * L.PART
    idle = max(start - state[sm + L.SMEM_FREE], 0)
    most = settings[P.TMA_LATENCY_L2] * L.PART  # a copy is written about so much later
    state[sm + L.SMEM_IDLE] = min(state[sm + L.SMEM_IDLE] + idle, most)
    state[sm + L.SMEM_FREE] = max(state[sm + L.SMEM_FREE], start) + events[event + L.C]
    state[sm + L.TENSOR_FREE] = max(start + took, state[sm + L.SMEM_FREE])
    state[sm + L.TENSOR_BUSY] += took
    state[sm + L.TENSOR_LAST] = how
    state[sm + L.TENSOR_TAIL] = events[event + L.D]
    state[sm + L.TENSOR_CAUSE] = cause
    state[L.UNIT_BEGIN] = start // L.PART
    state[L.UNIT_END] = state[sm + L.TENSOR_FREE] // L.PART


@routine
def wgmma(state: p_i64, event: int, warp: int, cause: int) -> None:
    """Issue a warp's quarter of a wgmma on the tensor core of its scheduler.

    A is its duration in parts of cycles. B is the cycles from the next one's start to the sums. C
    is 1 if it ends a group.
    """
    events = p_i64(state[L.EVENTS_AT])
    scheduler = L.SCHEDULER + state[warp + L.WARP_SCHEDULER] * L.SCHEDULER_WORDS
    start = max(state[L.NOW], state[scheduler + L.PIPE_FREE + L.TENSOR])
    took = events[event + L.A] // L.PART
    state[scheduler + L.PIPE_FREE + L.TENSOR] = start + took
    state[scheduler + L.WGMMA_FREE] = start + took
    state[scheduler + L.PIPE_BUSY + L.TENSOR] += took
    state[scheduler + L.PIPE_CAUSE + L.TENSOR] = cause
    state[warp + L.WG_LAST] = start + took + events[event + L.B]
    state[L.UNIT_BEGIN] = start
    state[L.UNIT_END] = start + took
    if events[event + L.C] != 0:
        close_group(state, warp, L.WG_DONE, state[warp + L.WG_COUNT], state[warp + L.WG_LAST])
        state[warp + L.WG_COUNT] += 1


@routine
def commit(state: p_i64, event: int, sm: int, cause: int) -> None:
    settings = p_i64(state[L.SETTINGS_AT])
    how = state[sm + L.TENSOR_LAST]
    latency = settings[P.COMMIT_LATENCY_SMEM_1]
    if how == 1:
        latency = settings[P.COMMIT_LATENCY_TMEM_1]
    if how == 2:
        latency = settings[P.COMMIT_LATENCY_SMEM_2]
    if how == 3:
        latency = settings[P.COMMIT_LATENCY_TMEM_2]
    free = (state[sm + L.TENSOR_FREE] + state[sm + L.TENSOR_TAIL]) // L.PART
    done = max(state[L.NOW] + settings[P.MMA_ISSUE], free) + latency
    if state[sm + L.TENSOR_FREE] // L.PART > state[L.NOW]:
        cause = max(cause, state[sm + L.TENSOR_CAUSE])
    send_signals(state, event, L.ARRIVALS, done, 0, cause)


@routine
def group_time(state: p_i64, warp: int, ring: int, count: int, allowed: int) -> int:
    """Return the time when all groups but the newest `allowed` are done; groups finish in order."""
    last = count - allowed
    if last <= 0:
        return 0
    return state[warp + ring + (last - 1 & L.GROUPS - 1)]


@routine
def close_group(state: p_i64, warp: int, ring: int, count: int, time: int) -> None:
    before = 0
    if count > 0:
        before = state[warp + ring + (count - 1 & L.GROUPS - 1)]
    state[warp + ring + (count & L.GROUPS - 1)] = max(before, time)


@routine
def global_access(state: p_i64, event: int, sm: int) -> int:
    """Return the time when loaded bytes have arrived.

    A is bytes. B is 1 if they come from the memory behind L2, 2 from L1. C is the cycles in which
    the SM looks up the lines.
    """
    settings = p_i64(state[L.SETTINGS_AT])
    events = p_i64(state[L.EVENTS_AT])
    start = max(state[L.NOW], state[sm + L.LINES_FREE])
    state[sm + L.LINES_FREE] = start + events[event + L.C]
    late = state[sm + L.LINES_FREE] - L.LINES_QUEUE
    state[sm + L.LSU_FREE] = max(state[sm + L.LSU_FREE], late)
    if events[event + L.B] == 2:
        return start + settings[P.GLOBAL_LATENCY_L1]
    latency = settings[P.GLOBAL_LATENCY_L2]
    if events[event + L.B] != 0:
        latency = settings[P.GLOBAL_LATENCY_HBM]
    return memory_done(state, sm, start, events[event + L.A], events[event + L.B], latency)


@routine
def wait(state: p_i64, event: int, number: int) -> None:
    settings = p_i64(state[L.SETTINGS_AT])
    events = p_i64(state[L.EVENTS_AT])
    signals = p_i64(state[L.SIGNAL_TABLE_AT])
    signal = events[event + L.SIGNALS] * L.SIGNAL_WORDS
    barrier, parity = (signals[signal + L.S_BARRIER], signals[signal + L.S_COUNT])
    at = L.MBARRIER + barrier * L.MB_WORDS
    warp = L.WARP + number * L.WARP_WORDS
    if state[at + L.MB_PHASE] & 1 == parity:
        block(state, number, L.ON_MBARRIER, barrier, parity)
        state[at + L.MB_WAITERS] += 1
    else:
        ready = state[L.NOW] + settings[P.MBARRIER_READY]
        state[warp + L.WARP_NEXT] = max(state[warp + L.WARP_NEXT], ready)


@routine
def initialise(state: p_i64, event: int) -> None:
    events = p_i64(state[L.EVENTS_AT])
    signals = p_i64(state[L.SIGNAL_TABLE_AT])
    for k in range(events[event + L.SIGNAL_COUNT]):
        signal = (events[event + L.SIGNALS] + k) * L.SIGNAL_WORDS
        at = L.MBARRIER + signals[signal + L.S_BARRIER] * L.MB_WORDS
        state[at + L.MB_EXPECTED] = signals[signal + L.S_COUNT]
        state[at + L.MB_PENDING] = signals[signal + L.S_COUNT]
        state[at + L.MB_PHASE] = 0
        state[at + L.MB_BYTES] = 0


@routine
def expect(state: p_i64, event: int) -> None:
    """Bytes are announced at once; the arrival comes later."""
    events = p_i64(state[L.EVENTS_AT])
    signals = p_i64(state[L.SIGNAL_TABLE_AT])
    for k in range(events[event + L.SIGNAL_COUNT]):
        signal = (events[event + L.SIGNALS] + k) * L.SIGNAL_WORDS
        at = L.MBARRIER + signals[signal + L.S_BARRIER] * L.MB_WORDS
        state[at + L.MB_BYTES] += signals[signal + L.S_BYTES]


@routine
def send(state: p_i64, event: int, sm: int, cause: int) -> None:
    """A: bytes to the shared memory of another CTA."""
    settings = p_i64(state[L.SETTINGS_AT])
    events = p_i64(state[L.EVENTS_AT])
    at = max(state[L.NOW] * L.PART, state[sm + L.DSMEM_FREE])
    state[sm + L.DSMEM_FREE] = at + events[event + L.A] * L.PART * L.PART // settings[P.DSMEM_RATE]
    when = state[sm + L.DSMEM_FREE] // L.PART + settings[P.DSMEM_LATENCY]
    send_signals(state, event, L.BYTES, when, 0, cause)


@routine
def by_mbarrier(state: p_i64, event: int, number: int, cause: int) -> None:
    """Perform an event that uses an mbarrier or signals completion to one."""
    settings = p_i64(state[L.SETTINGS_AT])
    events = p_i64(state[L.EVENTS_AT])
    warp = L.WARP + number * L.WARP_WORDS
    sm = L.SM + state[warp + L.WARP_SM] * L.SM_WORDS
    what = events[event + L.WHAT]
    arrival = state[L.NOW] + settings[P.MBARRIER_ARRIVE]
    if what == L.E_INIT:
        initialise(state, event)
    elif what == L.E_ARRIVE:
        expect(state, event)
        remote = settings[P.MBARRIER_ARRIVE_REMOTE]
        send_signals(state, event, L.ARRIVALS, arrival, remote, cause)
    elif what == L.E_WAIT:
        wait(state, event, number)
    elif what == L.E_LOAD:
        tma_load(state, event, sm, cause)
    elif what == L.E_SEND:
        send(state, event, sm, cause)
    elif what == L.E_COMMIT:
        commit(state, event, sm, cause)
    elif what == L.E_CANCEL:
        when = state[L.NOW] + settings[P.CANCEL_LATENCY]
        send_signals(state, event, L.BYTES, when, 0, cause)
    elif what == L.E_COPY_ARRIVE:
        count = state[warp + L.COPY_COUNT]
        done = max(state[warp + L.COPY_OPEN], group_time(state, warp, L.COPY_DONE, count, 0))
        when = max(done, arrival)
        send_signals(state, event, L.ARRIVALS, when, 0, cause)


@routine
def by_group(state: p_i64, event: int, warp: int) -> None:
    """Close a group of copies, or wait for groups.

    A is the number of groups that may remain. B is 0 for bulk copies, 1 for their reads, 2 for
    cp.async, 3 for wgmma.
    """
    events = p_i64(state[L.EVENTS_AT])
    what = events[event + L.WHAT]
    bulk, copies = (state[warp + L.BULK_COUNT], state[warp + L.COPY_COUNT])
    if what == L.E_BULK_COMMIT:
        close_group(state, warp, L.BULK_DONE, bulk, state[warp + L.BULK_OPEN])
        close_group(state, warp, L.BULK_READ, bulk, state[warp + L.BULK_READ_OPEN])
        state[warp + L.BULK_COUNT] = bulk + 1
        state[warp + L.BULK_OPEN] = 0
        state[warp + L.BULK_READ_OPEN] = 0
    elif what == L.E_COPY_COMMIT:
        close_group(state, warp, L.COPY_DONE, copies, state[warp + L.COPY_OPEN])
        state[warp + L.COPY_COUNT] = copies + 1
        state[warp + L.COPY_OPEN] = 0
    else:
        allowed, kind = (events[event + L.A], events[event + L.B])
        done = 0
        if kind == 0:
            done = group_time(state, warp, L.BULK_DONE, bulk, allowed)
        elif kind == 1:
            done = group_time(state, warp, L.BULK_READ, bulk, allowed)
        elif kind == 3:
            done = group_time(state, warp, L.WG_DONE, state[warp + L.WG_COUNT], allowed)
        else:
            done = group_time(state, warp, L.COPY_DONE, copies, allowed)
        state[warp + L.WARP_NEXT] = max(state[warp + L.WARP_NEXT], done)


@routine
def by_cluster(state: p_i64, number: int, arrives: int) -> None:
    """barrier.cluster.arrive, or .wait."""
    warp = L.WARP + number * L.WARP_WORDS
    cluster = state[L.CTA + state[warp + L.WARP_CTA] * L.CTA_WORDS + L.CTA_CLUSTER]
    at = L.CLUSTER + cluster * L.CLUSTER_WORDS
    if arrives != 0:
        state[warp + L.CLUSTER_PHASE] = state[at + L.CL_PHASE] + 1
        state[at + L.CL_ARRIVED] += 1
        cluster_settled(state, cluster, state[L.ISSUED])
    elif state[at + L.CL_PHASE] < state[warp + L.CLUSTER_PHASE]:
        block(state, number, L.ON_CLUSTER, cluster, 0)


@routine
def by_memory(state: p_i64, event: int, warp: int) -> int:
    """Perform loads and stores of lanes; return the data's arrival time, 0 if nothing waits for
    it."""
    settings = p_i64(state[L.SETTINGS_AT])
    events = p_i64(state[L.EVENTS_AT])
    sm = L.SM + state[warp + L.WARP_SM] * L.SM_WORDS
    what, amount = (events[event + L.WHAT], events[event + L.A])
    if what == L.E_GLOBAL_LOAD:
        return global_access(state, event, sm)
    if what == L.E_REMOTE:
        at = max(state[L.NOW] * L.PART, state[sm + L.DSMEM_FREE])
        state[sm + L.DSMEM_FREE] = at + amount * L.PART * L.PART // settings[P.DSMEM_RATE]
        return state[sm + L.DSMEM_FREE] // L.PART + settings[P.DSMEM_LOAD]
    if what == L.E_COPY:
        done = global_access(state, event, sm) + settings[P.COPY_LATENCY]
        state[warp + L.COPY_OPEN] = max(state[warp + L.COPY_OPEN], done)
    elif what == L.E_GLOBAL_STORE:
        write_back(state, sm, amount)
    elif what == L.E_SHARED:
        state[sm + L.LSU_FREE] = max(state[sm + L.LSU_FREE], state[L.NOW]) + amount
        return state[sm + L.LSU_FREE] + settings[P.SHARED_LATENCY]
    return 0


@routine
def perform(state: p_i64, event: int, number: int, cause: int) -> int:
    """Perform an event; return the time of its result, or 0 if it has none."""
    settings = p_i64(state[L.SETTINGS_AT])
    events = p_i64(state[L.EVENTS_AT])
    warp = L.WARP + number * L.WARP_WORDS
    sm = L.SM + state[warp + L.WARP_SM] * L.SM_WORDS
    what = events[event + L.WHAT]
    if what >= L.E_GLOBAL_LOAD:
        return by_memory(state, event, warp)
    if what == L.E_MMA:
        multiply(state, event, sm, cause)
    elif what == L.E_WGMMA:
        wgmma(state, event, warp, cause)
    elif what == L.E_FILL:
        start = max((state[L.NOW] + settings[P.MMA_ISSUE]) * L.PART, state[sm + L.TENSOR_FREE])
        state[sm + L.TENSOR_FREE] = start + events[event + L.A]
    elif what == L.E_STORE:
        tma_store(state, event, sm, warp)
    elif what == L.E_BULK_COMMIT or what == L.E_COPY_COMMIT or what == L.E_GROUP_WAIT:
        by_group(state, event, warp)
    elif what == L.E_BARRIER or what == L.E_BARRIER_ARRIVE:
        waits = 1 if what == L.E_BARRIER else 0
        ident, threads = (events[event + L.A], events[event + L.B])
        barrier_arrival(state, number, ident, threads, waits)
    elif what == L.E_CLUSTER_ARRIVE or what == L.E_CLUSTER_WAIT:
        by_cluster(state, number, 1 if what == L.E_CLUSTER_ARRIVE else 0)
    else:
        by_mbarrier(state, event, number, cause)
    return 0
