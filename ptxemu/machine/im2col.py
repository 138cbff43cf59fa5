"""The im2col mode of TMA: which pixels of a batch of images one operation moves.

A tensor is N images of D x H x W pixels with C channels; an operation moves `channels per pixel`
of `pixels per column`. Pixels are counted along W, then H, D and N inside a bounding box that is
the same in every image: from the lower corner, relative to (0, 0, 0), to before the tensor's size
plus the upper corner, in steps of the traversal strides. At the end of a row of the box W goes back
to the lower corner, and so on outwards. The instruction's coordinates are where the filter's first
element lies, inside the box, and its offsets which element of the filter it is: they are added to
every pixel, and only then it is looked at whether the pixel lies in the tensor.
Sources: PTX ISA, "im2col mode" with its examples; CUDA driver API, cuTensorMapEncodeIm2col, for the
limits; Triton's tutorial on im2col, which runs on Hopper, for the box being half open and for
the wrap into the next image; CUTLASS copy_traits_sm90_im2col.hpp for the number of pixels of a row
with strides. All of them agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ptxemu.errors import HardwareRefusal

MIN_RANK = 3
MAX_CHANNELS = 256
MAX_PIXELS = 1024
MAX_TRAVERSAL = 8
_CORNER_BITS = {1: 16, 2: 8, 3: 5}  # of one coordinate of a corner, by the number of them
_UPPER_SHIFT = 16


@dataclass(frozen=True)
class PixelBox:
    """Bounding box and strides, which a tensor map in im2col mode has instead of the box's sides.

    lower: lower corner, W first, relative to the tensor's first pixel.
    upper: upper corner, W first, relative to the tensor's size.
    strides: traversal strides of the same dimensions.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Number of bits of a corner's coordinate, and of an offset."""
        return _CORNER_BITS[len(self.lower)]

    def corner_word(self) -> int:
        """Word 14 of a tensor map: the lower corner in its low half, the upper in its high half."""
        return _packed(self.lower, self.bits) | _packed(self.upper, self.bits) << _UPPER_SHIFT

    def span(self, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return the first coordinate and one past the last, by dimension, W first.

        sizes: those of the tensor.
        """
        return [
            (low, size + high)
            for low, high, size in zip(self.lower, self.upper, sizes, strict=True)
        ]


def corners(word: int, dimensions: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return (lower corner, upper corner, bits that belong to neither) of word 14."""
    bits = _CORNER_BITS[dimensions]
    lower, upper = _unpacked(word, bits, dimensions), _unpacked(word >> 16, bits, dimensions)
    used = (1 << bits * dimensions) - 1
    return lower, upper, word & ~(used | used << _UPPER_SHIFT)


def _packed(corner: tuple[int, ...], bits: int) -> int:
    return sum((value & (1 << bits) - 1) << bits * i for i, value in enumerate(corner))


def _unpacked(word: int, bits: int, count: int) -> tuple[int, ...]:
    """Signed fields."""
    fields = (word >> bits * i & (1 << bits) - 1 for i in range(count))
    return tuple(field - (field >> bits - 1 << bits) for field in fields)


def require_box(box: PixelBox, sizes: tuple[int, ...], pixels: int) -> None:
    """The limits of cuTensorMapEncodeIm2col. sizes: of W, H and D in the tensor."""
    limit = 1 << box.bits - 1
    for value in (*box.lower, *box.upper):
        if not -limit <= value < limit:
            raise HardwareRefusal(
                f"im2col box with corners {box.lower} and {box.upper}; with {len(sizes)} of them"
                f" they must be from {-limit} to {limit - 1}"
            )
    if any(first >= end for first, end in box.span(sizes)):
        raise HardwareRefusal(
            f"im2col box from {box.lower} to {box.upper} beyond the ends of {sizes} (W first) is"
            " empty"
        )
    if not all(1 <= stride <= MAX_TRAVERSAL for stride in box.strides):
        raise HardwareRefusal(
            f"im2col traversal strides {box.strides}, must be from 1 to {MAX_TRAVERSAL}"
        )
    if not 1 <= pixels <= MAX_PIXELS:
        raise HardwareRefusal(f"im2col column of {pixels} pixels, limit is {MAX_PIXELS}")


def require_position(
    box: PixelBox, sizes: tuple[int, ...], start: tuple[int, ...], offsets: Sequence[int]
) -> None:
    """Check the coordinates `start` (W, H, D) and offsets of an instruction against the manual."""
    for name, at, (first, end) in zip("WHD", start, box.span(sizes), strict=False):
        if not first <= at < end:
            raise HardwareRefusal(
                f"im2col coordinate {name} is {at}, must lie in the bounding box, from {first} to"
                f" {end - 1}"
            )
    for name, offset in zip("WHD", offsets, strict=False):
        if not 0 <= offset < 1 << box.bits:
            raise HardwareRefusal(
                f"im2col offset {name} is {offset}, must be below {1 << box.bits} with"
                f" {len(sizes)} offsets"
            )


def require_store(box: PixelBox) -> None:
    """Check the rule that only stores have: the bounding box lies inside the tensor."""
    if min(box.lower) < 0 or max(box.upper) > 0:
        raise HardwareRefusal(
            f"an im2col store with a bounding box from {box.lower} to {box.upper}; the lower corner"
            " must not be negative and the upper not positive"
        )


def pixels(
    box: PixelBox, sizes: tuple[int, ...], start: tuple[int, ...], count: int
) -> list[np.ndarray]:
    """Coordinates of `count` pixels, int64, one array for each of W, H, D and N.

    start: of the first pixel, in the same order, inside the box. A row that begins in its middle
    need not be on the grid of those that begin at the lower corner.
    """
    steps = np.arange(count, dtype=np.int64)
    found = []
    spans = box.span(sizes)
    for at, (first, end), stride in zip(start, spans, box.strides, strict=False):
        each = -(-(end - first) // stride)  # steps of a whole row
        done = each - -(-(end - at) // stride)
        beginning = at - done * stride  # where the first row would have begun
        rows, step = np.divmod(steps + done, each)
        found.append(np.where(rows == 0, beginning, first) + step * stride)
        steps = rows
    return [*found, start[-1] + steps]
