"""tcgen05.mma of the most frequent kinds by machine code, as `machine.mma` computes it.

`plan` decides for one instruction and its operands, once. An MMA that has no plan, or whose memory
does not allow it (`Plan.run` returns False), is `machine.mma`'s: errors come from there alone. The
float32 of an operand and their sums are bit by bit those of `machine.mma`: A is written by k
(its transpose), which the product reads faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from ptxemu.errors import PtxEmuError
from ptxemu.machine.mma import Mma, MmaCta, disabled_lanes
from ptxemu.machine.scale_factors import (
    ELEMENTS,
    Factors,
    ScaledPart,
    Scales,
    require_scales,
)
from ptxemu.machine.tensor_core import FORMATS, line_bytes
from ptxemu.machine.tmem import LANES, Tmem, columns_of
from ptxemu.machine.umma_desc import InstrDesc, SmemDesc, image_of, require_shape
from ptxemu.native import operands as native
from ptxemu.native.library import aligned, compiled
from ptxemu.native.product import multiply, multiply_operands

_BITS = {"bf16": 16, "f16": 16, "e4m3": 8, "e5m2": 8}  # of a code
_ROOM = 256 * 64 * 4  # bytes of the largest operand
_PAIR = 2

_at = aligned(_ROOM).view(np.float32)
_b = aligned(_ROOM).view(np.float32)
_a_at, _b_at = _at.ctypes.data, _b.ctypes.data


@lru_cache(maxsize=8)
def _values(fmt: str) -> np.ndarray | None:
    """float32 of each code; None if a code is the upper half of a float32."""
    if fmt == "bf16":
        return None
    codes = np.arange(1 << _BITS[fmt], dtype=f"u{_BITS[fmt] // 8}")
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(FORMATS[fmt].decode(codes.view(np.uint8))).view(np.uint32)


class Plan:
    """How one MMA is computed.

    Frames of both operands of each CTA are filled except for the addresses of its memory.
    """

    __slots__ = (
        *("_d", "_instr", "_fresh", "_group", "_frame", "_where", "_words", "_ends", "_a_place"),
        *("_a_columns", "_count", "_values", "_d_place", "_d_columns", "_sizes"),
    )

    def __init__(self, what: Mma, group: int) -> None:
        instr = what.instr
        self._d, self._instr, self._group = what.d, instr, group
        self._fresh = not what.accumulate
        rows = instr.m // group
        column, all_lanes = what.d & 0xFFFF, rows == LANES and not what.d >> 16
        self._d_place = 4 * LANES * column if all_lanes else -1  # bytes of cells before it
        self._d_columns = columns_of(column, instr.n)
        self._sizes = _b_at, _a_at, instr.n, instr.k, self._fresh
        self._count = 1 + group
        self._frame = np.zeros((self._count, native.OPERAND), np.int64)
        self._where, self._words = self._frame.ctypes.data, self._frame.reshape(-1).data
        self._values = [_values(instr.a_format), _values(instr.b_format)]
        self._ends = 0
        self._a_place, self._a_columns = -1, 0
        if isinstance(what.a, SmemDesc):
            self._operand(0, what.a, instr.shape_of_a(group), (_at.ctypes.data, rows, 1))
        else:
            self._in_tmem(what.a & 0xFFFF, line_bytes(instr.a_format, instr.k) // 4, rows)
        for rank in range(group):
            first = _b.ctypes.data + 4 * rank * (instr.n // group) * instr.k
            self._operand(1 + rank, what.b, instr.shape_of_b(group), (first, 1, instr.k))

    def _operand(
        self,
        number: int,
        desc: SmemDesc,
        form: tuple[int, int, str, bool],
        out: tuple[int, int, int],
    ) -> None:
        """Fill a frame; out: where float32 go, and steps between neighbours in k and in rows."""
        image = image_of(desc, form)
        to, along_k, along_rows = out
        frame, (_, _, fmt, mn_major) = self._frame[number], form
        frame[native.TO] = to
        steps = (along_rows, along_k) if mn_major else (along_k, along_rows)
        frame[native.ELEMENT_STEP], frame[native.LINE_STEP] = steps
        frame[native.PLACES] = image.words.ctypes.data
        frame[native.LINES], frame[native.LINE_WORDS] = image.words.shape
        self._decoded(number, fmt)
        self._ends = max(self._ends, image.end)

    def _decoded(self, number: int, fmt: str) -> None:
        values = self._values[min(number, 1)]
        self._frame[number, native.VALUES] = 0 if values is None else values.ctypes.data
        self._frame[number, native.BITS] = _BITS[fmt]

    def _in_tmem(self, column: int, columns: int, rows: int) -> None:
        frame = self._frame[0]
        frame[native.TO], frame[native.ELEMENT_STEP] = _at.ctypes.data, rows
        frame[native.COLUMNS] = columns
        self._decoded(0, self._instr.a_format)
        self._a_place, self._a_columns = 4 * LANES * column, columns_of(column, columns)

    def run(self, ctas: Sequence[MmaCta]) -> bool:
        """Execute it; return False, having done nothing, if memory does not allow it or there is no
        machine code."""
        both, words = compiled(multiply_operands), self._words
        if both is None:
            return False
        place = native.OPERAND + native.FROM
        for cta in ctas:
            if self._ends > cta.smem.size >> 3:
                return False
            words[place] = cta.smem_at
            place += native.OPERAND
        count = self._count
        for cta in ctas:
            tmem = cta.tmem
            if self._a_place < 0:
                words[native.FROM] = cta.smem_at
            else:
                tmem.require(self._a_columns)
                words[native.FROM] = tmem.cells_at + self._a_place
            if self._d_place < 0:
                self._in_parts(tmem, count)
            else:
                tmem.require(self._d_columns)
                both(self._where, count, tmem.cells_at + self._d_place, *self._sizes)
            count = 1  # B of all CTAs is there
        return True

    def _in_parts(self, tmem: Tmem, count: int) -> None:
        """Compute a D that is not all lanes of its columns, after so many operands are read."""
        instr, routine = self._instr, compiled(native.widened_operands)
        assert routine is not None, "a library has all routines"
        cells = tmem.accumulator(self._d, instr.m, instr.n, self._group)
        routine(self._where, count)
        add(tmem, self._d, cells, instr, fresh=self._fresh)


class ScaledPlan:
    """How a block-scaled MMA is computed. Frames are as those of `Plan`."""

    __slots__ = ("_what", "_group", "_parts")

    def __init__(self, what: Mma, group: int, scales: Scales) -> None:
        instr, fmt = what.instr, what.instr.scale_format or ""
        assert isinstance(what.a, SmemDesc)
        self._what, self._group = what, group
        of_a, of_b = scales.placements(instr, group)
        a = Factors(of_a, scales.blocks, instr.a_scale_id, fmt)
        b = Factors(of_b, scales.blocks, instr.b_scale_id, fmt)
        form_a, form_b = instr.shape_of_a(group), instr.shape_of_b(group)
        self._parts = [ScaledPart(what.a, form_a, a, (_at.ctypes.data, instr.m // group, 1), 0)]
        self._parts += [
            ScaledPart(what.b, form_b, b, (_b.ctypes.data, 1, instr.k), rank)
            for rank in range(group)
        ]

    def run(self, ctas: Sequence[MmaCta]) -> bool:
        """Execute it; return False if Python has to check something, having done nothing that
        would not be done again."""
        routine, what = compiled(native.scaled_operand), self._what
        if routine is None:
            return False
        for cta in ctas[1:]:  # before one of a pair has changed its D
            if not self._read(routine, ctas, cta):
                return False
        for cta in ctas:
            if not self._read(routine, ctas, cta):
                return False
            cells = cta.tmem.accumulator(what.d, what.instr.m, what.instr.n, self._group)
            add(cta.tmem, what.d, cells, what.instr, fresh=not what.accumulate)
        return True

    def _read(self, routine: Callable[[int], int], ctas: Sequence[MmaCta], cta: MmaCta) -> bool:
        """Write A and B of a CTA of these; return False if Python has to check something."""
        a, *parts = self._parts
        return a.read(routine, cta, cta.tmem) and all(
            part.read(routine, source, cta.tmem) for part, source in zip(parts, ctas, strict=True)
        )


def add(tmem: Tmem, where: int, cells: np.ndarray, instr: InstrDesc, *, fresh: bool) -> None:
    """D = B A^T, or D + B A^T, in place, from A by k and B that have just been written.

    Args:
        tmem: with D.
        where: address of D.
        cells: D, uint32, as `Tmem.accumulator` returns it.
        instr: the instruction.
        fresh: whether D is not read.
    """
    n, k = instr.n, instr.k
    routine = compiled(multiply)
    if cells.ndim == 2 and routine is not None:
        routine(tmem.cells_at + 4 * LANES * (where & 0xFFFF), _b_at, _a_at, n, k, fresh)
        return
    rows = cells.size // n
    product = np.matmul(_b[: n * k].reshape(n, k), _at[: k * rows].reshape(k, rows))
    values, product = cells.view(np.float32), product.reshape(cells.shape)
    if fresh:
        values[...] = product
    else:
        values += product


def plan(what: Mma, group: int) -> Plan | ScaledPlan | None:
    """Return how to execute an MMA by so many CTAs; None if `machine.mma` has to."""
    if what.scales is not None:
        return _scaled_plan(what, group, what.scales)
    if not _plain(what, what.instr):
        return None
    a, m = what.a, what.instr.m
    if isinstance(a, int) and (m // group != LANES or a >> 16 or what.instr.a_mn_major):
        return None
    try:
        require_shape(what.instr, group)
        return Plan(what, group)
    except PtxEmuError:
        return None  # raised again where it is executed


def _scaled_plan(what: Mma, group: int, scales: Scales) -> ScaledPlan | None:
    instr = what.instr
    formats = {instr.a_format, instr.b_format}
    k_major = not instr.a_mn_major and not instr.b_mn_major
    if isinstance(what.a, int) or not formats <= ELEMENTS.keys() or not k_major:
        return None
    if not _only_adds(what, instr):
        return None
    try:
        require_shape(instr, group)
        require_scales(instr, scales)
        return ScaledPlan(what, group, scales)
    except PtxEmuError:
        return None  # raised again where it is executed


def _plain(what: Mma, instr: InstrDesc) -> bool:
    """Whether operands are widened, multiplied and added, and nothing else."""
    formats = {instr.a_format, instr.b_format}
    return formats <= _BITS.keys() and instr.scale_format is None and _only_adds(what, instr)


def _only_adds(what: Mma, instr: InstrDesc) -> bool:
    """Whether the product of the operands is added to D, or is D, and nothing else happens."""
    return (
        instr.d_format == "f32"
        and not instr.sparse
        and not instr.stationary
        and instr.a_negate == instr.b_negate
        and what.metadata is None
        and not what.shift
        and not what.scale_input_d
        and disabled_lanes(what.disable_lanes, _PAIR if len(what.disable_lanes) > 4 else 1) is None
    )
