"""The loop over cycles. Each scheduler issues one instruction per cycle, of the first of its warps
that may issue; cycles in which nothing can happen are passed over."""

from __future__ import annotations

from cycle_model.engine import layout as L
from cycle_model.engine import settings as P
from cycle_model.engine.effects import perform
from cycle_model.engine.heap import drop_first
from cycle_model.engine.sync import settle, wake, warp_left
from ptxemu.native.routines import p_i32, p_i64, routine


@routine
def happen(state: p_i64, heap: p_i64, settings: p_i64) -> None:
    """Everything that is due."""
    while state[L.HEAP_COUNT] > 0 and heap[L.H_TIME] <= state[L.NOW]:
        what, a, b, cause = heap[L.H_WHAT], heap[L.H_A], heap[L.H_B], heap[L.H_CAUSE]
        drop_first(state, heap)
        if what == L.ARRIVALS:
            state[L.MBARRIER + a * L.MB_WORDS + L.MB_PENDING] -= b
            settle(state, settings, a, cause)
        elif what == L.BYTES:
            state[L.MBARRIER + a * L.MB_WORDS + L.MB_BYTES] -= b
            settle(state, settings, a, cause)
        else:
            wake(state, a, state[L.NOW], cause)


@routine
def issue(
    state: p_i64, heap: p_i64, settings: p_i64, code: p_i64, path: p_i32, numbers: p_i32,
    events: p_i64, signals: p_i64, number: int, item: int, scheduler: int,
) -> None:  # fmt: skip
    """The next instruction of a warp."""
    warp = L.WARP + number * L.WARP_WORDS
    sm = L.SM + state[warp + L.WARP_SM] * L.SM_WORDS
    now, position = state[L.NOW], state[warp + L.POSITION]
    cause = state[L.ISSUED]
    stall = max(code[item + L.STALL], 1)
    state[warp + L.POSITION] = position + 1
    state[warp + L.WARP_NEXT] = now + stall
    state[warp + L.CAUSE] = cause
    state[warp + L.REASON] = L.IN_ORDER
    pipe = code[item + L.PIPE]
    if pipe == L.MEMORY:
        state[sm + L.LSU_FREE] = max(state[sm + L.LSU_FREE], now) + code[item + L.OCCUPANCY]
        state[sm + L.LSU_BUSY] += code[item + L.OCCUPANCY]
    elif pipe != L.NO_PIPE:
        state[scheduler + L.PIPE_FREE + pipe] = now + code[item + L.OCCUPANCY]
        state[scheduler + L.PIPE_BUSY + pipe] += code[item + L.OCCUPANCY]
        state[scheduler + L.PIPE_CAUSE + pipe] = cause
    done = now + code[item + L.LATENCY]
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
        result = perform(
            state, heap, settings, events, signals, event * L.EVENT_WORDS, number, cause
        )
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
def ready_at(state: p_i64, code: p_i64, warp: int, item: int) -> int:
    """When the scoreboards let an instruction go; remembers which one was the last."""
    waits = code[item + L.WAITS]
    time = state[warp + L.WARP_NEXT]
    for board in range(6):
        if (waits >> board) & 1 != 0 and state[warp + L.SB_TIME + board] > time:
            time = state[warp + L.SB_TIME + board]
            state[warp + L.CAUSE] = state[warp + L.SB_CAUSE + board]
            state[warp + L.REASON] = L.SCOREBOARD
    if code[item + L.KIND] == L.TMEM_STORE_WAIT:
        time = max(time, state[warp + L.LAST])
    return time


