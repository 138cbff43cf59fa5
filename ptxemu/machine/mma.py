"""tcgen05.mma: D = A B, or D + A B, on tensor memory, for one CTA or a pair.

A (M x K) and B (N x K) come as float32 from their descriptors; D stays in tensor memory as
[column, lane], that is transposed, so one product B A^T lands where D lies. The order of the fp32
accumulation is free by the manual, and here is the BLAS's unless the launch wants what MMA-Sim
claims of the tensor core; integers are exact.
With .ws each part of N has lanes of its own, and A in tensor memory is read in these lanes: for
M = 32 and 64 there are as many copies as parts, which need not be equal (FlashMLA, kerutils'
SM100_MMA_F16BF16_WS_TS_NOELECT, makes two products of one instruction by that).
Source: PTX ISA, tcgen05.mma, tcgen05.mma.sp and tcgen05.mma.ws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.scale_factors import (
    Scales,
    read_scales,
    require_scales,
    scaled,
)
from ptxemu.machine.tensor_core import LISTED, decode_in_tmem, expanded_parts, line_bytes, nibbles
from ptxemu.machine.tmem import UPPER_POISON, Tmem, operand_lanes
from ptxemu.machine.umma_desc import InstrDesc, SmemDesc, read_operand, require_shape
from ptxemu.numerics import formats
from ptxemu.numerics.accumulation import Rule, Types, accumulate

# Metadata of a sparse A in tensor memory: tcgen05.mma.sp.
#
# A row of kinds f16 and tf32 has 32 bits for one MMA, a row of other kinds 64. MMAs name 64 bits of
# each lane, two columns, the first of them even; of f16 and tf32 the sparsity selector names one of
# the two. Rows lie in the lanes that D has, so that of 64 rows every other 16 lanes are used, the
# same ones for A, D and metadata. Of kinds with 64 bits a row has its own lane. Of f16 and tf32
# rows r and r + 8 of every 16 share the lanes of both: the first lane has the first half of K, the
# one eight lanes behind it the second, and the lower half of a word is of row r. Each CTA of a pair
# has those of its own rows of A; with .ws each part of N has a copy in its lanes. Sources: PTX ISA,
# "Sparsity selector" and those behind, whose layouts are figures; CUTLASS's `tmem_e_frg` and
# `tmem_e_frg_ws` (cute/atom/mma_traits_sm100_frag.hpp) have the same. JAX's Mosaic GPU
# (format_tcgen05_sparse_metadata; B200) and a Triton fork's dot_sparse (sm_110), both right on
# GPUs, lay out f16 and 8 bits so, the latter also 64 rows, where the manual's figures of f16 and
# tf32 are in each other's place; there an odd column was refused as misaligned. The manual's
# selectors of f16 go to 3; nobody uses 2 and 3.


class Metadata(NamedTuple):
    """Place of sparsity metadata in the tensor memory of one CTA.

    lane: the first lane.
    column: the first column.
    columns: number of columns.
    path: (M, CTAs) of a dense MMA whose A has the lanes of these rows.
    wide: whether rows share lanes.
    """

    lane: int
    column: int
    columns: int
    path: tuple[int, int]
    wide: bool

    def lanes(self) -> np.ndarray:
        """Lanes of each copy and row, in order, intp; rows that share lanes are adjacent."""
        return operand_lanes(self.lane, *self.path)

    def by_row(self, cells: np.ndarray) -> np.ndarray:
        """Return (copies, rows, halves of words) of cells (column, lane, half of a word)."""
        used = cells[:, self.lanes()]
        copies, rows = used.shape[1:3]
        if self.wide:  # [copy, 16 rows, half of K, row of 8, r or r + 8]
            split = used[0].reshape(copies, -1, 2, 8, 2)
            return split.transpose(0, 1, 4, 3, 2).reshape(copies, rows, 2)
        return used.transpose(1, 2, 0, 3).reshape(copies, rows, -1)


def metadata_at(address: int, idesc: InstrDesc, cta_group: int) -> Metadata:
    """Return the place of the metadata at a TMEM address.

    Raises HardwareRefusal for an odd column.
    """
    lane, column = address >> 16, address & 0xFFFF
    if column % 2:
        raise HardwareRefusal(f"sparsity metadata at TMEM column {column:#x}, must be even")
    wide = idesc.kind in ("f16", "tf32")
    columns = 1 if wide else 2
    return Metadata(lane, column + idesc.selector, columns, idesc.data_path(cta_group), wide)


def read_metadata(tmem: Tmem, where: Metadata) -> np.ndarray:
    """uint8 (rows, groups): the four bits of each group of A.

    Raises UnsupportedPtx for copies that differ: which product would use which is not known.
    """
    tmem.check(where.column, where.columns)
    cells = np.ascontiguousarray(tmem.cells[where.column : where.column + where.columns])
    copies = where.by_row(cells.view(np.uint16).reshape(*cells.shape, 2))
    if len(copies) > 1 and (copies != copies[0]).any():
        raise UnsupportedPtx(
            f"sparsity metadata in TMEM column {where.column:#x} differ between the parts of N"
        )
    return nibbles(np.ascontiguousarray(copies[0]).view(np.uint8))


_MAX_SCALE = 15


class MmaCta(Protocol):
    """Memory of a CTA that an MMA needs: shared memory, uint8 (bytes,), its address, and tensor
    memory."""

    smem: np.ndarray
    smem_at: int
    tmem: Tmem


class Mma(NamedTuple):
    """The operands of an MMA, as `mma` takes them."""

    d: int
    a: SmemDesc | int
    b: SmemDesc
    instr: InstrDesc
    accumulate: bool
    disable_lanes: Sequence[int]
    scale_input_d: int
    scales: Scales | None
    shift: bool
    metadata: int | None = None


def mma(
    ctas: Sequence[MmaCta],
    d: int,
    a: SmemDesc | int,
    b: SmemDesc,
    instr: InstrDesc,
    accumulate: bool,
    *,
    disable_lanes: Sequence[int] = (),
    scale_input_d: int = 0,
    scales: Scales | None = None,
    shift: bool = False,
    metadata: int | None = None,
    sums: Rule | None = None,
) -> None:
    """Execute one MMA at once.

    Each CTA provides its M / len(ctas) rows of A and N / len(ctas) rows of B, and keeps its rows
    of D.
    Descriptors and addresses apply to every CTA alike.

    Args:
        ctas: the issuing CTA, or the pair in rank order (even first) for cta_group::2.
        d: TMEM address of D.
        a: descriptor, or TMEM address.
        b: descriptor.
        instr: the instruction descriptor.
        accumulate: enable-input-d; if false, D is not read.
        disable_lanes: 4 words per CTA; bit i of word w keeps lane 32 w + i unchanged.
        scale_input_d: D is first multiplied by 2**-scale_input_d (kinds f16 and tf32).
        scales: place of the scale factors of a block-scaled kind.
        shift: .ashift: the rows of A, in tensor memory, are shifted after they have been read.
        metadata: TMEM address of the metadata of a sparse A.
        sums: rule for the order and rounding of sums; None if free.

    Raises:
        HardwareRefusal: for shapes, addresses and arguments that hardware rejects.
        UnsupportedPtx: for unknown placements of A and of scale factors in tensor memory.
    """
    scaled_by = disable_lanes, scale_input_d, scales
    what = Mma(d, a, b, instr, accumulate, *scaled_by, shift, metadata)
    with np.errstate(all="ignore"):
        execute(ctas, what, sums)


def execute(ctas: Sequence[MmaCta], what: Mma, sums: Rule | None = None) -> None:
    """Execute `what` as `mma` does; the caller ignores floating-point errors."""
    d, a, instr, cta_group = what.d, what.a, what.instr, len(ctas)
    scales = what.scales
    require_shape(instr, cta_group)
    require_scales(instr, scales)
    scale = _scale(instr, what.accumulate, what.scale_input_d)
    protected = disabled_lanes(what.disable_lanes, cta_group)
    m, group = instr.data_path(cta_group)
    all_b = _read_operand_b(ctas, what.b, instr)
    for rank, cta in enumerate(ctas):
        own_a, own_b = _operands(cta, what, cta_group, all_b)
        cells = cta.tmem.accumulator(d, m, instr.n, group)
        if isinstance(a, int) and a >> 16 != d >> 16:  # PTX ISA, Layout F
            raise HardwareRefusal(
                f"A of M={m} at TMEM lane {a >> 16}, D at lane {d >> 16}; must be equal"
            )
        kept = None if protected is None else protected[rank]
        saved = None if kept is None else cta.tmem.cells[:, kept]
        if own_a.ndim > 2:
            own_b = own_b.reshape(len(own_a), -1, own_b.shape[-1])
        if sums is not None:
            _update_aligned(cells, own_b, own_a, instr, scale is not None, sums)
        else:
            a_t = own_a.swapaxes(-1, -2)
            _UPDATES[instr.d_format](cells, own_b, a_t, scale, instr.saturate)
        if saved is not None:
            cta.tmem.cells[:, kept] = saved
        if what.shift and isinstance(a, int):
            cta.tmem.shift_operand(a, m, group, line_bytes(instr.a_format, instr.a_k))


def _read_operand_b(ctas: Sequence[MmaCta], desc: SmemDesc, idesc: InstrDesc) -> np.ndarray:
    """All n rows of B, float32 (n, k), negated if exactly one operand is to be."""
    parts = [read_operand(cta.smem, desc, *idesc.shape_of_b(len(ctas))) for cta in ctas]
    b = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return -b if idesc.a_negate != idesc.b_negate else b


def _read_operand_a(cta: MmaCta, a: SmemDesc | int, idesc: InstrDesc, cta_group: int) -> np.ndarray:
    """Read the stored part of this CTA's rows of A, float32 (m / cta_group, k or half of it).

    With .ws and A in tensor memory, there is one such matrix for each part of N.
    """
    if isinstance(a, SmemDesc):
        return read_operand(cta.smem, a, *idesc.shape_of_a(cta_group))
    if idesc.a_mn_major:
        raise HardwareRefusal("MMA with MN-major A in TMEM, must be K-major")
    nbytes = line_bytes(idesc.a_format, idesc.a_k)
    m, group = idesc.data_path(cta_group)
    if idesc.stationary and group > 1:
        return decode_in_tmem(idesc.a_format, cta.tmem.operand_copies(a, m, group, nbytes))
    return decode_in_tmem(idesc.a_format, cta.tmem.operand_image(a, m, group, nbytes))


def _operands(cta: MmaCta, what: Mma, cta_group: int, b: np.ndarray) -> Sequence[np.ndarray]:
    """A and B of a CTA, float32; b: B without its scale factors."""
    instr = what.instr
    a = _read_operand_a(cta, what.a, instr, cta_group)
    if what.metadata is not None:
        where = metadata_at(what.metadata, instr, cta_group)
        a = expanded_parts(a, read_metadata(cta.tmem, where), LISTED)
    if what.scales is None:
        return a, b
    return _scale_operands(cta.tmem, (a, b), instr, what.scales, cta_group)


def _scale_operands(
    tmem: Tmem,
    operands: tuple[np.ndarray, np.ndarray],
    idesc: InstrDesc,
    scales: Scales,
    cta_group: int,
) -> list[np.ndarray]:
    """A and B times their scale factors."""
    ids, fmt = (idesc.a_scale_id, idesc.b_scale_id), idesc.scale_format or ""
    return [
        scaled(operand, read_scales(tmem, where, scales.blocks, first, fmt))
        for operand, where, first in zip(
            operands, scales.placements(idesc, cta_group), ids, strict=True
        )
    ]


def require_sparse(what: Mma) -> None:
    """Refuse an instruction and a descriptor of which one is sparse, and what PTX ISA, "Alignment
    restriction" excludes: metadata, or a sparse A, in other lanes than D."""
    sparse = what.metadata is not None
    if what.instr.sparse != sparse:
        names = ("tcgen05.mma", "tcgen05.mma.sp")
        raise HardwareRefusal(
            f"{names[sparse]} with the instruction descriptor of a"
            f" {('dense', 'sparse')[what.instr.sparse]} MMA"
        )
    if not sparse:
        return
    for name, address in (("its metadata", what.metadata), ("it", what.a)):
        if isinstance(address, int) and address >> 16 != what.d >> 16:
            raise HardwareRefusal(
                f"A is sparse: {name} at TMEM lane {address >> 16}, D at lane {what.d >> 16}; must"
                " be equal"
            )


