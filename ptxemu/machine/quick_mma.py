"""tcgen05.mma of the most frequent kinds by machine code, as `machine.mma` computes it.

`plan` decides for one instruction and its operands, once. An MMA that has no plan, or whose memory
does not allow it (`Plan.run` returns False), is `machine.mma`'s: errors come from there alone. The
float32 of an operand and their sums are bit by bit those of `machine.mma`: A is written by k
(its transpose), which the product reads faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ptxemu.errors import PtxEmuError
from ptxemu.machine.mma import Mma, MmaCta, disabled_lanes
from ptxemu.machine.tensor_core import FORMATS, line_bytes
from ptxemu.machine.tmem import LANES
from ptxemu.machine.umma_desc import InstrDesc, SmemDesc, image_of, require_shape
from ptxemu.native import operands as native
from ptxemu.native.library import aligned, compiled

_BITS = {"bf16": 16, "f16": 16, "e4m3": 8, "e5m2": 8}  # of a code
_ROOM = 256 * 64 * 4  # bytes of the largest operand
_PAIR = 2

_at = aligned(_ROOM).view(np.float32)
_b = aligned(_ROOM).view(np.float32)
_product = aligned(256 * LANES * 4).view(np.float32)


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
        *("_d", "_instr", "_fresh", "_group", "_frame", "_where", "_words", "_ends", "_a_column"),
        *("_a_columns", "_shape", "_a", "_b", "_count", "_values"),
    )

    def __init__(self, what: Mma, group: int) -> None:
        instr = what.instr
        self._d, self._instr, self._group = what.d, instr, group
        self._fresh = not what.accumulate
        rows = instr.m // group
        self._a = _at[: instr.k * rows].reshape(instr.k, rows)
        self._b = _b[: instr.n * instr.k].reshape(instr.n, instr.k)
        self._shape = instr.n, rows
        self._count = 1 + group
        self._frame = np.zeros((self._count, native.OPERAND), np.int64)
        self._where, self._words = self._frame.ctypes.data, self._frame.reshape(-1).data
        self._values = [_values(instr.a_format), _values(instr.b_format)]
        self._ends = 0
        self._a_column, self._a_columns = -1, 0
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
        self._a_column, self._a_columns = column, columns

    def run(self, ctas: Sequence[MmaCta]) -> bool:
        """Execute it; return False, having done nothing, if memory does not allow it or there is no
        machine code."""
        routine = compiled(native.widened_operands)
        if routine is None or any(self._ends > len(cta.smem) >> 3 for cta in ctas):
            return False
        words = self._words
        memories = [cta.smem.ctypes.data for cta in ctas]
        for rank, memory in enumerate(memories, 1):
            words[rank * native.OPERAND + native.FROM] = memory
        m, n = self._instr.m, self._instr.n
        for rank, cta in enumerate(ctas):
            cells = cta.tmem.accumulator(self._d, m, n, self._group)
            if self._a_column < 0:
                words[native.FROM] = memories[rank]
            else:
                cta.tmem.check(self._a_column, self._a_columns)
                words[native.FROM] = cta.tmem.cells[self._a_column :].ctypes.data
            routine(self._where, self._count if rank == 0 else 1)
            self._add(cells.view(np.float32))
        return True

    def _add(self, d: np.ndarray) -> None:
        """D = B A^T (+ D), in place."""
        if self._fresh and d.ndim == 2:
            np.matmul(self._b, self._a, out=d)
            return
        product: np.ndarray = _product[: d.size].reshape(self._shape)
        np.matmul(self._b, self._a, out=product)
        if d.ndim > 2:
            product = product.reshape(d.shape)
        if self._fresh:
            d[...] = product
        else:
            d += product


def plan(what: Mma, group: int) -> Plan | None:
    """Return how to execute an MMA by so many CTAs; None if `machine.mma` has to."""
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


def _plain(what: Mma, instr: InstrDesc) -> bool:
    """Whether operands are widened, multiplied and added, and nothing else."""
    return (
        instr.a_format in _BITS
        and instr.b_format in _BITS
        and instr.d_format == "f32"
        and not instr.sparse
        and not instr.stationary
        and instr.a_negate == instr.b_negate
        and what.scales is None
        and what.metadata is None
        and not what.shift
        and not what.scale_input_d
        and disabled_lanes(what.disable_lanes, _PAIR if len(what.disable_lanes) > 4 else 1) is None
    )
