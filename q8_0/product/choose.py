"""Which kernel a product runs, by its sizes and the GPU: data, no DSL.

What bounds it on a large GPU are the instructions behind each mma, so a warp's tile is as large as
registers allow, 64 x 64, which makes the loads of its fragments rare. Few tokens have smaller ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernelkit import hw
from q8_0.blocks import BLOCK, INTERLEAVED, SOA
from q8_0.product.config import ALIGNED_BLOCKS, OWN_ROWS, ProductConfig

WIDE_GROUP = 16  # tiles of tokens that are neighbours in the grid, at most
MOST_STAGES = 4
SMALL_SMEM = 100 << 10  # of an SM that has no room for two CTAs
FEWEST_STAGES = {SOA: 2, INTERLEAVED: 3}

# (warp_tokens, warp_rows, warps_of_tokens, warps_of_rows, ctas_per_sm); the first tile that has
# no more than twice the tokens that there are, by how many CTAs of it fit an SM.
Shape = tuple[int, int, int, int, int]
TWO_CTAS: tuple[Shape, ...] = (
    (64, 64, 2, 2, 2),
    (32, 64, 2, 2, 2),
    (32, 32, 1, 4, 3),
    (16, 32, 1, 4, 3),
)
ONE_CTA: tuple[Shape, ...] = ((64, 64, 2, 4, 1), *TWO_CTAS[1:])
ONE_CTA_SPLIT: tuple[Shape, ...] = ((32, 64, 4, 2, 1), *TWO_CTAS[1:])


@dataclass(frozen=True)
class Sizes:
    """Of a product."""

    tokens: int
    rows: int
    cols: int


def choose(
    layout: str, out_dtype: str, sizes: Sizes, arch: str, *, aligned: bool, vector: bool
) -> ProductConfig:
    """The kernel for these sizes. aligned, vector: address and stride of weights, of the result,
    are multiples of 16 bytes."""
    blocks = sizes.cols // BLOCK
    plain = ProductConfig(
        layout,
        out_dtype,
        even=blocks % 2 == 0,
        aligned=layout == SOA or (aligned and blocks % ALIGNED_BLOCKS == 0),
        vector=vector and sizes.rows % OWN_ROWS == 0,
    )
    for tokens, rows, by_tokens, by_rows, ctas in _shapes(layout, arch):
        config = with_stages(
            replace(
                plain,
                warp_tokens=tokens,
                warp_rows=rows,
                warps_of_tokens=by_tokens,
                warps_of_rows=by_rows,
                ctas_per_sm=ctas,
            ),
            arch,
        )
        if config.tile_tokens < 2 * sizes.tokens:
            break
    small = sizes.tokens < config.tile_tokens or sizes.rows < config.tile_rows
    return replace(config, small=small)


def _shapes(layout: str, arch: str) -> tuple[Shape, ...]:
    if hw.smem_bytes_per_cta(arch) > SMALL_SMEM:
        return TWO_CTAS
    return ONE_CTA if layout == SOA else ONE_CTA_SPLIT


def with_stages(config: ProductConfig, arch: str) -> ProductConfig:
    """As many stages as there is room for on an SM, up to MOST_STAGES."""
    room = hw.smem_bytes_per_sm(arch) // config.ctas_per_sm - hw.SMEM_RESERVED_BYTES
    for stages in range(MOST_STAGES, FEWEST_STAGES[config.layout], -1):
        fitting = replace(config, stages=stages)
        if fitting.smem_bytes <= room:
            return fitting
    return replace(config, stages=FEWEST_STAGES[config.layout])


def group_of(tokens: int, tile: int) -> tuple[int, int]:
    """(tiles of tokens of a group, groups): neighbours in the grid share rows of the weights."""
    tiles = -(-tokens // tile)
    groups = -(-tiles // WIDE_GROUP)
    return -(-tiles // groups), groups