def _update_aligned(
    d: np.ndarray,
    b: np.ndarray,
    a: np.ndarray,
    instr: InstrDesc,
    accumulated: bool,
    sums: Rule,
) -> None:
    """D = B A^T (+ D) in place, as a tensor core sums; exact except for the rounding of `sums`."""
    types = Types(instr.d_format, instr.b_format, instr.a_format)
    narrow = instr.d_format == "f16"
    before = None
    if accumulated:
        halves = (d & 0xFFFF).astype(np.uint16)
        values = formats.f16_to_f32(halves) if narrow else d.view(np.float32)
        before = values.reshape(len(b), len(a))
    total = accumulate(b, a, before, types, sums).reshape(d.shape)
    d[...] = formats.f32_to_f16(total) | UPPER_POISON if narrow else total.view(np.uint32)


def _update_f32(
    d: np.ndarray, b: np.ndarray, a_t: np.ndarray, scale: float | None, saturate: bool
) -> None:
    """D = B A^T (+ scale D), in place on the cells of `d`; scale None does not read D."""
    d = d.view(np.float32)
    if scale is None and d.ndim == 2:
        np.matmul(b, a_t, out=d)
        return
    product = np.matmul(b, a_t).reshape(d.shape)
    if scale is None:
        d[...] = product
        return
    if scale != 1.0:
        d *= np.float32(scale)
    d += product


