"""Simulation of warps on SMs, from their first instruction to the last."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from cycle_model.engine import effects, layout, run, settings
from cycle_model.engine import layout as L
from cycle_model.engine.tables import Sharing, Tables, code_of, settings_of
from ptxemu.native.library import Library, library_of
from ptxemu.native.routines import p_i64

_HEAP = 1 << 16
_LIMIT = 1 << 40  # cycles
BUSY_PARTS = [L.HBM_BUSY, L.L2_BUSY, L.L2_WRITE_BUSY, L.TMA_BUSY, L.TENSOR_BUSY]
MOVED = (L.L2_FREE, L.L2_WRITE_FREE, L.HBM_FREE)


class StuckError(ValueError):
    """Error if no warp can proceed: the model lacks something that the kernel relies on."""


@dataclass(frozen=True)
class Result:
    """Result of a simulation.

    Attributes:
        cycles: Time until the last warp is done and its writes have been sent.
        issued: Number of issued instructions.
        state: State of the engine at the end.
        log: One entry for each issued instruction, see `layout`; None if not requested.
    """

    cycles: int
    issued: int
    tables: Tables
    state: np.ndarray
    log: np.ndarray | None

    def cycles_of(self, cluster: int) -> int:
        """Return the time until a cluster's last warp is done and its pending work has finished."""
        placed = self.tables.placed
        done = [int(self.state[L.WARP + k * L.WARP_WORDS + L.DONE]) for k in range(len(placed))]
        mine = [end for end, each in zip(done, placed, strict=True) if each.cluster == cluster]
        return self.cycles - max(done) + max(mine)

    def triggered(self, cluster: int) -> int:
        """Return the time when all CTAs of a cluster have triggered dependent grids or have ended.

        The result needs a log.
        """
        assert self.log is not None
        placed, log = self.tables.placed, self.log[: self.issued]
        words = np.array([item.word == "PREEXIT" for item in self.tables.function.instructions])
        told = log[words[self.tables.path[log[:, L.L_POSITION]]]]
        ended: dict[int, int] = {}
        told_at: dict[int, int] = {}
        for number, each in enumerate(placed):
            done = int(self.state[L.WARP + number * L.WARP_WORDS + L.DONE])
            ended[each.cta] = max(ended.get(each.cta, 0), done)
        for time, number in told[:, [L.L_TIME, L.L_WARP]].tolist():
            told_at.setdefault(placed[number].cta, time)
        mine = {each.cta for each in placed if each.cluster == cluster}
        return max(told_at.get(cta, ended[cta]) for cta in mine)

    @property
    def busiest(self) -> int:
        """Cycles for which the unit is busy that is busy for longest, or the schedulers."""
        sms = int(self.state[L.SMS])
        words = self.state[L.SM : L.SM + sms * L.SM_WORDS].reshape(sms, L.SM_WORDS)
        parts = words[:, BUSY_PARTS].max() // L.PART
        issued = -(-self.issued // (sms * L.SCHEDULERS))
        return int(max(parts, words[:, L.LSU_BUSY].max(), issued))


@cache
def _library() -> Library | None:
    return library_of(effects, run, layout, settings)


def simulate(tables: Tables, sharing: Sharing, *, log: bool = False) -> Result:
    """Raises `StuckError`."""
    state = np.zeros(L.STATE_WORDS, np.int64)
    _place(state, tables)
    queue = np.zeros(_HEAP * L.HEAP_WORDS, np.int64)
    state[L.HEAP_SIZE] = _HEAP
    told = np.zeros((len(tables.path) if log else 1, L.LOG_WORDS), np.int64)
    arrays = {
        L.HEAP_AT: queue,
        L.SETTINGS_AT: settings_of(tables.gpu, sharing),
        L.CODE_AT: code_of(tables.function, tables.gpu),
        L.PATH_AT: tables.path,
        L.NUMBERS_AT: tables.numbers,
        L.EVENTS_AT: tables.events,
        L.SIGNAL_TABLE_AT: tables.signals,
        L.LOG_AT: told,
    }
    for word, array in arrays.items():
        state[word] = array.ctypes.data
    room = len(told) if log else 0
    found = _library()
    if found is not None:
        answer = found.routine(run.run)(state.ctypes.data, room, _LIMIT)
    else:
        answer = run.run(p_i64(state), room, _LIMIT)
    if answer:
        raise StuckError(_explained(state, tables, int(answer)))
    ends = L.SM + np.arange(int(state[L.SMS])) * L.SM_WORDS
    moved = max(state[ends + word].max() for word in MOVED) // L.PART
    cycles = max(int(state[L.NOW]), int(moved))
    return Result(cycles, int(state[L.ISSUED]), tables, state, told if log else None)


def _place(state: np.ndarray, tables: Tables) -> None:
    """Warps to schedulers by their index, as the GPU does it."""
    warps = tables.placed
    if len(warps) > L.MOST_WARPS:
        raise ValueError(f"{len(warps)} warps at a time; at most {L.MOST_WARPS}")
    sms = max(each.sm for each in warps) + 1
    if sms > L.MOST_SMS:
        raise ValueError(f"{sms} SMs at a time; at most {L.MOST_SMS}")
    state[L.LIVE] = state[L.WARPS_IN_ALL] = len(warps)
    state[L.SMS] = sms
    lists: list[list[int]] = [[] for _ in range(sms * L.SCHEDULERS)]
    begin = 0
    for number, (each, end) in enumerate(zip(warps, tables.ends.tolist(), strict=True)):
        warp = L.WARP + number * L.WARP_WORDS
        scheduler = each.sm * L.SCHEDULERS + each.warp.record.index % L.SCHEDULERS
        lists[scheduler].append(number)
        state[warp + L.PATH_BEGIN] = state[warp + L.POSITION] = begin
        state[warp + L.PATH_END] = end
        state[warp + L.WARP_CTA], state[warp + L.WARP_SM] = each.cta, each.sm
        state[warp + L.WARP_SCHEDULER] = scheduler
        state[warp + L.CAUSE] = -1
        cta = L.CTA + each.cta * L.CTA_WORDS
        state[cta + L.CTA_LIVE] += 1
        state[cta + L.CTA_CLUSTER] = each.cluster
        state[L.CLUSTER + each.cluster * L.CLUSTER_WORDS + L.CL_LIVE] += 1
        begin = end
    first = 0
    for number, mine in enumerate(lists):
        scheduler = L.SCHEDULER + number * L.SCHEDULER_WORDS
        state[scheduler + L.FIRST_WARP], state[scheduler + L.WARP_COUNT] = first, len(mine)
        state[L.STATE_WARP_LIST + first : L.STATE_WARP_LIST + first + len(mine)] = mine
        first += len(mine)


def _explained(state: np.ndarray, tables: Tables, answer: int) -> str:
    """Describe what each warp waits for."""
    if answer == 2:
        return f"more than {_HEAP} events at a time"
    names = {number: where for where, number in tables.barriers.items()}
    lines = []
    for number, each in enumerate(tables.placed):
        warp = L.WARP + number * L.WARP_WORDS
        if state[warp + L.DONE]:
            continue
        why, on = int(state[warp + L.BLOCKED]), int(state[warp + L.WAITS_FOR])
        at = tables.path[min(state[warp + L.POSITION], tables.ends[number] - 1)]
        address = tables.function.instructions[at].address
        what = {L.ON_MBARRIER: f"mbarrier {names.get(on)}", L.ON_BARRIER: f"barrier {on % 16}",
                L.ON_CLUSTER: "the cluster", L.RUNS: "nothing"}[why]  # fmt: skip
        lines.append(
            f"warp {each.warp.record.index} of CTA {each.cta} at {address:#x} waits for {what}"
        )
    return f"after {state[L.NOW]} cycles no warp can continue: " + "; ".join(lines[:8])