@routine
def run(
    state: p_i64, heap: p_i64, settings: p_i64, code: p_i64, path: p_i32, numbers: p_i32,
    events: p_i64, signals: p_i64, log: p_i64, room: int, last: int,
) -> int:  # fmt: skip
    """To the end of all warps: 0; 1 when nobody can go on, 2 without room, 3 after cycle `last`.
    room: of the log, instructions."""
    schedulers = state[L.SMS] * L.SCHEDULERS
    while state[L.LIVE] > 0:
        now = state[L.NOW]
        if now > last:
            return 3
        happen(state, heap, settings)
        for k in range(schedulers):
            scheduler = L.SCHEDULER + k * L.SCHEDULER_WORDS
            if state[scheduler + L.NEXT_AT] > now:
                continue
            state[scheduler + L.NEXT_AT] = L.NEVER  # whoever is woken meanwhile says when
            count = state[scheduler + L.WARP_COUNT]
            first = state[scheduler + L.FIRST_WARP]
            chosen = -1
            turn = state[scheduler + L.TURN]
            following = L.NEVER
            for j in range(count):
                slot = turn + j
                if slot >= count:
                    slot -= count
                number = state[L.STATE_WARP_LIST + first + slot]
                warp = L.WARP + number * L.WARP_WORDS
                if state[warp + L.DONE] != 0 or state[warp + L.BLOCKED] != L.RUNS:
                    continue
                if state[warp + L.WARP_NEXT] > now:
                    following = min(following, state[warp + L.WARP_NEXT])
                    continue
                position = state[warp + L.POSITION]
                if position >= state[warp + L.PATH_END]:
                    state[warp + L.DONE] = 1
                    state[L.LIVE] -= 1
                    warp_left(state, heap, settings, number)
                    continue
                if chosen >= 0:
                    following = now + 1
                    continue
                item = path[position] * L.CODE_WORDS
                ready = ready_at(state, code, warp, item)
                if ready > now:
                    state[warp + L.WARP_NEXT] = ready
                    following = min(following, ready)
                    continue
                pipe = code[item + L.PIPE]
                free = now
                if pipe == L.MEMORY:
                    free = state[L.SM + state[warp + L.WARP_SM] * L.SM_WORDS + L.LSU_FREE]
                elif pipe != L.NO_PIPE:
                    free = state[scheduler + L.PIPE_FREE + pipe]
                kind = code[item + L.KIND]
                if kind == L.TMEM_LOAD:
                    free = state[scheduler + L.TMEM_LOAD_FREE] - L.TMEM_QUEUE
                elif kind == L.TMEM_STORE:
                    free = state[scheduler + L.TMEM_STORE_FREE] - L.TMEM_QUEUE
                if free > now:
                    following = min(following, free)
                    continue
                chosen = slot
                sequence = state[L.ISSUED]
                if sequence < room:
                    at = sequence * L.LOG_WORDS
                    log[at + L.L_TIME] = now
                    log[at + L.L_WARP] = number
                    log[at + L.L_POSITION] = position
                    log[at + L.L_CAUSE] = state[warp + L.CAUSE]
                    log[at + L.L_REASON] = state[warp + L.REASON]
                    log[at + L.L_READY] = state[warp + L.WARP_NEXT]
                issue(
                    state, heap, settings, code, path, numbers, events, signals, number, item,
                    scheduler,
                )  # fmt: skip
                state[L.ISSUED] = sequence + 1
                if state[warp + L.BLOCKED] == L.RUNS:
                    following = min(following, state[warp + L.WARP_NEXT])
            if chosen >= 0:
                if settings[P.ROUND_ROBIN] != 0:
                    chosen += 1
                if chosen >= count:
                    chosen = 0
                state[scheduler + L.TURN] = chosen
            state[scheduler + L.NEXT_AT] = min(state[scheduler + L.NEXT_AT], following)
        if state[L.STUCK] != 0:
            return state[L.STUCK]
        if state[L.LIVE] > 0:
            soonest = L.NEVER
            for k in range(schedulers):
                soonest = min(soonest, state[L.SCHEDULER + k * L.SCHEDULER_WORDS + L.NEXT_AT])
            if state[L.HEAP_COUNT] > 0:
                soonest = min(soonest, heap[L.H_TIME])
            if soonest == L.NEVER:
                return 1
            state[L.NOW] = max(soonest, now + 1)
    return 0
