"""Arguments of a Triton kernel as the bytes of its parameters.

A tensor descriptor is a tensor map with its shape and strides where the compiler uses TMA, else its
address with both twice (`triton.backends.driver.decompose_descriptor`). Constants and empty tuples
have no parameter.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ptxemu.errors import UnsupportedPtx
from ptxemu.machine.im2col import PixelBox
from ptxemu.machine.tensor_map import encode, encode_im2col

_FLOATS = {"fp16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d"}
_SWIZZLES = {0: "none", 1: "32B", 2: "64B", 3: "128B"}
# Numbers of element types in tensormap.replace (PTX ISA, "tensormap.replace", .elemtype) -> names
# of ptxemu.machine.tensor_map.
_ELEMENTS = dict(enumerate("u8 u16 u32 u32 u64 u64 f16 f32 f32 f64 bf16".split()))
_ELEMENTS |= {11: "tf32", 13: "16u4_align8b", 14: "16u4_align16b", 15: "16u6_align16b"}


class Value(NamedTuple):
    """A parameter: its type in Triton's words, such as '*fp32' or 'i64', and what was given."""

    kind: str
    given: Any


def flat_values(types: Sequence[Any], args: Sequence[Any], maps: Any) -> Iterator[Value]:
    """Yield the parameters of a kernel, before those for scratch.

    Args:
        types: Of the signature; tuples are nested, and constants are 'constexpr'.
        args: One for each type.
        maps: `tensordesc_meta` of the kernel: a dict for each tensor descriptor in order, or None
            for one without TMA; empty if there is none with TMA.
    """
    yield from _flat(types, args, iter(maps or ()), bool(maps))


def _flat(types: Sequence[Any], args: Sequence[Any], maps: Iterator[Any], tma: bool) -> Any:
    for kind, given in zip(types, args, strict=True):
        if isinstance(kind, tuple | list):
            yield from _flat(kind, given, maps, tma)
        elif kind.startswith("tensordesc"):
            yield from _descriptor(kind, given, next(maps) if tma else None)
        elif kind != "constexpr":
            yield Value(kind, given)


def _descriptor(kind: str, given: Any, layout: dict[str, Any] | None) -> Iterator[Value]:
    """Yield the parameters of a tensor descriptor, see `triton.tools.tensor_descriptor`."""
    shape, strides = [*given.shape], [*given.strides]
    if layout is None:
        yield Value("*", given.base)
        yield from (Value("i64", each) for each in (*shape, *strides))
        yield Value("i1", given.padding == "nan")
        yield Value("i1", getattr(given, "round_f32_to_tf32", False))
    else:
        yield Value("map", _tensor_map(given, layout))
    yield from (Value("i32", each) for each in shape)
    yield from (Value("i64", each) for each in strides)


def _tensor_map(given: Any, layout: dict[str, Any]) -> bytes:
    """Encode as Triton's fill_tma_descriptor_tiled, or _im2col: the innermost dimension of `given`
    is last. In im2col mode the block is (pixels, channels)."""
    shape, rank = [*given.shape], len(given.shape)
    if layout["fp4_padded"]:
        shape[-1] *= 2
    element = "tf32" if getattr(given, "round_f32_to_tf32", False) else _element(layout)
    size = layout["elem_size"]
    place = (
        address_of(given.base),
        tuple(reversed(shape)),
        tuple(size * stride for stride in reversed(given.strides[: rank - 1])),
        tuple(reversed(layout["block_size"])),
    )
    common = element, _SWIZZLES[layout["swizzle"]], given.padding == "nan"
    if layout.get("is_im2col"):
        return encode_im2col(*place, _pixel_box(given), *common)
    return encode(*place, *common)


def _pixel_box(given: Any) -> PixelBox:
    """Return the bounding box of Gluon's TensorDescriptorIm2Col."""
    images, *inner, _ = given.element_strides or [1] * len(given.shape)
    if images != 1:
        raise UnsupportedPtx(f"a descriptor of Gluon in im2col mode with element stride {images}")
    parts = given.pixel_box_lower_corner, given.pixel_box_upper_corner, inner
    return PixelBox(*(tuple(reversed(part)) for part in parts))


def _element(layout: dict[str, Any]) -> str:
    name = _ELEMENTS.get(layout["elem_type"])
    if name is None:
        raise UnsupportedPtx(f"a tensor descriptor of Triton with element type {layout}")
    return name


def address_of(given: Any) -> int:
    """Return the address in a pointer argument: of a tensor or array, a number, or 0 for None."""
    if given is None:
        return 0
    if hasattr(given, "data_ptr"):
        return int(given.data_ptr())
    if isinstance(given, int):
        return given
    raise TypeError(f"a pointer argument of a Triton kernel: {type(given).__name__}")


def packed(value: Value, size: int) -> bytes:
    """Return the `size` bytes of a parameter.

    Raises TypeError for an argument that its type cannot hold, OverflowError for a number that has
    more bytes.
    """
    kind, given = value
    if kind == "map":
        raw = given
    elif kind.startswith("*"):
        raw = address_of(given).to_bytes(8, "little")
    elif kind in _FLOATS:
        raw = struct.pack(_FLOATS[kind], float(given))
    elif kind == "bf16":
        raw = struct.pack("<f", float(given))[2:]  # truncated, as Triton's own launcher does
    elif kind[:1] in "iu" and kind[1:].isdigit():
        bits = 8 * size
        number = int(given)
        if not -(1 << bits - 1) <= number < 1 << bits:
            raise OverflowError(f"{number} as a parameter of {size} bytes ({kind})")
        raw = (number & (1 << bits) - 1).to_bytes(size, "little")
    else:
        raise UnsupportedPtx(f"an argument of type {kind} of a Triton kernel")
    if len(raw) != size:
        raise TypeError(f"an argument of type {kind} has {len(raw)} bytes; the kernel takes {size}")
    return bytes(raw)