def _update_f16(
    d: np.ndarray, b: np.ndarray, a_t: np.ndarray, scale: float | None, saturate: bool
) -> None:
    """Update f16 in the low halves of the cells, rounding once; the high halves become poison."""
    product = np.matmul(b, a_t).reshape(d.shape)
    if scale is not None:
        product += formats.f16_to_f32((d & 0xFFFF).astype(np.uint16)) * np.float32(scale)
    d[...] = formats.f32_to_f16(product) | UPPER_POISON


def _update_s32(
    d: np.ndarray, b: np.ndarray, a_t: np.ndarray, scale: float | None, saturate: bool
) -> None:
    """Update integers. 32 products of 8-bit values stay below 2**24, so the sgemm is exact."""
    total = np.matmul(b, a_t).astype(np.int64).reshape(d.shape)
    if scale is not None:
        total += d.view(np.int32)
    if saturate:
        total = total.clip(-(1 << 31), (1 << 31) - 1)
    d[...] = total.astype(np.uint32)


_UPDATES = {"f32": _update_f32, "f16": _update_f16, "s32": _update_s32}


def _scale(idesc: InstrDesc, accumulate: bool, scale_input_d: int) -> float | None:
    """The factor of D, None where D is not read; checked."""
    limit = _MAX_SCALE if idesc.kind in ("f16", "tf32") else 0
    if not 0 <= scale_input_d <= limit:
        raise HardwareRefusal(f"kind::{idesc.kind} scale-input-d {scale_input_d}, limit is {limit}")
    return 2.0**-scale_input_d if accumulate else None


def disabled_lanes(words: Sequence[int], cta_group: int) -> list[np.ndarray] | None:
    """Return the lanes, intp, that the mask protects in each CTA; None if there are none."""
    if words and len(words) != 4 * cta_group:
        raise HardwareRefusal(f"disable-output-lane of {len(words)} words, must be {4 * cta_group}")
    if not any(words):
        return None
    bits = np.unpackbits(np.array(words, "<u4").view(np.uint8), bitorder="little")
    return [np.flatnonzero(part) for part in bits.reshape(cta_group, -1)]
