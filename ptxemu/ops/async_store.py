"""st.async and red.async: elements that come to the shared memory of a CTA of the cluster and
complete on an mbarrier there. PTX ISA, the sections of these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ptxemu.codegen.lower import Lower, fields
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.errors import HardwareRefusal
from ptxemu.machine.async_ops import Work
from ptxemu.machine.listener import Place
from ptxemu.machine.mbarrier import MAX_COUNT, MBarrier
from ptxemu.machine.state import OFFSET_MASK, RANK_SHIFT, Warp
from ptxemu.machine.tma_tile import combine
from ptxemu.numerics import PerLane
from ptxemu.ops.async_copy import REDUCTIONS, Reduction, reduction
from ptxemu.ops.load_store import elements
from ptxemu.ops.mbarrier import barrier_address, find
from ptxemu.syntax.tree import TYPE_BITS, Instr


@op(
    "st.async",
    types="b32 u32 s32 f32 b64 u64 s64 f64",
    flags="weak shared::cluster mbarrier::complete_tx::bytes v2 v4",
)
def emit_store(c: Lower, i: Instr, f: Match) -> None:
    _emit(c, i, f, None)


@op(
    "red.async",
    types="u32 s32 b32 u64 s64",
    flags=f"relaxed cluster shared::cluster mbarrier::complete_tx::bytes {REDUCTIONS}",
)
def emit_reduction(c: Lower, i: Instr, f: Match) -> None:
    _emit(c, i, f, reduction(f))


def _emit(c: Lower, i: Instr, f: Match, how: Reduction) -> None:
    width = TYPE_BITS[f.type]
    values = c.srcs(elements(c, i, f, i.operands[1]), f"u{width}")
    c.effect(
        f"store_async(w, {how}, {{0}}, {{1}}, {width // 8}, ({fields(values, 2)},))",
        c.address(i.operands[0], 32),
        barrier_address(c, i.operands[2]),
        *values,
    )


@runtime
def store_async(
    w: Warp,
    how: Reduction,
    target: PerLane,
    barrier: PerLane,
    size: int,
    values: tuple[Any, ...],
) -> None:
    """One store per active lane; the barrier is in the CTA that is stored to."""
    targets, signals = w.lane_values(target), w.lane_values(barrier)
    if how is None and len(targets) > 1 and set(signals) == {signals[0]}:
        stores = _Stores(targets, size, len(values))
        if stores.at_once(w, signals[0]):
            _issue_together(w, targets, signals[0], _data(w, values, size))
            return
    _one_by_one(w, how, zip(targets, signals, w.each_lane(*values), strict=True), size)


def _issue_together(w: Warp, targets: list[int], signal: int, data: np.ndarray) -> None:
    """data: [active lane, value]. Where somebody looks at each, the first store is one of its own:
    what is to be said of the mbarrier is said with it, before what is to be said of the others."""
    parts = (slice(0, 1), slice(1, None)) if w.machine.every_access else (slice(None),)
    for part in parts:
        stores = _Stores(targets[part], data.itemsize, data.shape[1])
        stores.issue(w, signal, data[part])


def _data(w: Warp, values: tuple[Any, ...], size: int) -> np.ndarray:
    """Elements of `size` bytes, [active lane, value]."""
    lanes = w.lanes()
    data = np.empty((len(lanes), len(values)), f"u{size}")
    for column, value in enumerate(values):
        data[:, column] = value[lanes] if isinstance(value, np.ndarray) else value
    return data


class _Stores:
    """Those of several lanes, as one operation."""

    def __init__(self, targets: list[int], size: int, count: int) -> None:
        self.first = targets[0]
        self.offsets = np.array(targets) - (self.first & ~OFFSET_MASK)
        self.size, self.count = size, count
        self.nbytes = size * count

    def at_once(self, w: Warp, signal: int) -> bool:
        """Whether it is the same as one after the other: they all are in order and in one CTA,
        complete no phase midway, and are told nobody who looks at each."""
        machine, nbytes = w.machine, self.nbytes
        if not machine.units.eager or machine.every_lane or (w.follower and w.follower.masks):
            return False
        if machine.every_access and len(np.unique(self.offsets)) < len(self.offsets):
            return False
        cta, _ = w.cluster.locate(self.first)
        low, high = int(self.offsets.min()), int(self.offsets.max())
        together = int(np.bitwise_or.reduce(self.offsets))
        if low < 0 or high + nbytes > cta.smem_size or together & (nbytes - 1):
            return False
        found, total = find(w, signal), nbytes * len(self.offsets)
        midway = 0 < found.tx < total and found.tx % nbytes == 0
        return not midway and found.tx - total >= -MAX_COUNT

    def issue(self, w: Warp, address: int, data: np.ndarray) -> None:
        cta, signal = w.cluster.cta(self.first >> RANK_SHIFT), find(w, address)
        places = [(cta, offset) for offset in self.offsets.tolist()]
        index = self.offsets[:, None] // self.size + np.arange(self.count)

        def run(work: Work) -> None:
            for each in w.listeners:
                each.land(work, places, self.nbytes, [signal])
            cta.views[self.size][index] = data
            signal.complete(self.nbytes, times=len(places))

        _put(w, "st.async", self.nbytes, run, len(places))


def _one_by_one(w: Warp, how: Reduction, stores: Iterable[Any], size: int) -> None:
    for where, signal, row in stores:
        nbytes = size * len(row)
        cta, offset = w.cluster.locate(where)
        if offset % nbytes:
            name = "st.async" if how is None else "red.async"
            raise HardwareRefusal(f"{name} of {nbytes} bytes to {where:#x}; misaligned")
        cta.check(offset, nbytes)
        data = np.array(row, f"u{size}").view(np.uint8)
        _issue(w, how, (cta, offset), data, find(w, signal))


def _issue(w: Warp, how: Reduction, place: Place, data: np.ndarray, signal: MBarrier) -> None:
    cta, offset = place
    nbytes, name = data.size, "st.async" if how is None else "red.async"

    def run(work: Work) -> None:
        for each in w.listeners:
            each.land(work, [place], nbytes, [signal], atomic=how is not None)
        held = cta.smem[offset : offset + nbytes]
        cta.smem[offset : offset + nbytes] = data if how is None else combine(*how, held, data)
        cta.mark_generic(slice(offset, offset + nbytes))
        signal.complete(nbytes)

    _put(w, name, nbytes, run, 1)


def _put(w: Warp, name: str, nbytes: int, run: Callable[[Work], None], times: int) -> None:
    w.machine.bytes[name] += nbytes * times
    work = Work("st.async", f"{name} {nbytes} B", run, size=nbytes * times, stream="st.async")
    w.machine.issue(w, work)
