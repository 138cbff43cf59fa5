"""mbarrier instructions: PTX ISA "mbarrier".

`try_wait` parks the warp until its phase completes; the scheduler may let it return false, as
hardware may at any time. `test_wait` never waits. A shared::cluster address reaches the barrier of
a peer CTA.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value, constant
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.scheduler import TIMED_OUT
from ptxemu.machine.state import OFFSET_MASK, RANK_SHIFT, Cta, Warp
from ptxemu.numerics import PerLane
from ptxemu.syntax.tree import Addr, Instr, Reg

_WHERE = "shared shared::cta shared::cluster"
_ORDER = "release acquire relaxed cta cluster gpu sys"


def barrier_address(c: Lower, operand: Addr) -> Value:
    """Shared addresses are 32-bit; a generic one is taken out of the shared window."""
    base = operand.base
    if isinstance(base, Reg) and c.registers.width(base.name) == 64:
        value = c.address(operand, 64)
        return c.pure("u32", "({0} & 0xffffffff)", "{0}.astype(U32)", value)
    return c.address(operand, 32)


@op("mbarrier.init", types="b64", flags=_WHERE)
@op("mbarrier.expect_tx", types="b64", flags=f"{_WHERE} {_ORDER}")
@op("mbarrier.complete_tx", types="b64", flags=f"{_WHERE} {_ORDER}")
def set_counts(c: Lower, i: Instr, f: Match) -> None:
    name = f.form.name.replace(".", "_")
    address, number = barrier_address(c, i.operands[0]), c.src(i.operands[1], "u32")
    c.effect(f"{name}(w, {{0}}, {{1}})", address, number)


@op("mbarrier.inval", types="b64", flags=_WHERE)
def invalidate(c: Lower, i: Instr, f: Match) -> None:
    c.effect("mbarrier_inval(w, {0})", barrier_address(c, i.operands[0]))


@op(
    "mbarrier.arrive mbarrier.arrive_drop",
    types="b64",
    flags=f"{_WHERE} {_ORDER} noComplete",
    section="mbarrier.arrive",
)
@op(
    "mbarrier.arrive.expect_tx mbarrier.arrive_drop.expect_tx",
    types="b64",
    flags=f"{_WHERE} {_ORDER}",
    section="mbarrier.arrive",
)
def arrive(c: Lower, i: Instr, f: Match) -> None:
    """{state,} [barrier] {, count}, or the bytes to expect."""
    tells = not isinstance(i.operands[0], Addr)
    where, *number = i.operands[tells:]
    expects, drop = "expect_tx" in i.parts, "arrive_drop" in i.parts
    address = barrier_address(c, where)
    count = c.src(number[0], "u32") if number or expects else constant(1, "u32")
    out = c.effect(
        f"mbarrier_arrive{'_expect' * expects}(w, {{0}}, {{1}}, {drop}, {_order(f)})",
        address,
        count,
        results=[("u64", address.uniform and count.uniform)],
    )
    if tells:
        c.dst(i.operands[0], out[0])


def _order(f: Match) -> tuple[str, ...]:
    """Semantics and scope, as far as the instruction names them."""
    return tuple(flag for flag in _ORDER.split() if flag in f.flags)


@op("mbarrier.try_wait", types="b64", flags=f"{_WHERE} {_ORDER} parity", blocking=True)
@op("mbarrier.test_wait", types="b64", flags=f"{_WHERE} {_ORDER} parity")
def wait(c: Lower, i: Instr, f: Match) -> Value:
    """The third operand is a parity, or the state that an arrive returned; bit 0 alone counts."""
    address = barrier_address(c, i.operands[1])
    if "parity" in f.flags:
        parity = c.src(i.operands[2], "u32")
    else:
        parity = c.convert(c.src(i.operands[2], "u64"), "u32")
    parity = c.pure("u32", "({0} & 1)", "{0} & 1", parity)
    uniform = address.uniform and parity.uniform
    function = f.form.name.replace(".", "_")
    if not uniform:  # lanes that wait on different barriers poll
        function = "mbarrier_test_wait_lanes"
    return c.effect(
        f"{function}(w, {{0}}, {{1}}, {_order(f)})",
        address,
        parity,
        results=[("pred", uniform)],
        parks=f.form.blocking and uniform,
    )[0]


@op("mbarrier.pending_count", types="b64")
def pending(c: Lower, i: Instr, f: Match) -> Value:
    """Return the number of pending arrivals before the arrival that returned the state."""
    state = c.src(i.operands[1], "u64")
    return c.convert(c.pure("u64", "({0} >> 32)", "{0} >> 32", state), "u32")


# -- what they do ---------------------------------------------------------------------------


def find(w: Warp, address: int) -> MBarrier:
    """The barrier at a shared::cluster address; an own-CTA address carries the own rank."""
    found = w.cta.mbarriers.get(address ^ w.smem_base)  # nearly always
    return found or _home(w, address).mbarrier(address & OFFSET_MASK)


def _home(w: Warp, address: int) -> Cta:
    rank = address >> RANK_SHIFT & 0xFF
    return w.cta if rank == w.cta.rank else w.cluster.cta(rank)


def _pairs(w: Warp, address: PerLane, value: PerLane) -> list[tuple[int, int, int]]:
    """Return (address, value, how many lanes) over the active lanes."""
    if not isinstance(address, np.ndarray) and not isinstance(value, np.ndarray):
        return [(address, value, w.frag.mask.bit_count())]
    return [(a, v, 1) for a, v in w.each_lane(address, value)]


@runtime
def mbarrier_init(w: Warp, address: PerLane, count: PerLane) -> None:
    if not w.listeners and address.__class__ is int and count.__class__ is int:
        _home(w, address).init_mbarrier(address & OFFSET_MASK, count, w.at)
        return
    for where, expected, _ in _pairs(w, address, count):
        cta, offset = _home(w, where), where & OFFSET_MASK
        for each in w.listeners:
            if offset in cta.mbarriers:
                each.mbarrier_replaced(w, cta.mbarriers[offset])
        cta.init_mbarrier(offset, expected, w.at)
        for each in w.listeners:
            each.mbarrier_initialised(w, cta, cta.mbarriers[offset])


@runtime
def mbarrier_inval(w: Warp, address: PerLane) -> None:
    for where, _, _ in _pairs(w, address, 0):
        find(w, where)
        del _home(w, where).mbarriers[where & OFFSET_MASK]


def _states(w: Warp, states: list[int], *operands: PerLane) -> PerLane:
    """The opaque results of arrivals: one where the operands are uniform, else one per lane."""
    if len(states) == 1 and np.ndarray not in map(type, operands):
        return states[0]
    out = np.zeros(32, np.uint64)
    out[w.frag.active()] = states
    return out


@runtime
def mbarrier_arrive(
    w: Warp, address: PerLane, count: PerLane, drop: bool, how: tuple[Any, ...]
) -> object:
    w.machine.note_progress()
    if address.__class__ is int and count.__class__ is int:
        barrier, lanes = find(w, address), w.frag.mask.bit_count()
        for each in w.listeners:
            each.mbarrier_arrival(w, _home(w, address), barrier, how, (lanes, lanes * count))
        return barrier.arrive_each(lanes, count, drop=drop, by=w.label, site=w.at)
    states = []
    for where, number, lanes in _pairs(w, address, count):
        barrier = find(w, where)
        for each in w.listeners:
            each.mbarrier_arrival(w, _home(w, where), barrier, how, (lanes, lanes * number))
        states.append(barrier.arrive_each(lanes, number, drop=drop, by=w.label, site=w.at))
    return _states(w, states, address, count)


@runtime
def mbarrier_arrive_expect(
    w: Warp, address: PerLane, nbytes: PerLane, drop: bool, how: tuple[Any, ...]
) -> object:
    w.machine.note_progress()
    states = []
    for where, number, lanes in _pairs(w, address, nbytes):
        barrier = find(w, where)
        _expect(w, where, number, lanes)
        for each in w.listeners:
            each.mbarrier_arrival(w, _home(w, where), barrier, how)
        states.append(barrier.arrive_each(lanes, drop=drop, by=w.label, site=w.at))
    return _states(w, states, address, nbytes)


def _expect(w: Warp, where: int, nbytes: int, lanes: int) -> None:
    barrier = find(w, where)
    barrier.expect(nbytes, lanes, by=w.label, site=w.at)
    for each in w.listeners:
        each.mbarrier_expected(w, _home(w, where), barrier, lanes * nbytes)


@runtime
def mbarrier_expect_tx(w: Warp, address: PerLane, nbytes: PerLane) -> None:
    for where, number, lanes in _pairs(w, address, nbytes):
        _expect(w, where, number, lanes)


@runtime
def mbarrier_complete_tx(w: Warp, address: PerLane, nbytes: PerLane) -> None:
    w.machine.note_progress()
    for where, number, lanes in _pairs(w, address, nbytes):
        barrier = find(w, where)
        for each in w.listeners:
            each.mbarrier_expected(w, _home(w, where), barrier, -number * lanes)
        barrier.complete(number * lanes, by=w.label, site=w.at)


@runtime
def mbarrier_test_wait(w: Warp, address: int, parity: int, how: tuple[Any, ...]) -> bool:
    barrier = find(w, address)
    done = barrier.done(parity)
    for each in w.listeners if done else ():
        each.mbarrier_tested(w, _home(w, address), barrier, parity, how)
    _looked(w, barrier, parity, done)
    return done


@runtime
def mbarrier_test_wait_lanes(
    w: Warp, address: PerLane, parity: object, how: tuple[Any, ...]
) -> np.ndarray:
    """Return one answer per lane; no lane waits."""
    out = np.zeros(32, np.bool_)
    polled, w.polled = w.polled, False
    for lane, (where, bit) in zip(w.lanes(), w.each_lane(address, parity), strict=True):
        barrier = find(w, where)
        out[lane] = barrier.done(bit)
        _looked(w, barrier, bit, bool(out[lane]))
        for each in w.listeners if out[lane] else ():
            each.mbarrier_tested(w, _home(w, where), barrier, bit, how)
    w.polled = polled or not out.any()
    return out


def _looked(w: Warp, barrier: MBarrier, parity: int, done: bool) -> None:
    """Keep what a warp polls in vain, and what it has seen complete."""
    if done:
        w.frag.polls = None
        barrier.seen[w.label] = barrier.phase
    else:
        w.polled = True
        w.frag.polls = barrier, parity, w.frag.pc


@runtime
def mbarrier_try_wait(w: Warp, address: int, parity: int, how: tuple[Any, ...]) -> bool | None:
    frag = w.frag
    timed_out, frag.token = frag.token is TIMED_OUT, None
    barrier = w.cta.mbarriers.get(address ^ w.smem_base) or find(w, address)
    if barrier.phase & 1 != parity:  # as `done` has it
        for each in w.listeners:
            each.mbarrier_waited(w, _home(w, address), barrier, parity, how)
        frag.polls = None
        barrier.seen[w.label] = barrier.phase
        return True
    if timed_out or w.machine.gives_up():
        _looked(w, barrier, parity, False)
        return False
    barrier.waiters.append((w, frag))
    w.park((barrier, parity))
    return None
