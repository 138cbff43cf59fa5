"""Tensor memory: alloc, dealloc, ld, st, wait. PTX ISA "tcgen05.alloc", "tcgen05.ld", "tcgen05.st",
"tcgen05.wait".

Under the adversarial policy a `tcgen05.ld` reads tensor memory at `wait::ld`: the destinations are
rows of an array that is filled in place then, and moves pass the rows on unread. A load one of
whose registers is used before the wait leaves poison in all of them. Under the other policies, with
a checker, it reads at the first use. Hardware makes the use wait, but not the signals before it.
`tcgen05.st` reaches tensor memory at `wait::st` under that policy.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Late, Value
from ptxemu.machine.state import Warp
from ptxemu.machine.tmem import POISON, SHAPES, Move, PendingLoad
from ptxemu.numerics import PerLane
from ptxemu.ops.load_store import address_value
from ptxemu.syntax.tree import Addr, Instr

_SHAPES = " ".join(SHAPES)
_NUMBERS = "x1 x2 x4 x8 x16 x32 x64 x128"
_GROUPS = "cta_group::1 cta_group::2"


@op("tcgen05.alloc", types="b32", flags=f"{_GROUPS} sync aligned shared::cta", blocking=True)
def alloc(c: Lower, i: Instr, f: Match) -> None:
    c.effect(
        f"tmem_alloc(w, {{0}}, {{1}}, {'cta_group::2' in f.flags})",
        address_value(c, i.operands[0], "shared"),
        c.src(i.operands[1], "u32"),
        parks=True,
    )


@op("tcgen05.dealloc", types="b32", flags=f"{_GROUPS} sync aligned")
def dealloc(c: Lower, i: Instr, f: Match) -> None:
    text = f"tmem_dealloc(w, {{0}}, {{1}}, {'cta_group::2' in f.flags})"
    c.effect(text, *c.srcs(i.operands, "u32"))


@op("tcgen05.relinquish_alloc_permit", flags=f"{_GROUPS} sync aligned")
def relinquish(c: Lower, i: Instr, f: Match) -> None:
    c.effect("w.cta.tmem.relinquish()")


def _where(c: Lower, operand: object) -> Value:
    return c.address(operand, 32) if isinstance(operand, Addr) else c.src(operand, "u32")


def _move(f: Match, packing: str, split: tuple[Any, ...]) -> Move:
    """The static part of a transfer; split: the immediate of .16x32bx2, where there is one."""
    number = int(f.pick(*_NUMBERS.split())[1:])
    return f.pick(*SHAPES), number, packing in f.flags, split[0].value if split else 0


@op("tcgen05.ld", types="b32", flags=f"sync aligned {_SHAPES} {_NUMBERS} pack::16b")
def load(c: Lower, i: Instr, f: Match) -> list[Value]:
    count = len(c.each(i.operands[0]))
    move = _move(f, "pack::16b", i.operands[2:])
    text = f"tmem_load(w, {{0}}, {move})"
    if c.late:
        text = f"tmem_load_late(w, {{0}}, {move}, {count})"
    where = _where(c, i.operands[1])
    values = c.effect(text, where, results=[("u32", False)] * count, matrix=True)
    if c.late or c.analysis:
        late = Late(values[0])
        for value in values:
            value.late = late
        c.open_loads.append(late)
    return values


@op("tcgen05.st", types="b32", flags=f"sync aligned {_SHAPES} {_NUMBERS} unpack::16b")
def store(c: Lower, i: Instr, f: Match) -> None:
    values = tuple(c.convert(c.raw(source, 32), "u32") for source in c.each(i.operands[-1]))
    text = f"tmem_store(w, {{0}}, {_move(f, 'unpack::16b', i.operands[1:-1])}, {{rows}})"
    c.effect(text, _where(c, i.operands[0]), rows=values)


@op("tcgen05.wait::ld", flags="sync aligned", section="tcgen05.wait")
def wait_load(c: Lower, i: Instr, f: Match) -> None:
    c.wait_for_loads()
    if c.late:
        c.effect("settle_loads(w)")


@op("tcgen05.wait::st", flags="sync aligned", section="tcgen05.wait")
def wait_store(c: Lower, i: Instr, f: Match) -> None:
    if c.late:
        c.effect("settle_stores(w)")


@op("tcgen05.fence::before_thread_sync tcgen05.fence::after_thread_sync", section="tcgen05.fence")
def fence(c: Lower, i: Instr, f: Match) -> None:
    """Orders tcgen05 operations of different threads; never changes a result here."""
    before = f.form.name.endswith("before_thread_sync")
    c.announce(f"fence_tensor(w, {before})")


# -- what they do ---------------------------------------------------------------------------


@runtime
def tmem_alloc(w: Warp, target: PerLane, columns: PerLane, pair: bool) -> bool | None:
    """Waits while there is no room; the address is written to shared memory."""
    target = w.agreed(target, "the shared address of tcgen05.alloc")
    columns = w.agreed(columns, "the number of columns of tcgen05.alloc")
    base = w.cta.tmem.try_alloc(columns)
    if base is None:
        w.cta.tmem_waiters.append((w, w.frag))
        w.park(f"{columns} free TMEM columns of {w.cta.name()}")
        return None
    offset = target & 0xFFFFFF
    w.cta.check(offset, 4)
    w.cta.views[4][offset // 4] = base
    for each in w.listeners:
        each.columns_allocated(w, base, columns, pair, offset)
    return True


@runtime
def tmem_dealloc(w: Warp, address: PerLane, columns: PerLane, pair: bool) -> None:
    address = w.agreed(address, "the address of tcgen05.dealloc")
    columns = w.agreed(columns, "the number of columns of tcgen05.dealloc")
    w.cta.tmem.dealloc(address, columns)
    for each in w.listeners:
        each.columns_freed(w, address, columns, pair)
    waiters, w.cta.tmem_waiters = w.cta.tmem_waiters, []
    for warp, fragment in waiters:
        warp.wake(fragment)


def one_address(address: PerLane) -> int:
    """tcgen05 addresses are the same in all lanes."""
    return address if not isinstance(address, np.ndarray) else int(address[0])


@runtime
def tmem_load(w: Warp, address: PerLane, move: Move) -> np.ndarray:
    """Return uint32 [register, 32 lanes]."""
    out = _read(w, one_address(address), move)
    w.machine.bytes["tmem.ld"] += out.nbytes
    return out


@runtime
def tmem_load_late(w: Warp, address: PerLane, move: Move, registers: int) -> np.ndarray:
    """An array that is filled when the load is settled."""
    where = address if address.__class__ is int else one_address(address)
    w.cta.tmem.require_access(move, where, w.index & 3)
    pending = PendingLoad(where, move, _poison(registers).copy())
    for each in w.listeners:
        each.tensor_load(w, pending)
    w.pending_loads.append(pending)
    return pending.out


@cache
def _poison(registers: int) -> np.ndarray:
    return np.full((registers, 32), POISON, np.uint32)


def _read(w: Warp, address: int, move: Move) -> np.ndarray:
    shape, number, packed, split = move
    return w.cta.tmem.load(shape, number, address, w.index % 4, pack16=packed, half_split=split)


def _fill(w: Warp, pending: PendingLoad) -> None:
    out = pending.out
    w.cta.tmem.load_to(out, pending.move, pending.address, w.index & 3)
    w.machine.bytes["tmem.ld"] += out.nbytes


@runtime
def settle_loads(w: Warp) -> None:
    """tcgen05.wait::ld: every pending load has happened."""
    pending, w.pending_loads = w.pending_loads, []
    for load_ in pending:
        _fill(w, load_)
    for each in w.listeners:
        each.tensor_loads_waited(w)


@runtime
def settle_value(w: Warp, value: PerLane) -> None:
    """First real use of a register before a wait for what fills it."""
    base = getattr(value, "base", None)
    if base is None:
        base = value
    for position, pending in enumerate(w.pending_loads):
        if pending.out is base:
            del w.pending_loads[position]
            if not w.machine.late:
                _fill(w, pending)
            for each in w.listeners:
                each.tensor_used(w, pending)
            return
    group = w.cta.warpgroups.get(w.index & ~3)
    early = group.reading(w, base) if group else None
    if early:
        for each in w.listeners:
            each.accumulator_used(w, early)


@runtime
def tmem_store(w: Warp, address: PerLane, move: Move, rows: np.ndarray) -> None:
    w.machine.bytes["tmem.st"] += rows.nbytes
    where = address if address.__class__ is int else one_address(address)
    if w.machine.late or w.listeners:
        w.cta.tmem.require_access(move, where, w.index & 3)
    for each in w.listeners:
        each.tensor_store(w, where, move)
    if w.machine.late:
        w.pending_stores.append((where, move, rows.copy()))
    else:
        _write(w, where, move, rows)


def _write(w: Warp, address: int, move: Move, rows: np.ndarray) -> None:
    w.cta.tmem.store_from(rows, move, address, w.index & 3)


@runtime
def settle_stores(w: Warp) -> None:
    """tcgen05.wait::st: every pending store has reached tensor memory."""
    pending, w.pending_stores = w.pending_stores, []
    for store_ in pending:
        _write(w, *store_)
    for each in w.listeners:
        each.tensor_stores_waited(w)
