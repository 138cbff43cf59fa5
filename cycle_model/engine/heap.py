"""What happens later, the earliest first; of the same time what was put there first."""

from __future__ import annotations

from cycle_model.engine import layout as L
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
    """Not before the next cycle."""
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
