"""Quick checks of a warp's accesses to the shared memory of its own CTA.

Most of them are ordered and read defined data. Everything that such a check needs is looked up once
for each warp. A check returns False, with nothing recorded, if the access needs a closer look.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ptxemu.check import frame
from ptxemu.check.clocks import COMPONENT_SHIFT, LANE_SHIFT, STEP_SHIFT
from ptxemu.check.footprints import byte_cells
from ptxemu.check.state import States
from ptxemu.check.taint import Registers
from ptxemu.machine.state import Warp
from ptxemu.native.shadow import DEFINED, DONE_NEW, WRITES


class Checks(NamedTuple):
    """Checks of one warp.

    lanes: of an access by lanes, which a primitive does then; see `Warp.told`.
    one: of an access by all lanes to one place: its offset, its bytes, whether it is a write.
    """

    lanes: Callable[[Warp, np.ndarray, int, int, bool], bool]
    one: Callable[[int, int, bool], bool]


def checks_of(states: States, w: Warp, registers: Registers) -> Checks | None:
    """Return the checks of a warp; None without machine code."""
    state, clock, routines = states.ctas[w.cta], states.clocks[w], frame.routines()
    if routines is None:
        return None
    shadow, codes, grain = state.shared, state.shared_codes, states.grain
    readers = shadow.readers
    visit, visit_lanes, memory = routines.visit, routines.visit_lanes, shadow.at
    component, code_of = clock.own << COMPONENT_SHIFT, clock.components.lane_sets.code
    addresses = frame.ADDRESSES
    places = frame.words(w.cta.smem_size, grain.bit_length() - 1, *frame.LANE_PLACES)

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

    def lanes(w: Warp, starts: np.ndarray, mb: int, nbytes: int, write: bool) -> bool:
        if not simple(write):
            return False
        addresses[:] = starts
        kind, stamp = WRITES if write else DEFINED, component | clock.now << STEP_SHIFT | w.at
        if visit_lanes(memory, clock.at("shared"), kind, stamp, mb, nbytes, places[1]) > DONE_NEW:
            return False
        return done(w.frag.mask, write)

    def one(start: int, nbytes: int, write: bool) -> bool:
        if not simple(write):
            return False
        mask, kind = w.frag.mask, WRITES if write else DEFINED
        lane, cells = code_of(mask), byte_cells(start, nbytes, grain)
        stamp = component | clock.now << STEP_SHIFT | lane << LANE_SHIFT | w.at
        by = clock.at("shared"), 0, 0
        if visit(memory, cells.at, *by, kind, stamp, lane) > DONE_NEW:
            return False
        return done(mask, write)

    return Checks(lanes, one)
