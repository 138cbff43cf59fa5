"""Compile-time config of the product of numbers.

A CTA has a tile of TILE_ROWS rows of the weights by some tokens. Weights become fp16 or bf16 in
registers, rounded once, and are the A operand of wgmma. Tokens are the B operand, in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from q8_0.blocks import BLOCK, BLOCK_BYTES, INTERLEAVED, LAYOUTS, SCALE_BYTES
from q8_0.config import ITEMSIZE

DTYPES = ("fp16", "bf16")  # of x
OUTPUTS = ("bf16", "fp16", "fp32")
TEAMS = 2  # warpgroups that multiply
TEAM_ROWS = 64  # rows of a wgmma
TILE_ROWS = TEAMS * TEAM_ROWS
UNIT = 64  # columns of a stage of x: lines of 128 bytes
STEP_UNITS = 2  # units of an iteration of the main loop
STEP_K = UNIT * STEP_UNITS
STEP_BLOCKS = STEP_K // BLOCK
PIECE_STEPS = 2  # of K, of which CTAs that share a tile have whole ones, in either layout
WIDTHS = (256, 192, 128, 96, 64, 32)  # tokens of a tile
MOST_SPLIT_TOKENS = 128  # of a tile that CTAs share
SPLITS = (1, 2, 3, 4, 6, 8)  # CTAs of a cluster that share a tile along K
MOST_CLUSTER = 8


@dataclass(frozen=True)
class NumbersConfig:
    """Config of the kernel.

    layout: layout of the weights, see `q8_0.blocks`
    dtype: dtype of x, 'fp16' or 'bf16', that weights are rounded to
    out_dtype: 'bf16', 'fp16' or 'fp32'
    tile_tokens: tokens of a tile
    pair: whether two CTAs with neighbouring rows fetch the tokens for each other (multicast)
    split: CTAs that share a tile along K
    whole: of 'interleaved': whether the blocks of a row in a stage are eight, at a multiple of 16
        bytes, so that TMA fetches them
    words: whether scales ('soa') or blocks ('interleaved') begin at multiples of 4 bytes, and
        those of 'soa' come in pairs
    vector: whether all runs of eight neighbours in the result begin at multiples of 16 bytes
    bias: whether a bias, in the dtype of the result, is added last
    """

    layout: str
    dtype: str
    out_dtype: str
    tile_tokens: int = 256
    pair: bool = True
    split: int = 1
    whole: bool = True
    words: bool = True
    vector: bool = True
    bias: bool = False

    @property
    def interleaved(self) -> bool:
        """Whether the weights are as in a file of GGUF."""
        return self.layout == INTERLEAVED

    @property
    def stage_steps(self) -> int:
        """Iterations of the main loop that a stage of weights lasts. Only eight blocks are a
        multiple of 16 bytes."""
        return 2 if self.interleaved else 1

    @property
    def stage_k(self) -> int:
        """Columns of a stage of weights."""
        return STEP_K * self.stage_steps

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of scales ('soa') or of blocks ('interleaved') in a stage. Eight rows of
        blocks have no bank conflicts."""
        blocks = STEP_BLOCKS * self.stage_steps
        return blocks * (BLOCK_BYTES if self.interleaved else SCALE_BYTES)

    @property
    def copies(self) -> bool:
        """Whether threads copy scales ('soa') or blocks ('interleaved') to shared memory."""
        return not (self.interleaved and self.whole)

    @property
    def ctas(self) -> int:
        """Number of CTAs of a cluster."""
        return self.split * (2 if self.pair else 1)

    @property
    def staged(self) -> bool:
        """Whether results go to global memory through shared memory."""
        return self.vector and self.out_dtype != "fp32"

    def first_block(self, share: int) -> int:
        """Return the first eight tokens of a tile whose results CTA `share` of those that share it
        stores."""
        return self.tile_tokens // 8 * share // self.split

    @property
    def own_blocks(self) -> int:
        """Times eight tokens of a tile whose results a CTA stores, at most."""
        return -(-self.tile_tokens // 8 // self.split)

    @property
    def out_bytes(self) -> int:
        """Bytes of a number of the result."""
        return ITEMSIZE[self.out_dtype]

    def check_values(self) -> None:
        """Raise NotImplementedError or ValueError, naming the value and the limit."""
        named = {
            "layout": (self.layout, LAYOUTS), "dtype": (self.dtype, DTYPES),
            "out_dtype": (self.out_dtype, OUTPUTS), "tile_tokens": (self.tile_tokens, WIDTHS),
            "split": (self.split, SPLITS),
        }  # fmt: skip
        for name, (value, possible) in named.items():
            if value not in possible:
                raise NotImplementedError(f"{name} {value!r}: one of {possible}")
        if self.ctas > MOST_CLUSTER:
            raise ValueError(f"split {self.split} of pairs: {MOST_CLUSTER} CTAs at most")
        least, most = 8 * self.split, MOST_SPLIT_TOKENS
        if self.split > 1 and not least <= self.tile_tokens <= most:
            raise ValueError(
                f"split {self.split} of {self.tile_tokens} tokens: from {least} to {most} tokens"
            )
