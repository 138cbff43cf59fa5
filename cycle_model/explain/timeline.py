"""A simulation as a timeline: when each warp runs, what it waits for, what the units do for it."""

from __future__ import annotations

import numpy as np

from cycle_model.engine import layout as L
from cycle_model.explain.spent import Spent
from ptxemu.trace import Trace

TIME_UNIT = "modelled cycles"
_LEAST = 16  # cycles of a wait that is shown
_WAITS = {L.E_WAIT: "mbarrier", L.E_BARRIER: "barrier", L.E_CLUSTER_WAIT: "cluster"}
_WAITS |= {L.E_GROUP_WAIT: "copies"}
_UNITS = {
    L.E_LOAD: ("TMA loads", "load", "tma"),
    L.E_STORE: ("TMA stores", "store", "tma"),
    L.E_MMA: ("tensor core", "MMA", "mma"),
    L.E_WGMMA: ("tensor core", "wgmma", "mma"),
}


def timeline(spent: Spent) -> Trace:
    """Spans by CTA, of its warps and of the units that work for them."""
    tables = spent.result.tables
    trace = Trace(time=TIME_UNIT)
    names = {number: where for where, number in tables.barriers.items()}
    log, after = spent.log, spent.after
    for number, placed in enumerate(tables.placed):
        own = np.flatnonzero(log[:, L.L_WARP] == number)
        agent, began = f"warp {placed.warp.record.index}", None
        for at in own.tolist():
            time, end = int(log[at, L.L_TIME]), int(after[at])
            began = time if began is None else began
            event = tables.numbers[log[at, L.L_POSITION]]
            what = int(tables.events[event, L.WHAT]) if event >= 0 else -1
            if what in _UNITS:
                unit, name, category = _UNITS[what]
                of, to = int(log[at, L.L_BEGIN]), int(log[at, L.L_END])
                trace.span(placed.cta, unit, name, of, to, category, warp=agent)
            if what not in _WAITS or end - time < _LEAST:
                continue
            trace.span(placed.cta, agent, "run", began, time, "compute")
            name = _WAITS[what]
            if what == L.E_WAIT:
                barrier = tables.signals[tables.events[event, L.SIGNALS], L.S_BARRIER]
                name = spent.barrier(names[int(barrier)][1][1])
            trace.span(placed.cta, agent, f"wait {name}", time, end, "wait")
            began = None
        if began is not None:
            trace.span(placed.cta, agent, "run", began, int(after[own[-1]]), "compute")
    return trace
