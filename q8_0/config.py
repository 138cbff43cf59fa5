"""Compile-time configs of the kernels, and the work of each thread, as data.

Sizes and strides are arguments of a launch. A piece is the part of a row that a thread reads at a
time: 4, 8 or 16 neighbouring quants with one scale. Neighbouring threads have neighbouring pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelkit.plan import hw
from q8_0.blocks import BLOCK, BLOCK_BYTES, SOA

VECTOR_BYTES = 16  # of the widest access
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "q8_1": 1}  # of activations and results
NUMBERS = "numbers"  # activations as they are
INTEGERS = "q8_1"  # activations as `q8_0.activations` has them
PIECE = VECTOR_BYTES  # quants of a piece where products read them: a 16-byte load in SOA
MOST_TOKENS = 16  # that share a read of the weights
RESIDENT_WARPS = 16  # of an SM, for which registers have to suffice: 128 of a thread


@dataclass(frozen=True)
class RepackConfig:
    """Config of the kernel that converts blocks between the layouts, tile by tile through shared
    memory. 256 blocks are 544 vectors of 16 bytes interleaved, and 512 of quants.

    to_soa: whether the target layout is SOA
    vector: bytes of an access on the interleaved side, a power of two from 2
    """

    to_soa: bool
    vector: int = VECTOR_BYTES
    threads: int = 128
    tile: int = 256

    @property
    def tile_bytes(self) -> int:
        """Interleaved."""
        return self.tile * BLOCK_BYTES

    @property
    def halves(self) -> int:
        """Half-blocks, 16 quants each, of a thread in a tile."""
        return self.tile * 2 // self.threads

    @property
    def vectors(self) -> int:
        """Interleaved vectors of a thread in a tile, some of them of nobody."""
        return -(-self.tile_bytes // (self.vector * self.threads))


@dataclass(frozen=True)
class DequantiseConfig:
    """Config of the kernel that writes weights as numbers, 16 bytes of them per thread at a time.

    layout: layout of the weights
    out: 'bf16', 'fp16' or 'fp32'
    unrolled: pieces that a thread has in flight
    """

    layout: str
    out: str
    threads: int = 256
    unrolled: int = 4

    @property
    def words(self) -> int:
        """32-bit words of the quants of a piece."""
        return self.piece // 4

    @property
    def piece(self) -> int:
        """Quants of it."""
        return VECTOR_BYTES // ITEMSIZE[self.out]

    @property
    def further(self) -> int:
        """Blocks from a thread's piece to its next one."""
        return self.threads * self.piece // BLOCK

    @property
    def tile(self) -> int:
        """Columns of a CTA."""
        return self.threads * self.unrolled * self.piece


@dataclass(frozen=True)
class QuantiseConfig:
    """The kernel that rounds activations to int8: neighbouring lanes share a block.

    dtype: of x, 'bf16', 'fp16' or 'fp32'.
    """

    dtype: str
    threads: int = 256

    @property
    def piece(self) -> int:
        """Numbers of a thread, a vector of them."""
        return VECTOR_BYTES // ITEMSIZE[self.dtype]

    @property
    def lanes(self) -> int:
        """Number of lanes that share a block."""
        return BLOCK // self.piece

    @property
    def tile(self) -> int:
        """Columns of a CTA."""
        return self.threads * self.piece


class _Warps:
    """Partition of a CTA into warps: each has `rows` rows, which `splits` warps share."""

    rows: int
    tokens: int
    splits: int
    warps: int

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return self.warps * hw.WARP_THREADS

    @property
    def cta_rows(self) -> int:
        """Rows of a CTA."""
        return self.rows * self.warps // self.splits

    @property
    def sums(self) -> int:
        """Number of sums of a warp: one for each of its rows and each token."""
        return self.rows * self.tokens


@dataclass(frozen=True)
class MatvecConfig(_Warps):
    """Config of the kernel that multiplies up to MOST_TOKENS tokens by the weights and reads each
    weight once.

    A warp has `rows` neighbouring rows and reads 512 columns of all of them at a time, `unrolled`
    times before it computes. `splits` warps of a CTA share the columns of their rows, and add up in
    shared memory at the end. There is no barrier before that.

    layout: layout of the weights
    dtype: dtype of x, 'bf16', 'fp16', 'fp32' or 'q8_1'
    out: dtype of the result, not 'q8_1'
    tokens: a power of two; tokens after the last one are computed but not written
    bias: whether a bias, in the dtype of the result, is added last to the fp32 sums
    """

    layout: str
    dtype: str
    out: str
    tokens: int = 1
    rows: int = 4
    splits: int = 1
    unrolled: int = 2
    warps: int = 4
    bias: bool = False

    @property
    def cutlass_word(self) -> bool:
        """Option of the kernel's name, see `kernelkit.compile.names`. Without it one token takes
        6.5 instead of 7.2 us (H200, 4096 x 4096), but fp32 sums are spilled."""
        return self.dtype == "fp32"


@dataclass(frozen=True)
class BatchConfig(_Warps):
    """Config of the kernel that multiplies 2 to MOST_TOKENS tokens by the weights on tensor cores.
    Each weight is read once and converted exactly to the dtype of x.

    A warp has 16 rows and reads a block of all of them at a time, `unrolled` times before it
    computes. `splits` warps of a CTA share the columns of their rows, as in MatvecConfig.

    dtype: dtype of x, 'bf16', 'fp16' or 'q8_1'
    layout, out, bias: as in MatvecConfig
    tokens: 8 or 16
    """

    layout: str
    dtype: str
    out: str
    tokens: int = 8
    splits: int = 4
    unrolled: int = 8
    warps: int = 4
    bias: bool = False

    rows = 16  # of a warp, no field: that of the instruction

    @property
    def tiles(self) -> int:
        """Number of tiles of 8 tokens."""
        return self.tokens // 8

    @property
    def ahead(self) -> bool:
        """Whether x is loaded together with the weights, where registers suffice for that; it makes
        no difference to the bits."""
        return self.layout == SOA and (self.tokens == 8 or self.dtype == INTEGERS)

    @property
    def parts(self) -> int:
        """Number of parts of the blocks in flight. With two, x of the second part is loaded only
        after the first is multiplied, since x of both would be spilled."""
        return 1 if self.tokens == 8 or self.dtype == INTEGERS else 2

    def turns(self, part: int) -> tuple[int, int]:
        """Return the range (first, end) of turns of a part."""
        return part * self.unrolled // self.parts, (part + 1) * self.unrolled // self.parts
