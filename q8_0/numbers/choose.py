"""Choose the kernel of a product of numbers by its sizes and the GPU: data, no DSL.

Modelled cycles decide. A step of 64 columns takes the longest of three: the wgmmas of the tile, the
conversion of its weights, and the bytes that the SM has to fetch from L2. Clusters that do not run
at once run in waves. The constants follow an H200: for the products measured there, the choice is
at most 3 % slower than the fastest shape that was timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from q8_0.blocks import BLOCK, BLOCK_BYTES
from q8_0.numbers.config import (
    PIECE_STEPS,
    STEP_K,
    STEP_UNITS,
    TILE_ROWS,
    UNIT,
    WIDTHS,
    NumbersConfig,
)

ARCHS = ("sm_90a",)
CONVERSION = 300.0  # cycles of a unit's weights
LOST = 190.0  # cycles of a unit in which no wgmma runs
L2_BYTES = 50.0  # bytes that each SM gets from L2 in a cycle, if all of them fetch
SM_BYTES = 55.0  # the same, if few of them fetch
START, EXCHANGE, RESULT = 7000.0, 2200.0, 35.0  # a launch, sums over a cluster, a token's results
GROUP = 8  # tiles of tokens that are neighbours in the walk

Shape = tuple[int, bool, int]  # tokens of a tile, pair, split
AtOnce = Callable[[int], int]
# Few enough that `warmup` may compile them all: the fastest of every possible one for most sizes.
SHAPES: tuple[Shape, ...] = (
    *((width, True, 1) for width in (256, 192, 128, 96, 64)),
    *((width, False, 1) for width in (128, 32)),
    (128, False, 2),
    (128, True, 3),
    (128, False, 6),
    (64, False, 2),
    (64, False, 6),
    (32, False, 2),
    (32, False, 4),
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a product."""

    tokens: int
    rows: int
    cols: int


def row_tiles(rows: int, pair: bool) -> int:
    """Return the tiles of rows, of two tiles in a pair."""
    tiles = -(-rows // TILE_ROWS)
    return -(-tiles // 2) if pair else tiles


def items_of(sizes: Sizes, shape: Shape) -> int:
    """Return the number of tiles of clusters."""
    width, pair, _ = shape
    return -(-sizes.tokens // width) * row_tiles(sizes.rows, pair)


def shapes(sizes: Sizes) -> Iterator[Shape]:
    """Yield the shapes that suit these sizes."""
    pieces = -(-sizes.cols // (STEP_K * PIECE_STEPS))
    for width, pair, split in SHAPES:
        if width >= 2 * sizes.tokens and width > WIDTHS[-1]:
            continue  # a tile of which less than a half is needed
        if split <= pieces and not (pair and sizes.rows <= TILE_ROWS):
            yield width, pair, split


def cycles_of(sizes: Sizes, shape: Shape, at_once: AtOnce) -> float:
    """Return modelled cycles."""
    width, pair, split = shape
    ctas = split * (2 if pair else 1)
    items, sms = items_of(sizes, shape), at_once(1)
    waves = -(-items // max(at_once(ctas), 1))
    busy = min(items * ctas, sms)
    pieces = -(-sizes.cols // (STEP_K * PIECE_STEPS))
    units = -(-pieces // split) * PIECE_STEPS * STEP_UNITS
    nbytes = width * UNIT * 2 / (2 if pair else 1) + TILE_ROWS * UNIT * BLOCK_BYTES / BLOCK
    fetched = nbytes / min(SM_BYTES, L2_BYTES * sms / busy)
    of_unit = max(4.0 * width, CONVERSION, fetched) + LOST
    # Results of a tile are stored during the next one's products; clusters that share K have none.
    ends = START + RESULT * width / split
    if split > 1:
        return waves * (of_unit * units + ends + EXCHANGE)
    return waves * of_unit * units + ends


def fastest(sizes: Sizes, at_once: AtOnce) -> Shape:
    """Return the shape with the fewest modelled cycles. at_once: clusters of so many CTAs, one CTA
    to an SM, that the GPU runs at the same time."""
    return min(shapes(sizes), key=lambda shape: cycles_of(sizes, shape, at_once))


def with_shape(plain: NumbersConfig, shape: Shape) -> NumbersConfig:
    """Return the config of a shape."""
    width, pair, split = shape
    return replace(plain, tile_tokens=width, pair=pair, split=split)


def group_of(tokens: int, width: int) -> int:
    """Return the tiles of tokens that are neighbours in the walk."""
    tiles = -(-tokens // width)
    return -(-tiles // -(-tiles // GROUP))
