"""Rows of Q in fp16: each is divided by a power of two of its own (device code).

A row's largest number becomes one from 2^14 to 2^15. What underflows is below 2^-39 of that.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernelkit.device.barriers import meet
from kernelkit.device.shared_words import load, store
from kernelkit.device.warp_mma import scaled_fp16
from kernelkit.device.words import larger
from mla.attention.shared.intake import CHUNK, LINE_BYTES, PANEL_BYTES
from mla.attention.sm90.args import Lane, Scope
from mla.attention.sm90.halves import (
    BIAS,
    largest_of_lanes,
    largest_pair,
    power,
    top_exponent,
)
from mla.attention.sm90.plan import Plan90

LANES = 4  # threads of a row
UNITS = LINE_BYTES // CHUNK // LANES  # of a thread in a panel
TOP = 14  # exponent of a row's largest number
LEAST = TOP + 1  # exponent field whose factor is a normal fp32


@cute.jit
def halve_rows(plan: Plan90, scope: Scope) -> None:
    """Replace the columns of Q that meet codes by fp16, and store what rows were divided by; called
    by both teams.
    """
    thread, _, _ = cute.arch.thread_idx()
    row, lane = thread // LANES, thread % LANES
    line = scope.buffers.q.toint() + row * LINE_BYTES
    tops = Uint32(0)
    for panel in cutlass.range(plan.half_panels, unroll=1):
        for number in cutlass.range_constexpr(UNITS):
            address = unit_of(line, panel, number, row, lane)
            tops = larger(tops, largest_pair(load(address, Uint32, 4)))
    exponent = cutlass.max(largest_of_lanes(top_exponent(tops)), LEAST)
    inverse = power(TOP + BIAS - exponent)
    for panel in cutlass.range(plan.half_panels, unroll=1):
        for number in cutlass.range_constexpr(UNITS):
            address = unit_of(line, panel, number, row, lane)
            four = tuple(scaled_fp16(word, inverse) for word in load(address, Uint32, 4))
            store(address, Uint32, four)
    if lane == 0:
        factor = power(exponent - TOP - BIAS)
        store(scope.buffers.factors + 4 * row, Float32, (factor,))
    cute.arch.fence_proxy("async.shared", space="cta")
    meet(plan.barriers, "math")


@cute.jit
def unit_of(line: Int32, panel: Int32, number: cutlass.Constexpr, row: Int32, lane: Int32) -> Int32:
    """Return the address of a unit of 16 bytes of a thread. line: address of the row in panel 0."""
    return line + panel * PANEL_BYTES + (((lane + LANES * number) ^ (row % 8)) * CHUNK)


@cute.jit
def factors_of_rows(scope: Scope, lane: Lane) -> tuple[Float32, Float32]:
    """Return what both rows of a thread were divided by."""
    address = scope.buffers.factors + 4 * lane.row
    return load(address, Float32), load(address + 4 * 8, Float32)
