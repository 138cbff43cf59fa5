"""Element types by name: bytes of one, and its codes as values that numpy has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptxemu.numerics import formats

TENSOR_COLUMNS = 512  # of tensor memory, each of 128 lanes of 32 bits
Decode = Callable[[np.ndarray], np.ndarray]


def _as(dtype: str) -> Decode:
    return lambda codes: codes.view(dtype)


def _codes(function: Decode) -> Decode:
    return lambda codes: np.asarray(function(codes))


# name -> bytes of an element, and its codes (unsigned of that size) to values that numpy has
ELEMENTS: dict[str, tuple[int, Decode]] = {
    **{f"u{8 * size}": (size, _as(f"u{size}")) for size in (1, 2, 4, 8)},
    **{f"s{8 * size}": (size, _as(f"i{size}")) for size in (1, 2, 4, 8)},
    "f16": (2, _codes(formats.f16_to_f32)),
    "bf16": (2, _codes(formats.bf16_to_f32)),
    "f32": (4, _as("f4")),
    "tf32": (4, _as("f4")),
    "f64": (8, _as("f8")),
    "e4m3": (1, _codes(formats.e4m3_to_f32)),
    "e5m2": (1, _codes(formats.e5m2_to_f32)),
    "ue8m0": (1, _codes(formats.ue8m0_to_f32)),
}


def decoded(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes, uint8 [..., bytes of a row], as values [..., elements]; bf16 and fp8 as float32."""
    size, decode = ELEMENTS[dtype]
    return decode(np.ascontiguousarray(raw).view(f"u{size}"))
