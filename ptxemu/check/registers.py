"""What registers of a warp hold undefined data, and the instruction that is moving some."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ptxemu.check.rules import ALL, both_halves, lanes_of
from ptxemu.check.undefined import CODE, NEVER, rescale
from ptxemu.codegen.flow import Flow
from ptxemu.codegen.namespace import bits_mask, mask_bits


class Registers:
    """masks: as in `rules`, of the registers that are not defined in all lanes; mostly empty.
    origins: by the same names, the code of where the data comes from.

    Of the instruction that is running: loaded, codes [row, lane] that memory gave, rows being equal
    parts of what a lane reads; stored, the same of what it writes, and `landed` whether that was
    any memory but global.
    """

    __slots__ = ("masks", "origins", "loaded", "stored", "landed", "local")

    def __init__(self) -> None:
        self.masks: dict[str, int] = {}
        self.origins: dict[str, int] = {}
        self.loaded: np.ndarray | None = None
        self.stored: np.ndarray | None = None
        self.landed = False
        self.local: np.ndarray | None = None  # codes of local memory, [lane, byte]

    def begin(self) -> None:
        """An instruction that accesses memory."""
        self.loaded = self.stored = None
        self.landed = False

    def set(self, name: str | None, mask: int, mb: int, origin: int) -> None:
        """A register is written in lanes `mb`."""
        if name is None:
            return
        active = both_halves(mb)
        kept = self.masks.get(name, 0) & ~active
        mask &= active
        if mask:
            self.origins[name] = origin
        if kept | mask:
            self.masks[name] = kept | mask
        else:
            self.masks.pop(name, None)

    def clear(self, names: Iterable[str | None], mb: int) -> None:
        """Registers are written with defined data in lanes `mb`."""
        for name in names:
            if name in self.masks:
                self.set(name, 0, mb, 0)

    def keep(self, names: frozenset[str], mb: int) -> None:
        """No other register of lanes `mb` will be read again."""
        self.clear([name for name in self.masks if name not in names], mb)

    def undefined(self, name: str | None, mb: int) -> bool:
        return name is not None and lanes_of(self.masks.get(name, 0)) & mb != 0

    # -- memory -------------------------------------------------------------------------------

    def load(self, lanes: np.ndarray | slice, codes: np.ndarray) -> None:
        """Memory gave `lanes` undefined data: codes [row, lane], or one column for all."""
        if self.loaded is None:
            self.loaded = np.zeros((len(codes), 32), CODE)
        self.loaded[:, lanes] = codes

    def take_loaded(self, flow: Flow, mb: int) -> None:
        """What was loaded goes to the targets."""
        if self.loaded is None or not flow.targets:
            self.clear(flow.targets, mb)
            return
        parts = 2 if flow.element_bytes >= 8 else 1
        count = parts * len(flow.targets)
        if flow.kind == "load matrix":
            codes = _from_matrix(self.loaded, count, flow.instr.parts)
        else:
            codes = rescale(self.loaded, count)
        for k, name in enumerate(flow.targets):
            rows = codes[parts * k : parts * (k + 1)]
            low, high = mask_bits(rows[0] != 0), mask_bits(rows[-1] != 0)
            mask = low | high << 32 if name in flow.wide else low | high
            self.set(name, mask, mb, int(rows.max()))

    def codes_of(self, flow: Flow, mb: int) -> np.ndarray | None:
        """What a store would write: codes [row, lane]; None where all is defined."""
        if not any(self.undefined(name, mb) for name in flow.sources):
            return None
        parts = 2 if flow.element_bytes >= 8 else 1
        rows = []
        for name in flow.sources:
            mask, origin = self.masks.get(name or "", 0), self.origins.get(name or "", 0)
            halves = (mask & ALL, mask >> 32) if name in flow.wide else (mask, mask)
            rows += [bits_mask(half & mb) * CODE(origin) for half in halves[:parts]]
        codes = np.array(rows, CODE)
        if flow.kind == "store matrix":
            of = flow.instr.parts
            elements = _bytes_stored(codes) if "b8" in of else _stored(codes, "trans" in of)
            return _to_rows(elements)
        if flow.kind == "atomic":
            codes[:] = codes.max()  # lanes act one after the other, maybe on one word
        return codes

    # -- local memory -------------------------------------------------------------------------

    def local_codes(self, nbytes: int, size: int) -> np.ndarray:
        """[lane, element, byte of it]."""
        if self.local is None:
            self.local = np.full((32, nbytes), NEVER, CODE)
        return self.local.reshape(32, -1, size)


def _from_matrix(codes: np.ndarray, count: int, parts: tuple[str, ...]) -> np.ndarray:
    """ldmatrix: codes of rows [part, matrix and row] -> of registers [matrix, lane]."""
    pairs = rescale(codes, 8)[:, : 8 * count].T
    if "m8n8" not in parts:
        return _from_byte_matrix(pairs, count, parts)
    elements = pairs.reshape(count, 8, 8)
    if "trans" in parts:
        elements = elements.transpose(0, 2, 1)
    return elements.reshape(count, 32, 2).max(2)


def _from_byte_matrix(pairs: np.ndarray, count: int, parts: tuple[str, ...]) -> np.ndarray:
    """The same of 16 elements in a row, each of which has bits of one 16-bit part or of two. pairs:
    codes [row, 16-bit part]."""
    bits = {"b6x16_p32": 6, "b4x16_p64": 4}.get(parts[-1], 8)
    start = np.arange(16) * bits
    elements = np.maximum(pairs[:, start // 16], pairs[:, (start + bits - 1) // 16])
    if "trans" in parts:
        elements = elements.reshape(-1, 16, 2, 8).transpose(0, 2, 3, 1)
    return elements.reshape(count, 32, 4).max(2)


def _stored(codes: np.ndarray, transposed: bool) -> np.ndarray:
    """stmatrix: codes of registers [matrix, lane] -> of elements [matrix, row, element]."""
    elements = np.repeat(codes, 2, axis=1).reshape(len(codes), 8, 8)
    return elements.transpose(0, 2, 1) if transposed else elements


def _bytes_stored(codes: np.ndarray) -> np.ndarray:
    """The same of b8, for pairs of elements: byte m of row r is of lane 4 (m % 8) + r / 2."""
    pairs = codes.reshape(-1, 4, 2, 4).max(2)  # [matrix, pair of them, lane % 4]
    return np.tile(np.repeat(pairs.transpose(0, 2, 1), 2, axis=1), (1, 1, 2))


def _to_rows(elements: np.ndarray) -> np.ndarray:
    """[element, matrix and row]."""
    out = np.zeros((8, 32), CODE)
    out[:, : 8 * len(elements)] = elements.reshape(-1, 8).T
    return out
