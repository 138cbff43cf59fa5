"""Undefined data in memory: its readers and writers, and copies to global memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ptxemu.check import footprints
from ptxemu.check.agents import Ticket
from ptxemu.check.findings import Findings
from ptxemu.check.footprints import Cells, Where, byte_cells
from ptxemu.check.state import CtaState, States
from ptxemu.check.taint import Extent, Origins, Padding, RegisterFlow
from ptxemu.check.undefined import CODE, NEVER, rescale
from ptxemu.codegen.flow import METADATA, Flow
from ptxemu.machine.listener import Place
from ptxemu.machine.mma import Metadata, Mma, disabled_lanes, metadata_at
from ptxemu.machine.scale_factors import Placement
from ptxemu.machine.state import OFFSET_MASK, RANK_SHIFT, Cta, Warp
from ptxemu.machine.tensor_core import line_bytes
from ptxemu.machine.tensor_map import TensorMap
from ptxemu.machine.tma_tile import gather_tile, inside
from ptxemu.machine.tmem import Move
from ptxemu.machine.tmem_fill import Fill
from ptxemu.machine.umma_desc import InstrDesc, SmemDesc

_ATOMICS = ("atom", "red")
_WINDOW_SHIFT, _SHARED_WINDOW = 56, 1  # of generic addresses
_NO_LANES = np.zeros(0, np.intp)
_ALL_LANES = slice(None)


class Taint:
    """Follows undefined data between registers and memories."""

    def __init__(
        self, states: States, findings: Findings, flows: dict[int, Flow], padding: Padding
    ) -> None:
        self._states = states
        self._sites = findings.sites
        self._grain = states.grain
        self._flows = flows
        self._origins = Origins(findings)
        self._padding = padding
        self._of: dict[Warp, RegisterFlow] = {}

    def start_warp(self, w: Warp) -> None:
        self._of[w] = w.follower = RegisterFlow(w, self._flows, self._origins, self._padding)

    def forget(self) -> None:
        """Nobody follows the registers of warps any more."""
        self._of.clear()

    def flow_of(self, w: Warp) -> RegisterFlow:
        return self._of[w]

    # -- shared and local memory, by ordinary instructions ------------------------------------

    def simple(self, w: Warp, cta: Cta, write: bool) -> bool:
        """Whether an access of shared memory involves no undefined data except unwritten memory."""
        registers = self._of[w].registers
        if self._cta(cta).shared_codes.stored is not None or (
            write and registers.stored is not None
        ):
            return False
        registers.landed |= write
        return True

    def shared(
        self, w: Warp, cta: Cta, cells: Cells, lanes: np.ndarray | None, write: bool
    ) -> None:
        """Cells of one address for all lanes, or [cell, lane]."""
        where = cells.index()
        if write:
            self._write(w, cta, where, lanes)
        elif self._sites[w.at].root not in _ATOMICS:
            codes = self._cta(cta).shared_codes.read(where)
            if codes is not None:
                one = isinstance(where, slice)
                self._of[w].load(
                    _ALL_LANES if lanes is None else lanes,
                    codes[:, None] if one else codes,
                    self._extent(cta, where),
                )

    def _write(self, w: Warp, cta: Cta, where: Where, lanes: np.ndarray | None) -> None:
        registers = self._of[w].registers
        codes = registers.stored
        registers.landed = True
        if codes is not None:
            if isinstance(where, slice):
                codes = rescale(codes, where.stop - where.start).max(1)
            else:
                codes = rescale(codes, len(where))[:, lanes]
        self._cta(cta).shared_codes.write(where, codes)

    def _extent(self, cta: Cta, where: Where) -> Extent:
        """Space, first and last byte of cells of shared memory."""
        if isinstance(where, slice):
            cells = where.start, where.stop - 1
        else:
            cells = where.min(), where.max()
        first, last = (int(cell) * self._grain for cell in cells)
        return f"shared memory of {cta.name()}", first, last + self._grain - 1

    def local_access(
        self, w: Warp, lanes: np.ndarray, elements: np.ndarray, size: int, write: bool
    ) -> None:
        """Local memory: elements [element, lane] of `size` bytes."""
        registers = self._of[w].registers
        assert w.local is not None  # it is accessed
        codes = registers.local_codes(w.local.shape[1], size)
        if not write:
            found = codes[lanes, elements].max(2)
            if found.any():
                first, last = int(elements.min()) * size, int(elements.max() + 1) * size - 1
                self._of[w].load(lanes, found, ("local memory", first, last))
        elif registers.stored is None:
            codes[lanes, elements] = 0
        else:
            codes[lanes, elements] = rescale(registers.stored, len(elements))[:, lanes, None]
        registers.landed = True

    def atomic(self, w: Warp, space: str, name: str, address: int | np.ndarray, size: int) -> None:
        """atom and red, before any lane has acted."""
        if space == "global":
            return
        codes = np.zeros((1, 32), CODE)
        extent: Extent | None = None
        lanes = np.flatnonzero(w.frag.active())
        for lane, where in zip(lanes, w.lane_values(address), strict=True):
            if space == "generic" and where >> _WINDOW_SHIFT != _SHARED_WINDOW:
                continue
            cta = w.cta if space == "shared" else w.cluster.cta(where >> RANK_SHIFT & 0xFF)
            cells = self._bytes(where & OFFSET_MASK, size)
            found = self._cta(cta).shared_codes.read(cells)
            if found is not None:
                codes[0, lane] = found.max()
                extent = self._extent(cta, cells)
        if extent:
            self._of[w].load(_ALL_LANES, codes, extent)
            registers = self._of[w].registers
            if name != "exch" and registers.loaded is not None:
                registers.stored = np.full((1, 32), registers.loaded.max(), CODE)

    # -- tensor memory ------------------------------------------------------------------------

    def load(self, w: Warp, address: int, move: Move, cells: Cells) -> None:
        """tcgen05.ld of cells."""
        if not self._cta(w.cta).tensor_codes.suspects & cells.mask:
            return
        codes = self._cta(w.cta).tensor_codes.read(move, address, w.index % 4)
        if codes is not None:
            self._of[w].load(_ALL_LANES, codes, _columns(w.cta, address, len(codes)))

    def store(self, w: Warp, address: int, move: Move, cells: Cells) -> None:
        """tcgen05.st to cells."""
        registers = self._of[w].registers
        registers.landed = True
        if registers.stored is None and not self._cta(w.cta).tensor_codes.suspects & cells.mask:
            return
        self._cta(w.cta).tensor_codes.write(move, address, w.index % 4, registers.stored)

    def allocated(self, w: Warp, column: int, count: int, told: int) -> None:
        """tcgen05.alloc: what was stored in columns stays there until then."""
        self._cta(w.cta).tensor_codes.forget(column, count)
        self._write(w, w.cta, self._bytes(told, 4), None)

    def multiply(
        self,
        ticket: Ticket,
        ctas: Sequence[Cta],
        mma: Mma,
        product: footprints.Product,
        *,
        written: bool,
    ) -> None:
        """tcgen05.mma. A row of D is undefined where one of A or of its scale factors is, a column
        where a row of B is. Metadata of a sparse A must not be. written: all of the operands in
        shared memory is known to have been."""
        instr, group = mma.instr, len(ctas)
        if written and not mma.shift and mma.metadata is None:
            for cta in ctas:
                if self._suspected(cta, product):
                    break
            else:
                return
        n, m = instr.n // group, instr.m // group
        b_codes = [self._operand(ticket, cta, mma.b, instr.shape_of_b(group)) for cta in ctas]
        a_codes = [self._operand_a(ticket, cta, mma.a, instr, group) for cta in ctas]
        for cta in ctas:
            if mma.shift and isinstance(mma.a, int):
                self._cta(cta).tensor_codes.shift(mma.a, instr, group)
            if mma.metadata is not None:
                self._metadata(ticket, cta, metadata_at(mma.metadata, instr, group))
        kept = disabled_lanes(mma.disable_lanes, group) or [_NO_LANES] * group
        for rank, cta in enumerate(ctas):
            memory = self._cta(cta).tensor_codes
            rows, columns = [a_codes[rank]], [_joined(b_codes, n)]
            if mma.scales:
                of_a, of_b = mma.scales.placements(instr, group)
                rows.append(self._scales(ticket, cta, of_a))
                columns.append(self._scales(ticket, cta, of_b))
            clean = all(part is None for part in rows + columns)
            if clean and not memory.suspected(mma.d, instr, group):
                continue
            codes = np.zeros((instr.n, m), CODE)
            if mma.accumulate:
                path, parts = instr.data_path(group)
                before = memory.accumulator(mma.d, path, instr.n, parts).reshape(instr.n, m)
                codes = self._named_columns(ticket, cta, before & NEVER, (mma.d, instr.n))
            for part in (part for part in rows if part is not None):
                codes = np.maximum(codes, part)
            for part in (part for part in columns if part is not None):
                codes = np.maximum(codes, part[:, None])
            memory.accumulate(mma.d, instr, group, codes, kept[rank])

    def _suspected(self, cta: Cta, product: footprints.Product) -> bool:
        """Whether undefined data may have been stored where an MMA reads or writes."""
        state = self._states.ctas[cta]
        stored = state.shared_codes.stored is not None
        return stored or state.tensor_codes.suspects & product.tensor != 0

    def fill(
        self, ticket: Ticket, ctas: Sequence[Cta], address: int, desc: SmemDesc, shape: Fill
    ) -> None:
        """tcgen05.cp."""
        for cta in ctas:
            state = self._cta(cta)
            codes = shape.sources(state.shared_codes.words(desc, shape.matrix))
            if codes is not None:
                cells = footprints.matrix_cells(desc, shape.matrix, self._grain)
                codes = self._named(ticket, codes, self._extent(cta, cells.index()))
            state.tensor_codes.fill(address, shape, codes)

    def shift(self, ctas: Sequence[Cta], address: int) -> None:
        """tcgen05.shift."""
        for cta in ctas:
            self._cta(cta).tensor_codes.shift_quarter(address)

    def _operand_a(
        self, ticket: Ticket, cta: Cta, a: SmemDesc | int, instr: InstrDesc, group: int
    ) -> np.ndarray | None:
        """The code of each row of A, in shared or tensor memory."""
        if not isinstance(a, int):
            return self._operand(ticket, cta, a, instr.shape_of_a(group))
        codes = self._cta(cta).tensor_codes.operand(a, instr, group)
        count = line_bytes(instr.a_format, instr.a_k) // 4
        return None if codes is None else self._named_columns(ticket, cta, codes, (a, count))

    def _metadata(self, ticket: Ticket, cta: Cta, where: Metadata) -> None:
        codes = self._cta(cta).tensor_codes.metadata(where)
        if codes is not None:
            extent = (where.column, where.columns)
            code = int(self._named_columns(ticket, cta, codes, extent).max())
            self._origins.reached(ticket.agent.agent, ticket.site, code, METADATA)

    def _scales(self, ticket: Ticket, cta: Cta, where: Placement) -> np.ndarray | None:
        """The code of the scale factors of each row of A or B."""
        codes = self._cta(cta).tensor_codes.scales(where)
        return None if codes is None else self._named_columns(ticket, cta, codes, where.columns())

    def _operand(
        self, ticket: Ticket, cta: Cta, desc: SmemDesc, shape: tuple[int, int, str, bool]
    ) -> np.ndarray | None:
        """The code of each row of an operand in shared memory."""
        codes = self._cta(cta).shared_codes.operand(desc, *shape)
        if codes is None:
            return None
        cells = footprints.operand_cells(desc, *shape, self._grain)
        return self._named(ticket, codes, self._extent(cta, cells.index()))

    # -- asynchronous copies ------------------------------------------------------------------

    def issue(self, w: Warp, ticket: Ticket) -> None:
        """Record undefined data that st.async carries."""
        registers = self._of[w].registers
        if registers.stored is not None:
            ticket.undefined = int(registers.stored.max())
            registers.landed = True

    def land(self, ticket: Ticket, cta: Cta, cells: Cells) -> None:
        """An asynchronous operation writes shared memory."""
        codes = self._cta(cta).shared_codes
        if ticket.undefined or codes.stored is not None:
            codes.write(cells.index(), ticket.undefined or None)

    def tile_read(
        self, ticket: Ticket, cta: Cta, tm: TensorMap, position: tuple[int, ...], low: int
    ) -> None:
        """A tensor store or reduction: what lies outside the tensor is dropped."""
        memory = self._cta(cta).shared_codes
        codes = memory.read(self._bytes(low, tm.box_bytes))
        if codes is None:
            return
        image = gather_tile(tm, memory.image(), low)
        if inside(tm, position, image).any():
            self._stored(ticket, cta, low, tm.box_bytes, codes)

    def bulk_read(self, ticket: Ticket, cta: Cta, low: int, nbytes: int) -> None:
        """A bulk store or reduction."""
        codes = self._cta(cta).shared_codes.read(self._bytes(low, nbytes))
        if codes is not None:
            self._stored(ticket, cta, low, nbytes, codes)

    def _stored(self, ticket: Ticket, cta: Cta, low: int, nbytes: int, codes: np.ndarray) -> None:
        named = self._named(ticket, codes, self._extent(cta, self._bytes(low, nbytes)))
        self._origins.reached(ticket.agent.agent, ticket.site, int(named.max()), "global memory")

    def send(self, source: Place, target: Place, nbytes: int) -> None:
        """A bulk copy between CTAs."""
        codes = self._cta(source[0]).shared_codes.read(self._bytes(source[1], nbytes))
        self._cta(target[0]).shared_codes.write(self._bytes(target[1], nbytes), codes)

    # -- cells --------------------------------------------------------------------------------

    def _named(self, ticket: Ticket, codes: np.ndarray, extent: Extent) -> np.ndarray:
        return self._origins.named(codes, ticket.site, ticket.agent.agent, extent)

    def _named_columns(
        self, ticket: Ticket, cta: Cta, codes: np.ndarray, where: tuple[int, int]
    ) -> np.ndarray:
        """Codes that a unit has read in tensor memory; where: address, number of columns."""
        return self._named(ticket, codes.astype(CODE), _columns(cta, *where))

    def _cta(self, cta: Cta) -> CtaState:
        return self._states.ctas[cta]

    def _bytes(self, low: int, nbytes: int) -> slice:
        return byte_cells(low, nbytes, self._grain).index()


def _joined(parts: list[np.ndarray | None], rows: int) -> np.ndarray | None:
    """The codes of the CTAs' parts of B, of so many rows each."""
    if all(part is None for part in parts):
        return None
    return np.concatenate([np.zeros(rows, CODE) if part is None else part for part in parts])


def _columns(cta: Cta, address: int, count: int) -> Extent:
    column = address & 0xFFFF
    return f"tensor memory of {cta.name()}", column, column + count - 1
