"""What the parts of the product's kernel share (device code)."""

from dataclasses import dataclass

from cutlass import Int32

from q8_0.product.params import ProductParams


@dataclass(frozen=True)
class Tile:
    """A CTA's. It begins at `token` and `row`, and writes from `first_token` and `first_row` on:
    the last one begins sooner, so that all tokens and rows that it reads are there."""

    token: Int32
    row: Int32
    first_token: Int32
    first_row: Int32


@dataclass(frozen=True)
class Scope:
    """smem: address. steps: stages that K has. blocks: of a row."""

    params: ProductParams
    tile: Tile
    smem: Int32
    steps: Int32
    blocks: Int32
