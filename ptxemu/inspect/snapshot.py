"""A picture of a CTA and a warp at one moment: memories, tiles, registers, as arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxemu.codegen.namespace import GLOBALS, bits_mask, full
from ptxemu.codegen.values import DTYPE
from ptxemu.inspect import layouts
from ptxemu.numerics import formats
from ptxemu.numerics.swizzle import BY_NAME
from ptxemu.request import Region
from ptxemu.syntax.tree import Instr

if TYPE_CHECKING:
    from ptxemu.inspect.tiles import Brought
    from ptxemu.inspect.writes import Write


@dataclass(frozen=True)
class Register:
    """The value of a register in 32 lanes. `values`: in the type that it is kept in; of a pair
    (64 bits kept as two f32) the 64 bits. `declared`: in the PTX, such as "b32"."""

    name: str
    declared: str
    values: np.ndarray

    @property
    def bits(self) -> np.ndarray:
        """The same as unsigned integers."""
        if self.values.dtype == np.bool_:
            return self.values.astype(np.uint8)
        return self.values.view(f"u{self.values.dtype.itemsize}")

    def number(self, lanes: np.ndarray) -> Any:
        """For a condition: floats where declared so, else unsigned bits (of 128 the lower 64); one
        number where all lanes agree."""
        width = self.values.dtype.itemsize
        found = self.bits.view(f"f{width}") if self.declared in ("f32", "f64") else self.bits
        found = found[lanes] if found.ndim == 1 else found[lanes, 0]
        return found[0].item() if (found == found[0]).all() else found.astype(object)


@dataclass(frozen=True)
class Tile:
    """A matrix in shared memory, swizzle undone. `values`: what numpy has for the element type;
    positions: where each byte lies in shared memory, [row, byte]. origin: how it is known."""

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
    """What `Stop` asked for, when a warp came to its line and before that is executed.

    at          the stop's line; source, instr: the instruction that is next.
    cta, cta_index, warp, lanes  who came; lanes as a bit mask. step: arrivals of this warp before.
    shared      bytes of the CTA's shared memory, uint8. symbols: name -> offset there.
    tensor      cells of tensor memory, uint32 [column, lane]; allocations: first column -> number.
    registers   by name; operands: those of the instruction, others are live or of `when`.
    tiles       named regions, then what TMA has brought to or taken from shared memory.
    writes      histories of watches until then, by title.
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
        """By its name; raises KeyError with the names that there are."""
        for found in self.tiles:
            if found.name == name:
                return found
        raise KeyError(f"no tile {name!r}; there are {[tile.name for tile in self.tiles]}")

    def tensor_memory(self, dtype: str = "f32") -> np.ndarray:
        """float32 [lane, element]: cells as f32, or as two bf16 or f16 each."""
        if self.tensor is None:
            raise ValueError("tensor memory was not asked for")
        return layouts.tensor_memory(self.tensor, dtype)


def register(name: str, declared: str, types: tuple[str, ...], values: Any) -> Register:
    """From what generated code holds: one value, or low and high half; scalars or 32 lanes."""
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
    positions = layouts.block_positions(
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
    """What a TMA operation moved, as the shared memory holds it now."""
    tm, dtype = brought.tm, layouts.tile_dtype(brought.tm)
    positions = layouts.tile_positions(tm, offset)
    values = formats.decoded(shared[positions], dtype).reshape(layouts.tile_shape(tm))
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
