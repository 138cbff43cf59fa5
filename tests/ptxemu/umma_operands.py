"""Operand matrices laid out in shared memory as in kernels: by TMA boxes.

The layouts are written in terms of tiles (which box goes where). They do not use the descriptors'
address formulas, so that a round trip tests those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lab.silicon.conformance.exact_arithmetic import FORMATS
from ptxemu.machine.mma import Mma, MmaCta, mma
from ptxemu.machine.quick_mma import plan
from ptxemu.machine.tensor_map import decode, encode
from ptxemu.machine.tma_tile import place_tile
from ptxemu.numerics.swizzle import BY_NAME

LAYOUT_CODES = {"none": 0, "128B_ATOM_32B": 1, "128B": 2, "64B": 4, "32B": 6}
SWIZZLES = ("none", "32B", "64B", "128B")
_TMA_TYPES = {1: "u8", 2: "u16", 4: "u32"}


def smem_desc_word(start: int, leading: int, stride: int, swizzle: str) -> int:
    word = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46
    return word | LAYOUT_CODES[swizzle] << 61


def put_operand(
    smem: np.ndarray, offset: int, codes: np.ndarray, swizzle: str, mn_major: bool
) -> int:
    """Lay out `codes` (rows, k), bit patterns of 1, 2 or 4 bytes, from `offset`.

    The contiguous dimension is cut into panels one swizzle span wide, each a TMA box of all lines.
    Returns the 64-bit descriptor.
    """
    span = BY_NAME[swizzle].span
    lines = np.ascontiguousarray(codes.T if mn_major else codes)
    width = span // codes.itemsize
    lines = np.pad(lines, ((0, 0), (0, -lines.shape[1] % width)))
    count, panel_bytes = len(lines), len(lines) * span
    tile = decode(
        encode(0, (width, count), (16,), (width, count), _TMA_TYPES[codes.itemsize], swizzle)
    )
    for panel, image in enumerate(np.split(lines, lines.shape[1] // width, axis=1)):
        image = np.ascontiguousarray(image).view(np.uint8).reshape(-1)
        place_tile(tile, image, smem, offset + panel * panel_bytes)
    group_bytes = span * (4 if swizzle == "128B_ATOM_32B" else 8)
    if swizzle == "none" and mn_major:
        return smem_desc_word(offset, group_bytes, panel_bytes, swizzle)
    leading = panel_bytes if mn_major or swizzle == "none" else 16
    return smem_desc_word(offset, leading, group_bytes, swizzle)


def random_codes(rng: np.random.Generator, fmt: str, shape: tuple[int, int]) -> np.ndarray:
    """Random finite bit patterns of an operand format, moderate in size."""
    if fmt == "f16":
        return rng.standard_normal(shape).astype(np.float16).view(np.uint16)
    if fmt == "bf16":
        return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if fmt == "tf32":
        return rng.standard_normal(shape, np.float32).view(np.uint32)
    if fmt in ("e4m3", "e5m2"):  # exponents near 1, either sign
        low = rng.integers(0x30, 0x40, shape, dtype=np.uint8)
        return low | rng.integers(0, 2, shape, dtype=np.uint8) << 7
    return rng.integers(0, 256, shape, dtype=np.uint8)


def image_of(kind: str, fmt: str, codes: np.ndarray) -> np.ndarray:
    """Bytes of codes (rows, k) as the tensor core reads them, uint8 (rows, bytes)."""
    bits, rows = FORMATS[fmt].bits, len(codes)
    if bits == 8:
        return codes
    stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    if kind != "mxf8f6f4":
        return np.packbits(stream.reshape(rows, -1), axis=-1, bitorder="little")
    chunks = np.full((rows, codes.shape[1] // 16, 16), 0xA5, np.uint8)  # the rest is padding
    data = np.packbits(stream.reshape(rows, -1, 16 * bits), axis=-1, bitorder="little")
    chunks[..., : 2 * bits] = data
    return chunks.reshape(rows, -1)


def multiply(group: Sequence[MmaCta], d: int, a: Any, *operands: Any, **options: Any) -> bool:
    """Execute an MMA as `mma` does, and check that machine code, if it does it, gives its values.

    A BLAS may sum in another order and give a zero another sign, by the size of the product.
    Returns whether machine code does it.
    """
    b, instr, accumulate = operands
    order = {"disable_lanes": (), "scale_input_d": 0, "scales": None, "shift": False}
    order = {name: options.get(name, default) for name, default in order.items()}
    what = Mma(d, a, b, instr, accumulate, *order.values(), options.get("metadata"))
    before = [cta.tmem.cells.copy() for cta in group]
    found = plan(what, len(group))
    with np.errstate(all="ignore"):
        done = found is not None and "sums" not in options and found.run(group)
    bits = [cta.tmem.cells.copy() for cta in group]
    for cta, cells in zip(group, before, strict=True):
        cta.tmem.cells[:] = cells
    mma(group, d, a, b, instr, accumulate, **options)
    for cta, cells, old in zip(group, bits, before, strict=True):
        new = cta.tmem.cells if done else old
        values, wanted = cells.view(np.float32), new.view(np.float32)
        largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
        np.testing.assert_allclose(values, wanted, rtol=2e-6, atol=2e-6 * largest)
    return done
