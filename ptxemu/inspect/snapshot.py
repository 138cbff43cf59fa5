"""A picture of a CTA and a warp at one moment, as arrays: memories, tiles, registers, writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ptxemu.codegen.namespace import GLOBALS, bits_mask, full
from ptxemu.codegen.values import DTYPE
from ptxemu.machine.listener import Listener, Place, Position
from ptxemu.machine.tensor_map import TensorMap
from ptxemu.numerics import formats
from ptxemu.numerics.formats import ELEMENTS, decoded
from ptxemu.numerics.swizzle import BY_NAME, Swizzle
from ptxemu.request import Region
from ptxemu.syntax.tree import Instr

if TYPE_CHECKING:
    from ptxemu.machine.async_ops import Work
    from ptxemu.machine.state import Cta


def block_positions(
    start: int, rows: int, row_bytes: int, swizzle: Swizzle, pitch: int = 0
) -> np.ndarray:
    """Return the position of each byte of a matrix in shared memory, intp [row, byte].

    pitch: bytes from one row to the next; 0 for contiguous rows. Rows longer than the swizzle's
    span are cut into blocks of that width, each of which holds all rows.
    """
    width = min(row_bytes, swizzle.span) if swizzle.bits else row_bytes
    byte = np.arange(row_bytes, dtype=np.intp)
    step = pitch or width
    block, within = byte // width, byte % width
    row = np.arange(rows, dtype=np.intp)[:, None]
    return swizzle.apply(start + block * rows * step + row * step + within)


def tile_positions(tm: TensorMap, start: int) -> np.ndarray:
    """Return the positions of a TMA box, [row, byte]; dimension 1 of the box is the fastest row."""
    return block_positions(start, tm.rows, tm.smem_row_bytes, tm.swizzle, tm.pitch)


def tile_dtype(tm: TensorMap) -> str:
    """The element type in shared memory; packed 4- and 6-bit types are shown as bytes."""
    return tm.dtype if tm.dtype in ELEMENTS else "u8"


def tile_shape(tm: TensorMap) -> tuple[int, ...]:
    """Return the shape of the box as a tensor of `tile_dtype`, the contiguous dimension last."""
    size, _ = ELEMENTS[tile_dtype(tm)]
    return (*reversed(tm.box[1:]), tm.smem_row_bytes // size)


def tensor_memory(cells: np.ndarray, dtype: str) -> np.ndarray:
    """Cells [column, lane] as float32 [lane, element]: one f32 to a cell, or two bf16 or f16."""
    lanes = np.ascontiguousarray(cells.T)
    return decoded(lanes.view(np.uint8), dtype)


def text_of(matrix: np.ndarray, title: str) -> str:
    """Return a matrix as lines with numbered rows, prefixed by the leading indices."""
    rows = matrix.reshape(-1, matrix.shape[-1]) if matrix.ndim > 1 else matrix.reshape(1, -1)
    outer = matrix.shape[:-1]
    form = _number if rows.dtype.kind == "f" else str
    lines = [f"{title}: shape {tuple(matrix.shape)}"]
    for index, row in enumerate(rows):
        place = ",".join(map(str, np.unravel_index(index, outer))) if outer else "0"
        lines.append(f"[{place:>5}] " + " ".join(f"{form(value):>9}" for value in row.tolist()))
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:.4g}"


_SHOWN = 4  # words of a value
_LINE = 120  # characters of an instruction
_EXPONENT = 12  # decimal, of what may be meant as f32


@dataclass
class Write:
    """A write to a watched range.

    Attributes:
        agent: Such as "warp 4 of cta(0,0,0)" or "TMA, issued by ...".
        first: First byte written in the watched range.
        last: Last byte written in it.
        low: Begin of the watched range.
        value: Whole range after the write: bytes as uint8, or cells of tensor memory as uint32
            [column, lane]. None until it is read back.
    """

    order: int
    agent: str
    instr: Instr | None
    lanes: tuple[int, ...]
    first: int
    last: int
    low: int
    value: np.ndarray | None = None

    @property
    def source(self) -> str:
        """Place such as "file.py:257"; "" without line information."""
        return self.instr.source if self.instr else ""

    def __str__(self) -> str:
        parts = [f"#{self.order} {self.agent}"]
        if self.lanes:
            parts.append(f"lanes {_ranges(self.lanes)}")
        parts.append(self._what())
        if self.source:
            parts.append(self.source)
        if self.instr:
            parts.append(f"PTX line {self.instr.line} `{short_text(self.instr)}`")
        return "  ".join(parts)

    def _what(self) -> str:
        """The range, and the first words that are in it now."""
        if self.value is not None and self.value.ndim == 2:
            words = self.value[self.first - self.low][:_SHOWN]
            return f"columns {self.first}..{self.last}, from lane 0 {words_text(words)}"
        place = f"[{self.first:#x}..{self.last:#x}]"
        if self.value is None:
            return place
        raw = self.value[self.first - self.low : self.last + 1 - self.low]
        size = next(n for n in (4, 2, 1) if self.first % n == 0 and len(raw) % n == 0)
        return f"{place} = {words_text(raw.view(f'u{size}')[:_SHOWN])}"


def short_text(instr: Instr) -> str:
    """An instruction in one line; some have a hundred operands."""
    text = " ".join(instr.text.split())
    return text if len(text) <= _LINE else f"{text[:_LINE]}..."


def words_text(words: np.ndarray) -> str:
    """Format words in hex, and also as f32 if they are 32 bits of a plausible magnitude."""
    text = " ".join(f"{int(word):#x}" for word in words)
    if words.dtype.itemsize != 4:
        return text
    with np.errstate(all="ignore"):
        floats = np.ascontiguousarray(words).view(np.float32)
        plausible = (floats == 0) | (np.abs(np.log10(np.abs(floats))) < _EXPONENT)
    if not plausible.all() or not words.any():
        return text
    return f"{text} (f32 {' '.join(f'{value:.6g}' for value in floats.tolist())})"


def _ranges(lanes: Iterable[int]) -> str:
    """Format lane numbers as ranges: 0, 1, 2, 3, 7 gives "0..3,7"."""
    runs: list[list[int]] = []
    for lane in sorted(set(lanes)):
        if runs and lane == runs[-1][1] + 1:
            runs[-1][1] = lane
        else:
            runs.append([lane, lane])
    return ",".join(f"{a}..{b}" if b > a else str(a) for a, b in runs)


class Brought(NamedTuple):
    """A box at a position of its tensor; `loaded`, else stored from shared memory."""

    tm: TensorMap
    position: Position
    loaded: bool


class Tiles(Listener):
    """Tiles of every CTA of a launch, by offset in shared memory."""

    def __init__(self) -> None:
        self._of: dict[Cta, dict[int, Brought]] = {}

    def of(self, cta: Cta) -> Iterator[tuple[int, Brought]]:
        yield from sorted(self._of.get(cta, {}).items())

    def tile_loaded(
        self, work: Work, tm: TensorMap, position: Position, places: list[Place]
    ) -> None:
        for cta, offset in places:
            self._put(cta, offset, Brought(tm, position, True))

    def tile_read(self, work: Work, cta: Cta, tm: TensorMap, position: Position, low: int) -> None:
        self._put(cta, low, Brought(tm, position, False))

    def cta_ended(self, cta: Cta) -> None:
        self._of.pop(cta, None)

    def _put(self, cta: Cta, offset: int, brought: Brought) -> None:
        tiles, end = self._of.setdefault(cta, {}), offset + brought.tm.box_bytes
        hidden = [o for o, b in tiles.items() if o < end and o + b.tm.box_bytes > offset]
        for other in hidden:
            del tiles[other]
        tiles[offset] = brought


@dataclass(frozen=True)
class Register:
    """The value of a register in 32 lanes. `values`: in the type that it is kept in; of a pair
    (64 bits kept as two f32) the 64 bits. `declared`: in the PTX, such as "b32"."""

    name: str
    declared: str
    values: np.ndarray

    @property
    def bits(self) -> np.ndarray:
        """Values as unsigned integers."""
        if self.values.dtype == np.bool_:
            return self.values.astype(np.uint8)
        return self.values.view(f"u{self.values.dtype.itemsize}")

    def number(self, lanes: np.ndarray) -> Any:
        """Return the value for a condition; one number if all lanes agree.

        It is a float if declared so, else unsigned bits (the lower 64 of 128).
        """
        width = self.values.dtype.itemsize
        found = self.bits.view(f"f{width}") if self.declared in ("f32", "f64") else self.bits
        found = found[lanes] if found.ndim == 1 else found[lanes, 0]
        return found[0].item() if (found == found[0]).all() else found.astype(object)


@dataclass(frozen=True)
class Tile:
    """A matrix in shared memory, swizzle undone.

    Attributes:
        values: Elements in numpy's type for `dtype`.
        positions: Position of each byte in shared memory, [row, byte].
        origin: How the tile is known.
    """

    name: str
    dtype: str
    values: np.ndarray
    positions: np.ndarray
    origin: str

    def byte_of(self, index: tuple[int, ...]) -> int:
        """Offset in shared memory of an element."""
        flat = int(np.ravel_multi_index(index, self.values.shape))
        return int(self.positions.reshape(-1)[flat * formats.ELEMENTS[self.dtype][0]])


@dataclass(frozen=True)
class Snapshot:
    """Picture that a `Stop` requested, taken when a warp reached its line, before execution.

    Attributes:
        at: Line of the stop.
        instr: Next instruction.
        cta, cta_index, warp: Warp that reached the line.
        lanes: Its active lanes, a bit mask.
        step: Earlier arrivals of this warp.
        source: Python line of the instruction.
        shared: Bytes of the CTA's shared memory, uint8.
        symbols: Offset there of each name.
        tensor: Cells of tensor memory, uint32 [column, lane].
        allocations: Number of columns, by first column.
        registers: By name, live or used in `when`, as well as operands.
        operands: Names of the instruction's registers.
        tiles: Named regions, then tiles that TMA loaded to or stored from shared memory.
        writes: Histories of watches so far, by title.
    """

    at: str
    entry: str
    instr: Instr
    cta: tuple[int, int, int]
    cta_index: int
    warp: int
    lanes: int
    step: int
    symbols: dict[str, int] = field(default_factory=dict)
    shared: np.ndarray | None = None
    tensor: np.ndarray | None = None
    allocations: dict[int, int] = field(default_factory=dict)
    registers: dict[str, Register] = field(default_factory=dict)
    operands: tuple[str, ...] = ()
    tiles: tuple[Tile, ...] = ()
    writes: dict[str, tuple[Write, ...]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, int, int]:
        """Equal for the same moment of another run: step, CTA, warp."""
        return self.step, self.cta_index, self.warp

    def tile(self, name: str) -> Tile:
        """Return a tile by its name; raise KeyError, which lists the names, if there is none."""
        for found in self.tiles:
            if found.name == name:
                return found
        raise KeyError(f"no tile {name!r}; there are {[tile.name for tile in self.tiles]}")

    def tensor_memory(self, dtype: str = "f32") -> np.ndarray:
        """float32 [lane, element]: cells as f32, or as two bf16 or f16 each."""
        if self.tensor is None:
            raise ValueError("tensor memory was not requested: add it to `dump`")
        return tensor_memory(self.tensor, dtype)


def register(name: str, declared: str, types: tuple[str, ...], values: Any) -> Register:
    """Make a register from values of generated code.

    values: one value, or low and high half; each a scalar or 32 lanes.
    """
    arrays = []
    for type_, value in zip(types, values, strict=True):
        dtype: Any = GLOBALS[DTYPE[type_]]
        lanes = full(value, dtype) if np.ndim(value) == 0 else np.array(value, dtype)
        arrays.append(lanes)
    if len(arrays) == 1:
        return Register(name, declared, arrays[0])
    width = 8 * arrays[0].dtype.itemsize
    halves = [array.view(f"u{width // 8}") for array in arrays]
    if width == 64:
        return Register(name, declared, np.stack(halves, axis=1))
    return Register(name, declared, halves[0].astype("u8") | halves[1].astype("u8") << 32)


def named_tile(shared: np.ndarray, region: Region) -> Tile:
    """Raises ValueError where the region leaves shared memory."""
    size, _ = formats.ELEMENTS[region.dtype]
    positions = block_positions(
        region.start, region.rows, region.columns * size, BY_NAME[region.swizzle]
    )
    if positions.max() >= len(shared):
        raise ValueError(
            f"region {region.name} ends at {int(positions.max()) + 1:#x}; the CTA has"
            f" {len(shared):#x} bytes of shared memory"
        )
    values = formats.decoded(shared[positions], region.dtype)
    origin = f"named, {region.dtype}, swizzle {region.swizzle}, at {region.start:#x}"
    return Tile(region.name, region.dtype, values, positions, origin)


def moved_tile(shared: np.ndarray, offset: int, brought: Brought) -> Tile:
    """Return the tile of a TMA operation, with the current contents of shared memory."""
    tm, dtype = brought.tm, tile_dtype(brought.tm)
    positions = tile_positions(tm, offset)
    values = formats.decoded(shared[positions], dtype).reshape(tile_shape(tm))
    way = "load from" if brought.loaded else "store to"
    box = f"box {tm.box}"
    if tm.pixels is not None:
        box = f"im2col offsets last, {tm.box[0]} channels of {tm.box[1]} pixels"
    origin = (
        f"TMA {way} {brought.position} of a tensor of {tm.dims} {tm.dtype} at {tm.address:#x}"
        f" (dimension 0 first), {box}, swizzle {tm.swizzle.name}"
    )
    return Tile(f"tile_{offset:#x}", dtype, values, positions, origin)


def active(mask: int) -> np.ndarray:
    """Lanes of a mask, bool (32,)."""
    return bits_mask(mask)
