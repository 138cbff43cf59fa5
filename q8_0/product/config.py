"""Compile-time config of the product's kernel, and its layout of shared memory.

A CTA has a tile of tokens x rows of the weights. Each warp has a part of it and loops over all
blocks of K. Two blocks, 64 bytes of a row, are a stage of the rings.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelkit.plan import hw
from q8_0.blocks import BLOCK, INTERLEAVED

BLOCKS_OF_STAGE = 2
STAGE_K = BLOCK * BLOCKS_OF_STAGE
CHUNK_BYTES = hw.SMEM_UNIT_BYTES
CHUNKS = STAGE_K // CHUNK_BYTES  # of a row and stage
MMA_TOKENS, MMA_ROWS = 16, 8
OWN_ROWS = 8  # neighbours in the result that a lane has
HALVES = 2  # buffers of data that is converted from a stage just before the product
ALIGNED_BLOCKS = 8  # 272 bytes: from here on blocks begin at multiples of 16 bytes again
# Number of 16-byte chunks with two blocks of a row: 68 bytes that begin 0, 4, 8 or 12 bytes after a
# multiple of 16; up to 14 bytes after if rows begin anywhere.
RAW_CHUNKS, RAW_CHUNKS_ANYWHERE = 5, 6
APART, NEAR, PAIRS = "apart", "near", "pairs"  # see ProductConfig.adding


@dataclass(frozen=True)
class ProductConfig:
    """Config of the product's kernel.

    layout: layout of the weights, see `q8_0.blocks`
    out_dtype: 'bf16', 'fp16' or 'fp32'
    warp_tokens, warp_rows: tile of a warp
    warps_of_tokens, warps_of_rows: warps of a CTA
    stages: stages of the rings
    ctas_per_sm: CTAs per SM that registers and shared memory leave room for
    adding: order of the instructions that add four sums to their accumulators; same bits:
        APART, none waits for the one before it;
        NEAR, fewer registers;
        PAIRS, two numbers by one instruction
    even: whether the number of blocks of a row is even
    aligned: whether every ALIGNED_BLOCKS blocks of interleaved weights begin at a multiple of 16
        bytes
    small: whether there are fewer tokens or rows than a tile has
    vector: whether rows of the result begin at multiples of 16 bytes, as does every 16-byte piece
    bias: whether a bias, in the dtype of the result, is added last
    """

    layout: str
    out_dtype: str
    warp_tokens: int = 64
    warp_rows: int = 64
    warps_of_tokens: int = 2
    warps_of_rows: int = 2
    stages: int = 4
    ctas_per_sm: int = 2
    adding: str = APART
    even: bool = True
    aligned: bool = True
    small: bool = False
    vector: bool = True
    bias: bool = False

    @property
    def tile_tokens(self) -> int:
        """Number of tokens of a CTA's tile."""
        return self.warp_tokens * self.warps_of_tokens

    @property
    def tile_rows(self) -> int:
        """Number of rows of a CTA's tile."""
        return self.warp_rows * self.warps_of_rows

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return self.warps_of_tokens * self.warps_of_rows * hw.WARP_THREADS

    @property
    def interleaved(self) -> bool:
        """Whether the weights are as in a file of GGUF."""
        return self.layout == INTERLEAVED

    @property
    def raw_chunks(self) -> int:
        """Chunks of a row of interleaved weights that a stage copies."""
        return RAW_CHUNKS if self.aligned else RAW_CHUNKS_ANYWHERE

    # Shared memory, in bytes. Quants of tokens come first.

    @property
    def x_bytes(self) -> int:
        """Quants of the tokens of a stage."""
        return self.tile_tokens * STAGE_K

    @property
    def w_bytes(self) -> int:
        """Quants of the rows of a stage."""
        return self.tile_rows * STAGE_K

    @property
    def raw_bytes(self) -> int:
        """Blocks of the rows of a stage as they come, where they are split here."""
        return self.tile_rows * self.raw_chunks * CHUNK_BYTES if self.interleaved else 0

    @property
    def x_scale_bytes(self) -> int:
        """Scales of the tokens of a block: (scale, what takes the offset of the integers away)."""
        return self.tile_tokens * 8

    @property
    def w_scale_bytes(self) -> int:
        """Scales of the rows of a block, fp32."""
        return self.tile_rows * 4

    @property
    def w_offset(self) -> int:
        """Offset of the quants of rows in shared memory."""
        return self.stages * self.x_bytes

    @property
    def raw_offset(self) -> int:
        """Offset of the blocks as they are copied."""
        return self.w_offset + (HALVES if self.interleaved else self.stages) * self.w_bytes

    @property
    def scale_bytes(self) -> int:
        """Scales of a stage: those of the blocks of tokens, then those of the blocks of rows."""
        return BLOCKS_OF_STAGE * (self.x_scale_bytes + self.w_scale_bytes)

    @property
    def x_scale_offset(self) -> int:
        """Offset of the scales of tokens in the first of HALVES stages."""
        return self.raw_offset + self.stages * self.raw_bytes

    @property
    def w_scale_offset(self) -> int:
        """Offset of the scales of rows in the first of HALVES stages."""
        return self.x_scale_offset + BLOCKS_OF_STAGE * self.x_scale_bytes

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.x_scale_offset + HALVES * self.scale_bytes
