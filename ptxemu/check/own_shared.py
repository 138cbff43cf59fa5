"""Quick checks of a warp's accesses to the shared memory of its own CTA.

Most of them are ordered and read defined data. Everything that such a check needs is looked up once
for each warp. A check returns False, with nothing recorded, if the access needs a closer look.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ptxemu.check import frame
from ptxemu.check.agents import WarpClock
from ptxemu.check.clocks import COMPONENT_SHIFT, LANE_SHIFT, STEP_SHIFT
from ptxemu.check.footprints import byte_cells
from ptxemu.check.shadow import Shadow
from ptxemu.check.state import States
from ptxemu.check.taint import RegisterFlow
from ptxemu.machine.state import Warp
from ptxemu.native.shadow import DEFINED, DONE_NEW, PLANE, UNWRITTEN, WRITES


class Checks(NamedTuple):
    """Checks of one warp.

    lanes: of an access by lanes, which a primitive does then; see `Warp.told`.
    one: of an access by all lanes to one place: its offset, its bytes, whether it is a write.
    """

    lanes: Callable[[Warp, np.ndarray, int, int, bool], bool]
    one: Callable[[int, int, bool], bool]


# whether an access is simple, by whether it is a write; what is noted of one that is in order
Gates = tuple[Callable[[bool], bool], Callable[[int, bool], bool]]


def checks_of(states: States, w: Warp, flow: RegisterFlow) -> Checks | None:
    """Return the checks of a warp; None without machine code."""
    state, clock, routines = states.ctas[w.cta], states.clocks[w], frame.routines()
    if routines is None:
        return None
    shadow, codes, registers = state.shared, state.shared_codes, flow.registers
    readers = shadow.readers

    def simple(write: bool) -> bool:
        """Whether only unwritten memory may be undefined."""
        stored = codes.stored is not None or shadow.below is not None
        return not (w.how or stored or (write and registers.stored is not None))

    def done(mask: int, write: bool) -> bool:
        clock.touched |= mask
        if write:
            registers.landed = True
            clock.stored |= mask
        else:
            readers[clock.own] = None
        return True

    gates, grain = (simple, done), states.grain
    return Checks(
        _lanes(clock, shadow, grain, gates, routines), _one(clock, shadow, grain, gates, flow)
    )


def _lanes(
    clock: WarpClock, shadow: Shadow, grain: int, gates: Gates, routines: frame.Routines
) -> Callable[[Warp, np.ndarray, int, int, bool], bool]:
    """Return the check of an access by lanes."""
    simple, done = gates
    visit_lanes, memory, component = routines.visit_lanes, shadow.at, clock.own << COMPONENT_SHIFT
    addresses = frame.ADDRESSES
    table = frame.words(clock.cta.smem_size, grain.bit_length() - 1, *frame.LANE_PLACES)

    def check(w: Warp, starts: np.ndarray, mb: int, nbytes: int, write: bool) -> bool:
        if not simple(write):
            return False
        addresses[:] = starts
        kind, stamp = WRITES if write else DEFINED, component | clock.now << STEP_SHIFT | w.at
        access = memory, clock.at("shared"), kind, stamp, mb, nbytes, table[1]
        answer = visit_lanes(*access)
        while answer == PLANE:
            shadow.add_plane()
            answer = visit_lanes(*access)
        return answer <= DONE_NEW and done(w.frag.mask, write)

    return check


def _one(
    clock: WarpClock, shadow: Shadow, grain: int, gates: Gates, flow: RegisterFlow
) -> Callable[[int, int, bool], bool]:
    """Return the check of an access to one place."""
    w, routines, (simple, done) = clock.warp, frame.routines(), gates
    assert routines is not None, "there is machine code"
    visit, memory, component = routines.visit, shadow.at, clock.own << COMPONENT_SHIFT
    code_of = clock.components.lane_sets.code

    def check(start: int, nbytes: int, write: bool) -> bool:
        if not simple(write):
            return False
        answer = visited(start, nbytes, WRITES if write else DEFINED)
        if answer == UNWRITTEN:
            answer = padded(start, nbytes)
        return answer <= DONE_NEW and done(w.frag.mask, write)

    def visited(start: int, nbytes: int, kind: int) -> int:
        """Visit so many bytes; the answer of the routine."""
        lane = code_of(w.frag.mask)
        stamp = component | clock.now << STEP_SHIFT | lane << LANE_SHIFT | w.at
        place, agent = byte_cells(start, nbytes, grain).at, clock.at("shared")
        answer = visit(memory, place, agent, 0, 0, kind, stamp, lane)
        while answer == PLANE:
            shadow.add_plane()
            answer = visit(memory, place, agent, 0, 0, kind, stamp, lane)
        return answer

    def padded(start: int, nbytes: int) -> int:
        """Visit a load whose last words are undefined and go to registers that nothing reads."""
        used = flow.used_bytes(nbytes)
        if not 0 < used < nbytes or used % grain:
            return UNWRITTEN
        answer = visited(start, used, DEFINED)
        return answer if answer > DONE_NEW else visited(start + used, nbytes - used, 0)

    return check
