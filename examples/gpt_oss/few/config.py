"""Configurations of the kernels of few tokens, how work is divided, and their launch parameters.

A product reads each weight once. A CTA has some octets, which are 8 rows of the weight; its warps
divide the columns. A warp's step is 32 columns: a lane loads 16 bytes of a row, of the same columns
for rows and for tokens. So the fragments of mma.sync come from global memory as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernelkit.device.param_table import Word
from kernelkit.plan.hw import WARP_THREADS

MOST_TOKENS = 256
# Most tokens of our products: of the one before attention, which has a norm in it, and of the one
# after. On an H200 torch's take less time with 32 tokens, ours with one; between the two, the
# product after attention was not timed.
MOST_INPUT, MOST_OUTPUT = 8, 16
OCTET = 8  # rows of a weight, and tokens of a block
STEP = 32  # columns of a warp's step: two products
VECTOR_BYTES = 16
LANE_ELEMENTS = VECTOR_BYTES // 2
ROW_LANES = STEP // LANE_ELEMENTS  # lanes that share a row
MOST_WARPS = 10
STAGED_BYTES = 200 << 10  # of tokens in shared memory, at most
LEAST_BYTES = 1 << 13  # of a weight, for a CTA
# Registers of an SM quarter; those of a thread that are not fragments; and the most of a thread.
REGISTERS, OTHERS, MOST_REGISTERS = 1 << 14, 32, 228
QUARTERS = 4  # of an SM, which the warps of a CTA share out
NORM_THREADS = 384
ARGMAX_CTAS, LEAST_VECTORS = 512, 2  # of a launch; of a thread


@dataclass(frozen=True)
class ProductConfig:
    """A product of few tokens with rows of a weight in bf16.

    columns: of the weight, a multiple of STEP.
    octets: of a CTA.
    room: most tokens; up to 8, a power of two, then a multiple of 8.
    warps: of a CTA; a divisor of the number of steps.
    head_dim: 0: add the residual stream and store. Else rotate, store queries, append keys and
        values: an octet is then 4 rows of the first half of a head and their partners.
    normed: x is the residual stream, of which the product takes the RMSNorm.
    adds: another tensor is added to the stream first.
    later: request a weight of a later kernel to L2.
    """

    label: ClassVar = ("few_product",)

    columns: int
    octets: int
    room: int
    warps: int
    head_dim: int = 0
    normed: bool = False
    adds: bool = False
    later: bool = False

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warps * WARP_THREADS

    @property
    def steps(self) -> int:
        """Steps of a warp."""
        return self.columns // STEP // self.warps

    @property
    def pairs(self) -> int:
        """Fragments of 16 rows: two octets each, the last one perhaps one."""
        return -(-self.octets // 2)

    @property
    def rows(self) -> int:
        """Rows of a CTA."""
        return self.octets * OCTET

    @property
    def blocks(self) -> int:
        """Groups of 8 tokens."""
        return -(-self.room // OCTET)

    @property
    def tokens(self) -> int:
        """Columns of the sums."""
        return self.blocks * OCTET

    @property
    def token_bytes(self) -> int:
        """Bytes between tokens of a warp's share in shared memory; lanes then meet no conflict."""
        return 2 * STEP * (self.steps | 1)

    @property
    def share_bytes(self) -> int:
        """Bytes of a warp's share of all tokens, and of what is added to them."""
        return self.room * self.token_bytes * (2 if self.adds else 1)

    @property
    def sum_bytes(self) -> int:
        """Bytes of the sums of all warps of a CTA."""
        return self.warps * self.rows * self.tokens * 4

    @property
    def staged(self) -> bool:
        """Whether tokens go through shared memory, all at once; else they are loaded as weights
        are. A norm needs it."""
        return self.warps * self.share_bytes <= STAGED_BYTES

    @property
    def scale_bytes(self) -> int:
        """Bytes of the norm's weight."""
        return 2 * self.columns if self.normed else 0

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory for tokens and, after them, for sums."""
        return max(self.warps * self.share_bytes if self.staged else 0, self.sum_bytes)

    @property
    def turns(self) -> int:
        """Pairs of results of a thread, at most."""
        return -(-self.rows // 2 * self.room // self.threads)

    @property
    def in_flight(self) -> int:
        """Steps that a warp loads ahead."""
        warps = -(-self.warps // QUARTERS)
        room = min(REGISTERS // (warps * WARP_THREADS) // 8 * 8, MOST_REGISTERS)
        room -= OTHERS + 4 * self.blocks + 4 * self.pairs * self.blocks + 2 * self.octets
        each = 4 * (self.octets + (0 if self.staged else self.blocks))
        return min(self.steps, max(2, room // each))


@dataclass(frozen=True)
class NormConfig:
    """RMSNorm of rows of the residual stream, a CTA for each.

    columns: of a row, a multiple of 8.
    adds: another tensor is added first, and the sum is stored.
    """

    label: ClassVar = ("few_norm",)

    columns: int
    adds: bool = False
    threads: int = NORM_THREADS

    @property
    def vectors(self) -> int:
        """Vectors of a thread, at most."""
        return -(-self.columns // LANE_ELEMENTS // self.threads)


@dataclass(frozen=True)
class HeadsConfig:
    """Rotation and append after a product that is not ours. head_dim: a multiple of 16."""

    label: ClassVar = ("few_heads",)

    head_dim: int
    threads: int = 128

    @property
    def vectors(self) -> int:
        """Vectors of half a head."""
        return self.head_dim // 2 // LANE_ELEMENTS


@dataclass(frozen=True)
class ArgmaxConfig:
    """The largest logit of parts of rows, or, `final`, of all parts of a row."""

    label: ClassVar = ("few_argmax",)

    final: bool
    threads: int = 128


def parts_for(tokens: int, vectors: int) -> int:
    """Return into how many parts a row of logits is cut."""
    most = max(1, vectors // (LEAST_VECTORS * ArgmaxConfig(False).threads))
    return max(1, min(most, ARGMAX_CTAS // tokens))


def warps_for(columns: int) -> int:
    """Return how many warps divide the columns of a product."""
    steps = columns // STEP
    return max(warps for warps in range(1, MOST_WARPS + 1) if steps % warps == 0)


def room_for(tokens: int) -> int:
    """Return the room of a product for so many tokens."""
    return 1 << (tokens - 1).bit_length() if tokens <= OCTET else -(-tokens // OCTET) * OCTET


def octets_for(rows: int, columns: int, sms: int) -> int:
    """Return the octets of a CTA of a weight: no SM has two turns, and no CTA too few bytes."""
    return max(-(-(rows // OCTET) // sms), -(-LEAST_BYTES // (2 * OCTET * columns)))


@dataclass(frozen=True, kw_only=True)
class NormWords:
    """A weight in bf16, and the bits of epsilon in fp32."""

    weight: Word
    eps_bits: Word


@dataclass(frozen=True, kw_only=True)
class RowWords:
    """Entries of a cache; see `kvcache.Rows`. Addresses of entry 0 of keys and of values."""

    keys: Word
    values: Word
    slot_stride: Word
    rows: Word  # of a slot
    row_bytes: Word


@dataclass(frozen=True, kw_only=True)
class HeadWords:
    """Where heads go.

    positions: int64 [T].
    angles: fp32 [positions, 2, 2, D / 2]; see `model.angle_table`.
    mapping: int64 [T], entries of `cache`, -1 for none.
    """

    queries: Word
    q_heads: Word
    kv_heads: Word
    positions: Word
    angles: Word
    mapping: Word
    cache: RowWords


@dataclass(frozen=True, kw_only=True)
class ProductParams:
    """`product_kernel.Product`: bf16 tensors without gaps.

    x: [T, K].
    more: [T, K], added to x.
    residual: [T, N], added to the product.
    out: [T, N], or, normed, [T, K] for the sum of x and `more`.
    later: a weight of a later kernel.
    later_piece: bytes of it that a lane of a CTA's first warp requests.
    """

    tokens: Word
    octets: Word  # of the weight
    weight: Word
    bias: Word
    x: Word
    more: Word
    residual: Word
    out: Word
    norm: NormWords
    heads: HeadWords
    later: Word
    later_bytes: Word
    later_piece: Word


@dataclass(frozen=True, kw_only=True)
class HeadsParams:
    """`heads_kernel.Heads`. x: bf16 [T, (Hq + 2 Hkv) D]."""

    tokens: Word
    x: Word
    heads: HeadWords


@dataclass(frozen=True, kw_only=True)
class NormParams:
    """`norm_kernel.Norm`: bf16 [T, K] without gaps. summed: x + more."""

    x: Word
    more: Word
    summed: Word
    out: Word
    norm: NormWords


@dataclass(frozen=True, kw_only=True)
class ArgmaxParams:
    """`argmax_kernel.Argmax`.

    logits: bf16 [T, V].
    vectors: of a row, 8 logits each.
    parts: of a row.
    best: fp32 [T, parts], the largest logits of parts.
    index: int32 [T, parts], where they are.
    ids: int64 [T].
    """

    logits: Word
    vectors: Word
    parts: Word
    best: Word
    index: Word
    ids: Word
