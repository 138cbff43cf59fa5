"""Undefined data in memory: what reads and writes it, and what takes it to global memory."""

from __future__ import annotations

import numpy as np

from ptxemu.check import footprints
from ptxemu.check.agents import Ticket
from ptxemu.check.shadow import Where
from ptxemu.check.taint import Taint
from ptxemu.check.undefined import CODE, NEVER, SharedCodes, TensorCodes, rescale
from ptxemu.machine.cta import OFFSET_MASK, RANK_SHIFT
from ptxemu.machine.mma import disabled_lanes
from ptxemu.machine.operand_format import line_bytes
from ptxemu.machine.scale_factors import Placement
from ptxemu.machine.tma_tile import gather_tile, inside

_ATOMICS = ("atom", "red")
_WINDOW_SHIFT, _SHARED_WINDOW = 56, 1  # of generic addresses
_NO_LANES = np.zeros(0, np.intp)


class TaintedMemory(Taint):
    """The part of the checker that follows undefined data through memory."""

    def cta_started(self, cta: object) -> None:
        super().cta_started(cta)
        cta.shared_codes = SharedCodes(cta.shared_shadow.last, self.grain)
        cta.tensor_codes = TensorCodes()

    # -- shared and local memory, by ordinary instructions ------------------------------------

    def shared(
        self,
        w: object,
        cta: object,
        starts: int | np.ndarray,
        nbytes: int,
        lanes: np.ndarray | None,
        write: bool,
    ) -> None:
        w.taint.lanes = lanes
        super().shared(w, cta, starts, nbytes, lanes, write)

    def _compare(
        self, shadow: object, cta: object, where: Where, by: object, mark: object, write: bool
    ) -> None:
        if shadow.space == "shared":
            if not isinstance(by, Ticket):
                self._accessed(by.warp, cta, where, write)
            elif write:
                cta.shared_codes.write(where, by.undefined or None)
        super()._compare(shadow, cta, where, by, mark, write)

    def _accessed(self, w: object, cta: object, where: Where, write: bool) -> None:
        """Cells of one address for all lanes, or [cell, lane]."""
        memory, one = cta.shared_codes, isinstance(where, slice)
        if write:
            codes = w.taint.stored
            w.taint.landed = True
            if codes is not None:
                codes = rescale(codes, where.stop - where.start if one else len(where))
                codes = codes.max(1) if one else codes[:, w.taint.lanes]
            memory.write(where, codes)
        elif self.sites[w.at].root not in _ATOMICS:
            codes = memory.read(where)
            if codes is not None:
                lanes = slice(None) if one else w.taint.lanes
                codes = codes[:, None] if one else codes
                self._loaded(w, lanes, codes, self._extent(cta, where))

    def _extent(self, cta: object, where: Where) -> tuple[str, int, int]:
        """Space, first and last byte of cells of shared memory."""
        cells = (
            (where.start, where.stop - 1)
            if isinstance(where, slice)
            else (where.min(), where.max())
        )
        first, last = (int(cell) * self.grain for cell in cells)
        return f"shared memory of {cta.name()}", first, last + self.grain - 1

    def local(
        self, w: object, lanes: np.ndarray, elements: np.ndarray, size: int, write: bool
    ) -> None:
        """Local memory: elements [element, lane] of `size` bytes."""
        codes = w.taint.local_codes(w.local.shape[1], size)
        if not write:
            found = codes[lanes, elements].max(2)
            if found.any():
                extent = (
                    "local memory",
                    int(elements.min()) * size,
                    int(elements.max() + 1) * size - 1,
                )
                self._loaded(w, lanes, found, extent)
        elif w.taint.stored is None:
            codes[lanes, elements] = 0
        else:
            codes[lanes, elements] = rescale(w.taint.stored, len(elements))[:, lanes, None]
        w.taint.landed = True

    def atomic(self, w: object, space: str, name: str, address: object, size: int) -> None:
        """atom and red, before any lane has acted."""
        if space == "global":
            return
        codes = np.zeros((1, 32), CODE)
        extent: tuple = ()
        lanes = np.flatnonzero(w.frag.active())
        for lane, where in zip(lanes, w.lane_values(address), strict=True):
            if space == "generic" and where >> _WINDOW_SHIFT != _SHARED_WINDOW:
                continue
            cta = w.cta if space == "shared" else w.cluster.cta(where >> RANK_SHIFT & 0xFF)
            cells = self.shared_bytes(where & OFFSET_MASK, size)
            found = cta.shared_codes.read(cells)
            if found is not None:
                codes[0, lane] = found.max()
                extent = self._extent(cta, cells)
        if extent:
            self._loaded(w, slice(None), codes, extent)
            if name != "exch":
                w.taint.stored = np.full((1, 32), w.taint.loaded.max(), CODE)

    # -- tensor memory ------------------------------------------------------------------------

    def moved(self, w: object, address: int, move: tuple, write: bool) -> int:
        memory, warp_in_group = w.cta.tensor_codes, w.index % 4
        if write:
            w.taint.landed = True
            memory.write(move, address, warp_in_group, w.taint.stored)
        else:
            codes = memory.read(move, address, warp_in_group)
            if codes is not None:
                extent = _columns(w.cta, address, len(codes))
                self._loaded(w, slice(None), codes, extent)
        return super().moved(w, address, move, write)

    def columns(self, w: object, column: int, count: int, *rest: object) -> None:
        super().columns(w, column, count, *rest)
        if column in w.cta.tmem.allocations:  # the data stays there until then
            w.cta.tensor_codes.forget(column, count)

    def multiplied(
        self, ticket: Ticket, ctas: list, d: int, operands: tuple, instr: object, how: tuple
    ) -> None:
        """tcgen05.mma, as `multiply`; how: whether D is read, and the words of its disabled lanes.
        A row of D is undefined where one of A or of its scale factors is, a column where a row of B
        is."""
        a, b, scales, shifted = operands
        group, n, m = len(ctas), instr.n // len(ctas), instr.m // len(ctas)
        b_shape = (n, instr.k, instr.b_format, instr.b_mn_major)
        b_codes = [self._operand(ticket, cta, b, b_shape) for cta in ctas]
        a_codes = [self._operand_a(ticket, cta, a, instr, m) for cta in ctas]
        for cta in ctas if shifted else ():
            cta.tensor_codes.shift(a, instr, group)
        kept = disabled_lanes(how[1], group) or [_NO_LANES] * group
        for rank, cta in enumerate(ctas):
            memory = cta.tensor_codes
            rows, columns = [a_codes[rank]], [_joined(b_codes, n)]
            if scales:
                of_a, of_b = scales.placements(instr, group)
                rows.append(self._scales(ticket, cta, of_a))
                columns.append(self._scales(ticket, cta, of_b))
            clean = all(part is None for part in rows + columns)
            if clean and not memory.suspected(d, instr, group):
                continue
            codes = np.zeros((instr.n, m), CODE)
            if how[0]:
                before = memory.accumulator(d, instr.m, instr.n, group).reshape(instr.n, m)
                codes = self._named_columns(ticket, cta, before & NEVER, (d, instr.n))
            for part in (part for part in rows if part is not None):
                codes = np.maximum(codes, part)
            for part in (part for part in columns if part is not None):
                codes = np.maximum(codes, part[:, None])
            memory.accumulate(d, instr, group, codes, kept[rank])

    def filled(self, ticket: Ticket, ctas: list, address: int, desc: object, shape: object) -> None:
        """tcgen05.cp, as `fill`."""
        for cta in ctas:
            codes = shape.sources(cta.shared_codes.words(desc, shape.matrix))
            if codes is not None:
                extent = self._extent(cta, footprints.matrix_cells(desc, shape.matrix, self.grain))
                codes = self._named(codes, ticket.site, ticket.agent.agent, extent)
            cta.tensor_codes.fill(address, shape, codes)

    def _operand_a(
        self, ticket: Ticket, cta: object, a: object, instr: object, rows: int
    ) -> np.ndarray | None:
        """The code of each row of A, in shared or tensor memory."""
        if not isinstance(a, int):
            shape = (rows, instr.k, instr.a_format, instr.a_mn_major)
            return self._operand(ticket, cta, a, shape)
        codes = cta.tensor_codes.operand(a, instr, rows)
        count = line_bytes(instr.a_format, instr.k) // 4
        return None if codes is None else self._named_columns(ticket, cta, codes, (a, count))

    def _scales(self, ticket: Ticket, cta: object, where: Placement) -> np.ndarray | None:
        """The code of the scale factors of each row of A or B."""
        codes = cta.tensor_codes.scales(where)
        return None if codes is None else self._named_columns(ticket, cta, codes, where.columns())

    def _named_columns(
        self, ticket: Ticket, cta: object, codes: np.ndarray, where: tuple[int, int]
    ) -> np.ndarray:
        """Codes that a unit has read in tensor memory; where: address, number of columns."""
        extent = _columns(cta, *where)
        return self._named(codes.astype(CODE), ticket.site, ticket.agent.agent, extent)

    def _operand(
        self, ticket: Ticket, cta: object, desc: object, shape: tuple
    ) -> np.ndarray | None:
        """The code of each row of an operand in shared memory."""
        codes = cta.shared_codes.operand(desc, *shape)
        if codes is None:
            return None
        extent = self._extent(cta, footprints.operand_cells(desc, *shape, self.grain))
        return self._named(codes, ticket.site, ticket.agent.agent, extent)

    # -- asynchronous copies ------------------------------------------------------------------

    def ticket(self, w: object, kind: str = "") -> Ticket:
        """st.async takes its data along."""
        ticket = super().ticket(w, kind)
        if w.taint.stored is not None:
            ticket.undefined = int(w.taint.stored.max())
            w.taint.landed = True
        return ticket

    def tile_stored(
        self, ticket: Ticket, cta: object, tm: object, position: tuple, offset: int
    ) -> None:
        """A tensor store or reduction: what lies outside the tensor is dropped."""
        codes = cta.shared_codes.read(self.shared_bytes(offset, tm.box_bytes))
        if codes is None:
            return
        image = gather_tile(tm, cta.shared_codes.image(), offset)
        if inside(tm, position, image).any():
            self._stored(ticket, cta, offset, tm.box_bytes, codes)

    def bytes_stored(self, ticket: Ticket, cta: object, low: int, nbytes: int) -> None:
        """A bulk store or reduction."""
        codes = cta.shared_codes.read(self.shared_bytes(low, nbytes))
        if codes is not None:
            self._stored(ticket, cta, low, nbytes, codes)

    def _stored(
        self, ticket: Ticket, cta: object, low: int, nbytes: int, codes: np.ndarray
    ) -> None:
        agent = ticket.agent.agent
        extent = self._extent(cta, self.shared_bytes(low, nbytes))
        code = int(self._named(codes, ticket.site, agent, extent).max())
        self._reached(agent, ticket.site, code, "global memory")

    def bytes_copied(self, source: tuple, target: tuple, nbytes: int) -> None:
        """A bulk copy between CTAs, each (CTA, offset)."""
        codes = source[0].shared_codes.read(self.shared_bytes(source[1], nbytes))
        target[0].shared_codes.write(self.shared_bytes(target[1], nbytes), codes)


def _joined(parts: list[np.ndarray | None], rows: int) -> np.ndarray | None:
    """The codes of the CTAs' parts of B, of so many rows each."""
    if all(part is None for part in parts):
        return None
    return np.concatenate([np.zeros(rows, CODE) if part is None else part for part in parts])


def _columns(cta: object, address: int, count: int) -> tuple[str, int, int]:
    column = address & 0xFFFF
    return f"tensor memory of {cta.name()}", column, column + count - 1
