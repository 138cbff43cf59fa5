"""The loop over cycles. Each scheduler issues one instruction per cycle: of the warp that issued
last as long as it may, else of the youngest that may, as measured on an H200
(notes/cycle_model.md, 2026-11-24). Cycles in which nothing can happen are passed over."""

from __future__ import annotations

from cycle_model.engine import layout as L
from cycle_model.engine import settings as P
from cycle_model.engine.effects import drop_first, perform, settle, wake, warp_left
from ptxemu.native.routines import p_i32, p_i64, routine


@routine
def happen(state: p_i64) -> None:
    """Everything that is due."""
    heap = p_i64(state[L.HEAP_AT])
    while state[L.HEAP_COUNT] > 0 and heap[L.H_TIME] <= state[L.NOW]:
        what, a, b, cause = (heap[L.H_WHAT], heap[L.H_A], heap[L.H_B], heap[L.H_CAUSE])
        drop_first(state)
        if what == L.ARRIVALS:
            state[L.MBARRIER + a * L.MB_WORDS + L.MB_PENDING] -= b
            settle(state, a, cause)
        elif what == L.BYTES:
            state[L.MBARRIER + a * L.MB_WORDS + L.MB_BYTES] -= b
            settle(state, a, cause)
        else:
            wake(state, a, state[L.NOW], cause)


LINE = 8  # instructions of 16 bytes


@routine
def first_touches(state: p_i64, warp: int, item: int) -> int:
    """Cycles that an instruction waits for itself, where a jump has led to a line of code that the
    SM has not had, and for its parameters."""
    settings = p_i64(state[L.SETTINGS_AT])
    code = p_i64(state[L.CODE_AT])
    path = p_i32(state[L.PATH_AT])
    position = state[warp + L.POSITION]
    number = path[position]
    seen = L.SEEN + state[warp + L.WARP_SM] * L.SEEN_WORDS
    line = seen + min(number // LINE, L.CODE_LINES - 1)
    if state[line] == 0:
        state[line] = state[L.NOW]
        if position > state[warp + L.PATH_BEGIN] and number != path[position - 1] + 1:
            state[line] = state[L.NOW] + settings[P.BRANCH_COLD]
    ready = state[line]
    if code[item + L.SECTOR] > 0:
        sector = seen + L.CODE_LINES + code[item + L.SECTOR] - 1
        if state[sector] == 0:
            sm = L.SM + state[warp + L.WARP_SM] * L.SM_WORDS
            begin = max(state[sm + L.PARAMETERS_FREE], state[L.NOW])
            state[sm + L.PARAMETERS_FREE] = begin + settings[P.PARAMETER_SECTOR]
            state[sector] = state[sm + L.PARAMETERS_FREE]
        ready = max(ready, state[sector])
    return max(ready - state[L.NOW], 0)


@routine
def hindered(state: p_i64, scheduler: int, pipe: int, start: int) -> int:
    """Return the extra cycles for which concurrent wgmma makes an instruction occupy a pipe."""
    if pipe >= L.UNIFORM or state[scheduler + L.WGMMA_FREE] <= start:
        return 0
    settings = p_i64(state[L.SETTINGS_AT])
    return settings[P.SPECIAL_BESIDE_WGMMA if pipe == L.SPECIAL else P.BESIDE_WGMMA]


@routine
def issue(state: p_i64, number: int, item: int, scheduler: int) -> None:
    """The next instruction of a warp."""
    settings = p_i64(state[L.SETTINGS_AT])
    code = p_i64(state[L.CODE_AT])
    path = p_i32(state[L.PATH_AT])
    numbers = p_i32(state[L.NUMBERS_AT])
    warp = L.WARP + number * L.WARP_WORDS
    sm = L.SM + state[warp + L.WARP_SM] * L.SM_WORDS
    now, position = (state[L.NOW], state[warp + L.POSITION])
    cause = state[L.ISSUED]
    stall = max(code[item + L.STALL], 1)
    state[warp + L.POSITION] = position + 1
    state[warp + L.WARP_NEXT] = now + stall
    state[warp + L.CAUSE] = cause
    state[warp + L.REASON] = L.IN_ORDER
    pipe = code[item + L.PIPE]
    start = now
    if pipe == L.MEMORY:
        state[sm + L.LSU_FREE] = max(state[sm + L.LSU_FREE], now) + code[item + L.OCCUPANCY]
        state[sm + L.LSU_BUSY] += code[item + L.OCCUPANCY]
    elif pipe != L.NO_PIPE:
        start = max(now, state[scheduler + L.PIPE_FREE + pipe])
        longer = hindered(state, scheduler, pipe, start)
        state[scheduler + L.PIPE_FREE + pipe] = start + code[item + L.OCCUPANCY] + longer
        state[scheduler + L.PIPE_BUSY + pipe] += code[item + L.OCCUPANCY]
        state[scheduler + L.PIPE_CAUSE + pipe] = cause
    done = start + code[item + L.LATENCY]
    read = now + settings[P.OPERANDS_READ]
    kind = code[item + L.KIND]
    if kind == L.TMEM_LOAD:
        at = max(now, state[scheduler + L.TMEM_LOAD_FREE])
        at += code[item + L.REGISTERS] * L.PART // settings[P.TMEM_LOAD_RATE]
        state[scheduler + L.TMEM_LOAD_FREE] = at
        done = at + settings[P.TMEM_LOAD_LATENCY]
    elif kind == L.TMEM_STORE:
        at = max(now, state[scheduler + L.TMEM_STORE_FREE])
        at += code[item + L.REGISTERS] * L.PART // settings[P.TMEM_STORE_RATE]
        state[scheduler + L.TMEM_STORE_FREE] = at
        done = at + settings[P.TMEM_STORE_LATENCY]
        read = at
        state[warp + L.LAST] = max(state[warp + L.LAST], done)
    event = numbers[position]
    if event >= 0:
        result = perform(state, event * L.EVENT_WORDS, number, cause)
        if result > 0:
            done = result
    if position + 1 < state[warp + L.PATH_END] and path[position + 1] != path[position] + 1:
        state[warp + L.WARP_NEXT] = max(
            state[warp + L.WARP_NEXT], now + stall + settings[P.BRANCH_COST]
        )
    board = code[item + L.WRITES]
    if board < 6 and done > state[warp + L.SB_TIME + board]:
        state[warp + L.SB_TIME + board] = done
        state[warp + L.SB_CAUSE + board] = cause
    board = code[item + L.READS]
    if board < 6 and read > state[warp + L.SB_TIME + board]:
        state[warp + L.SB_TIME + board] = read
        state[warp + L.SB_CAUSE + board] = cause


@routine
def ready_at(state: p_i64, warp: int, item: int) -> int:
    """Return the time when the scoreboards release an instruction; record the last cause."""
    code = p_i64(state[L.CODE_AT])
    waits = code[item + L.WAITS]
    time = state[warp + L.WARP_NEXT]
    for board in range(6):
        if waits >> board & 1 != 0 and state[warp + L.SB_TIME + board] > time:
            time = state[warp + L.SB_TIME + board]
            state[warp + L.CAUSE] = state[warp + L.SB_CAUSE + board]
            state[warp + L.REASON] = L.SCOREBOARD
    if code[item + L.KIND] == L.TMEM_STORE_WAIT:
        time = max(time, state[warp + L.LAST])
    if code[item + L.KIND] == L.GRID_WAIT:
        time = max(time, p_i64(state[L.SETTINGS_AT])[P.GRID_RELEASE])
    return time


@routine
def free_at(state: p_i64, warp: int, item: int, scheduler: int) -> int:
    """Return the time when the pipe of an instruction is free."""
    settings = p_i64(state[L.SETTINGS_AT])
    code = p_i64(state[L.CODE_AT])
    pipe, kind = (code[item + L.PIPE], code[item + L.KIND])
    if kind == L.TMEM_LOAD:
        return state[scheduler + L.TMEM_LOAD_FREE] - L.TMEM_QUEUE
    if kind == L.TMEM_STORE:
        return state[scheduler + L.TMEM_STORE_FREE] - L.TMEM_QUEUE
    if pipe == L.MEMORY:
        return state[L.SM + state[warp + L.WARP_SM] * L.SM_WORDS + L.LSU_FREE]
    if pipe == L.SPECIAL:
        return state[scheduler + L.PIPE_FREE + pipe] - settings[P.SPECIAL_QUEUE]
    if pipe != L.NO_PIPE:
        return state[scheduler + L.PIPE_FREE + pipe]
    return 0


@routine
def in_turn(last: int, yields: int, j: int, count: int) -> int:
    """The slot that is asked as number `j`: the one that issued last, then the youngest before the
    older ones; where its instruction yields, it is asked at the end."""
    if yields == 0 and j == 0:
        return last
    if yields != 0 and j == count - 1:
        return last
    slot = count - j - yields
    if slot <= last:
        slot -= 1
    return slot


@routine
def choose(state: p_i64, scheduler: int) -> int:
    """Return the slot of the first warp, in round-robin order, that may issue now; -1 if none.

    If none may, the earliest time when one may be able to is stored.
    """
    path = p_i32(state[L.PATH_AT])
    now, count = (state[L.NOW], state[scheduler + L.WARP_COUNT])
    following, chosen = (L.NEVER, -1)
    for j in range(count):
        slot = in_turn(state[scheduler + L.TURN], state[scheduler + L.YIELDED], j, count)
        number = state[L.STATE_WARP_LIST + state[scheduler + L.FIRST_WARP] + slot]
        warp = L.WARP + number * L.WARP_WORDS
        if state[warp + L.DONE] != 0 or state[warp + L.BLOCKED] != L.RUNS:
            continue
        when = state[warp + L.WARP_NEXT]
        if when <= now and state[warp + L.POSITION] >= state[warp + L.PATH_END]:
            for board in range(6):  # it is there until all that it has asked for has come
                when = max(when, state[warp + L.SB_TIME + board])
            state[warp + L.WARP_NEXT] = when
        if when <= now and state[warp + L.POSITION] >= state[warp + L.PATH_END]:
            state[warp + L.DONE] = max(state[L.NOW], 1)
            state[L.LIVE] -= 1
            warp_left(state, number)
            continue
        if when <= now and chosen >= 0:
            following = now + 1
            continue
        if when <= now:
            item = path[state[warp + L.POSITION]] * L.CODE_WORDS
            when = ready_at(state, warp, item)
            state[warp + L.WARP_NEXT] = when
            if when <= now:
                when = free_at(state, warp, item, scheduler)
            if when <= now:
                when = now + first_touches(state, warp, item)
                state[warp + L.WARP_NEXT] = when
            if when <= now:
                chosen = slot
                continue
        following = min(following, when)
    state[scheduler + L.NEXT_AT] = min(state[scheduler + L.NEXT_AT], following)
    return chosen


@routine
def note(state: p_i64, room: int, number: int) -> None:
    """An issue in the log, if it has room."""
    log = p_i64(state[L.LOG_AT])
    if state[L.ISSUED] < room:
        warp = L.WARP + number * L.WARP_WORDS
        at = state[L.ISSUED] * L.LOG_WORDS
        log[at + L.L_TIME] = state[L.NOW]
        log[at + L.L_WARP] = number
        log[at + L.L_POSITION] = state[warp + L.POSITION]
        log[at + L.L_CAUSE] = state[warp + L.CAUSE]
        log[at + L.L_REASON] = state[warp + L.REASON]
        log[at + L.L_READY] = state[warp + L.WARP_NEXT]
        state[L.UNIT_END] = 0


@routine
def soonest(state: p_i64) -> int:
    """Return the time of the next event."""
    heap = p_i64(state[L.HEAP_AT])
    time = L.NEVER
    for k in range(state[L.SMS] * L.SCHEDULERS):
        time = min(time, state[L.SCHEDULER + k * L.SCHEDULER_WORDS + L.NEXT_AT])
    if state[L.HEAP_COUNT] > 0:
        time = min(time, heap[L.H_TIME])
    return time


@routine
def run(state: p_i64, room: int, last: int) -> int:
    """Simulate until all warps have ended.

    Args:
        room: Number of instructions that fit into the log.
        last: Last cycle.

    Returns:
        0 at the end, 1 if no warp can proceed, 2 without room, 3 after cycle `last`.
    """
    code = p_i64(state[L.CODE_AT])
    path = p_i32(state[L.PATH_AT])
    while state[L.LIVE] > 0 and state[L.STUCK] == 0:
        if state[L.NOW] > last:
            return 3
        happen(state)
        for k in range(state[L.SMS] * L.SCHEDULERS):
            scheduler = L.SCHEDULER + k * L.SCHEDULER_WORDS
            if state[scheduler + L.NEXT_AT] > state[L.NOW]:
                continue
            state[scheduler + L.NEXT_AT] = L.NEVER  # a warp woken meanwhile sets it
            slot = choose(state, scheduler)
            if slot < 0:
                continue
            number = state[L.STATE_WARP_LIST + state[scheduler + L.FIRST_WARP] + slot]
            warp = L.WARP + number * L.WARP_WORDS
            item = path[state[warp + L.POSITION]] * L.CODE_WORDS
            note(state, room, number)
            issue(state, number, item, scheduler)
            if state[L.ISSUED] < room and state[L.UNIT_END] > 0:
                log = p_i64(state[L.LOG_AT])
                log[state[L.ISSUED] * L.LOG_WORDS + L.L_BEGIN] = state[L.UNIT_BEGIN]
                log[state[L.ISSUED] * L.LOG_WORDS + L.L_END] = state[L.UNIT_END]
            state[L.ISSUED] += 1
            if state[warp + L.BLOCKED] == L.RUNS:
                when = state[warp + L.WARP_NEXT]
                state[scheduler + L.NEXT_AT] = min(state[scheduler + L.NEXT_AT], when)
            state[scheduler + L.TURN] = slot
            state[scheduler + L.YIELDED] = code[item + L.YIELDS]
        time = soonest(state)
        if state[L.LIVE] > 0 and time == L.NEVER:
            return 1
        state[L.NOW] = max(time, state[L.NOW] + 1) if state[L.LIVE] > 0 else state[L.NOW]
    return state[L.STUCK]
