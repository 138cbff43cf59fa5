"""Compile-time config of an attention kernel: AttentionConfig, and every limit on its fields.

A config is the key of the compile cache. Lengths, heads, batch, strides, window sizes and the
softmax scale are not in it: one compiled kernel serves them all.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from kernelkit.plan.dtypes import ITEM_BYTES

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512))  # of TMA and wgmma
PORTABLE_DIMS = range(16, 513, 16)  # of mma.sync
IO_DTYPES = ("bf16", "fp16")
FP8 = "e4m3"
OUT_DTYPES = (*IO_DTYPES, "fp32", FP8)
Q_DTYPES_OF_FP8 = ("bf16", FP8)  # with K and V in e4m3: a bf16 is split into two e4m3 terms
PAGE_STEP = 8  # TMA reads pages whose rows are a multiple of this, one swizzle atom
PAGE_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)  # rows of a page in this project's pools
PORTABLE_PAGE_SIZES = (1, 2, 4, *PAGE_SIZES)  # mma.sync fetches rows one by one
SCHEDULES = ("base", "pingpong")
PORTABLE_SCHEDULES = ("base", "keys")  # with mma.sync
INSTRUCTIONS = ("mma.sync",)
EXP2_PAIRS = 16  # pairs of neighbouring exponentials, some of them by a polynomial
MAX_RESCALE_LOG2 = 15.0  # 2 ** 16 is beyond the largest fp16, 65504
RAW_FP16_LOG2 = 8.0  # leaves room for the sums of some hundred weights
# Tuned: every extra power of two of headroom is lost for the smallest weights. With less headroom
# rows need a new maximum more often. With 3 a row of normal scores rarely needs one twice.
FP8_RESCALE_LOG2 = 3.0
MAX_FP8_LOG2 = 8.0  # below the largest e4m3, 448


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Fields of `AttentionConfig` that a caller may choose.

    tile_m: query rows of a block on Hopper, 64 for each computing warpgroup; 0 chooses.
    tile_n: keys of a tile; 0 is 128 (`attention` chooses fewer where few are visible).
    ctas: CTAs on Hopper that share the keys they fetch, 1 or 2, for any mask and key storage;
        0 chooses.
    k_stages: pieces in the K ring, 0 for as many as are useful and fit.
    v_stages: pieces in the V ring, likewise.
    schedule: 'base', twelve warps for one query tile, or 'pingpong', sixteen for two: the softmax
        of one tile overlaps the products of the other; '' is 'base' (`attention` chooses). On
        Hopper warpgroups issue products in any order ('base') or in ping-pong order; '' chooses by
        head dim. With mma.sync 'base', or 'keys': two warps share the keys of Q K^T, see `slices`.
    polynomial: how many of 16 pairs of exponentials are computed by a polynomial instead of the
        MUFU; -1 chooses.
    rescale_log2: O is rescaled only when a row maximum grew by more than 2 ** rescale_log2.
        P then stays below 2 ** rescale_log2, which fp16 has to hold. -1 chooses: 15, or 8 where raw
        sums are stored in fp16. For e4m3 -1 chooses 3: P is at most 2 ** 8, and the maximum has
        weight 2 ** (8 - rescale_log2).
    instructions: 'mma.sync' selects the kernel that runs on every GPU; '' selects the kernel of
        the architecture if it supports the head dims.
    slices: with mma.sync, warps that share the columns of O of a query tile (1, 2 or 4). They also
        share the columns of Q and K, or the keys. 0 chooses.
    """

    tile_m: int = 0
    tile_n: int = 0
    ctas: int = 0
    k_stages: int = 0
    v_stages: int = 0
    schedule: str = ""
    polynomial: int = -1
    rescale_log2: float = -1.0
    instructions: str = ""
    slices: int = 0


TUNABLE = tuple(field.name for field in fields(Tuning))


@dataclass(frozen=True)
class Asked:
    """Fields of the config that the arguments of `attention` decide.

    head_dim: columns of Q and K.
    v_head_dim: columns of V and O, 0 for head_dim.
    dtype: dtype of Q, 'bf16', 'fp16' or 'e4m3'.
    kv_dtype: dtype of K and V, '' for `dtype`; 'e4m3' goes with Q in 'bf16' or 'e4m3'.
        P is rounded to the dtype of K and V, all sums are fp32.
    q_scale, k_scale, v_scale: whether e4m3 inputs have scale factors, fp32 [Hq] or [Hkv].
    out_dtype: dtype of O; '' is `dtype`, 'bf16' where `dtype` is 'e4m3', or 'fp32' for a raw O.
    out_scale: whether an O in e4m3 is divided by one fp32 number before it is rounded.
    right: how far a row sees to the right depends on the row (causal, right window).
    left: how far a row sees to the left depends on the row (left window).
    tree: the queries are the newest keys, and an int64 word of each names those that it sees.
    sink_tokens: the first positions are visible in addition to the window.
    softcap: scores pass through c tanh(s / c).
    sinks: one learned logit per query head joins the maximum and the denominator.
    normalize: True writes O = softmax(..) V; False the raw sum exp(s - row_max) V, and row_max.
    kv_lens: an int32 [B] gives the number of valid keys of each batch entry.
    q_offset: an int32 [B] gives the position of the first query of each batch entry.
    varlen_q, varlen_k: Q and O, or K and V, are packed [T, H, D] with cu_seqlens.
    page_size: rows of a page of K and V, located by a page table; 0 without pages.
    group: query heads of a KV head that share query tiles, always all of them; 1 if none do.
    rope_dim: last dims of O that are rotated back by the position of their query; 0 for none.
    k_is_v: K and V are one tensor, whose tiles are loaded once for both products; Hopper only.
    mask_mod, score_mod: programs of `fmha.mods` that hide keys and change scores; '' for none.
    block_rows, block_keys: sizes of the blocks of a block mask, whose lists are walked instead of
        a range of keys; 0 for none.
    pdl: launch dependents early, and wait for the previous kernel (programmatic dependent launch).
    """

    head_dim: int = 64
    v_head_dim: int = 0
    dtype: str = "bf16"
    kv_dtype: str = ""
    q_scale: bool = False
    k_scale: bool = False
    v_scale: bool = False
    out_dtype: str = ""
    out_scale: bool = False
    right: bool = False
    left: bool = False
    tree: bool = False
    sink_tokens: bool = False
    softcap: bool = False
    sinks: bool = False
    normalize: bool = True
    kv_lens: bool = False
    q_offset: bool = False
    varlen_q: bool = False
    varlen_k: bool = False
    page_size: int = 0
    group: int = 1
    rope_dim: int = 0
    k_is_v: bool = False
    pdl: bool = False
    mask_mod: str = ""
    score_mod: str = ""
    block_rows: int = 0
    block_keys: int = 0


@dataclass(frozen=True)
class AttentionConfig(Tuning, Asked):
    """Config of one compiled forward kernel: the fields that arguments decide, and a `Tuning`."""

    label: ClassVar = ("fmha", "head_dim", "dtype")

    @property
    def v_dim(self) -> int:
        """Columns of V and O."""
        return self.v_head_dim or self.head_dim

    @property
    def has_own_dims(self) -> bool:
        """Whether the architecture-specific kernels support these head dims."""
        return (self.head_dim, self.v_dim) in HEAD_DIMS

    @property
    def keys_dtype(self) -> str:
        """dtype of K, V and P."""
        return self.kv_dtype or self.dtype

    @property
    def is_fp8(self) -> bool:
        """Whether the products are computed in e4m3."""
        return self.keys_dtype == FP8

    @property
    def q_terms(self) -> int:
        """Number of terms, in the dtype of the products, that Q is split into."""
        return 1 if self.dtype == self.keys_dtype else 2

    @property
    def o_dtype(self) -> str:
        """dtype of O: the input's when normalised; raw sums need the range of fp32."""
        if self.out_dtype or not self.normalize:
            return self.out_dtype or "fp32"
        return "bf16" if self.dtype == FP8 else self.dtype

    @property
    def lag_log2(self) -> float:
        """`rescale_log2`, with the default filled in."""
        if self.rescale_log2 != -1:
            return self.rescale_log2
        if self.is_fp8:
            return FP8_RESCALE_LOG2
        raw_fp16 = not self.normalize and self.o_dtype == "fp16"
        return RAW_FP16_LOG2 if raw_fp16 else MAX_RESCALE_LOG2

    @property
    def bias_log2(self) -> float:
        """log2 of the weight of a row's maximum."""
        return MAX_FP8_LOG2 - self.lag_log2 if self.is_fp8 else 0.0

    @property
    def q_item_bytes(self) -> int:
        """Bytes of one element of Q."""
        return ITEM_BYTES[self.dtype]

    @property
    def io_bytes(self) -> int:
        """Bytes of one element of K, V and P."""
        return ITEM_BYTES[self.keys_dtype]

    @property
    def out_bytes(self) -> int:
        """Bytes of one element of O."""
        return ITEM_BYTES[self.o_dtype]

    @property
    def has_mods(self) -> bool:
        """Whether a function of positions hides keys or changes scores."""
        return bool(self.mask_mod or self.score_mod)

    @property
    def hides_all(self) -> bool:
        """Whether a function may hide keys of any tile."""
        return bool(self.mask_mod) and not self.block_keys

    @property
    def hides_blocks(self) -> bool:
        """Whether a function hides keys of the tiles of listed blocks that are seen in part."""
        return bool(self.mask_mod) and self.block_keys > 0

    @property
    def moves_all(self) -> bool:
        """Whether functions of positions are evaluated in every tile."""
        return self.hides_all or bool(self.score_mod)

    @property
    def scales_first(self) -> bool:
        """Whether scores are scaled before they are changed, not within the exponential."""
        return self.softcap or bool(self.score_mod)

    @property
    def even_rows(self) -> bool:
        """Whether all rows see about as many keys: all without a right edge, a window with two
        edges. Blocks of a block mask do not.
        """
        return not self.block_keys and (not self.right or self.left)

    @property
    def ragged_keys(self) -> bool:
        """Whether rows of the last key tile may lie past an end that TMA does not know."""
        return self.kv_lens or self.varlen_k or self.page_size > 0 or self.q_offset

    def check_values(self) -> None:
        """Raise ValueError or NotImplementedError for a field, or combination of fields, out of
        range.

        The error names the value and the allowed values. `fmha.plan.make_plan` refuses what the
        memory of an architecture cannot hold, or what its kernel does not support.
        """
        self._check_types()
        self._check_options()

    def _check_types(self) -> None:
        self._check_inputs()
        if self.o_dtype not in OUT_DTYPES:
            raise NotImplementedError(f"out_dtype {self.o_dtype!r}: one of {OUT_DTYPES}")
        check_head_dims(self.head_dim, self.v_dim)
        schedules = tuple(dict.fromkeys((*SCHEDULES, *PORTABLE_SCHEDULES)))
        if self.schedule not in ("", *schedules):
            raise NotImplementedError(
                f"schedule {self.schedule!r}: one of {schedules}, '' for automatic"
            )
        if self.instructions not in ("", *INSTRUCTIONS):
            raise NotImplementedError(
                f"instructions {self.instructions!r}: one of {INSTRUCTIONS}, '' for automatic"
            )
        if self.page_size < 0:
            raise ValueError(f"page_size {self.page_size}: at least 1 row, 0 for no pages")
        if self.group < 1:
            raise ValueError(f"group {self.group}: at least 1 query head")
        if not -1 <= self.polynomial <= EXP2_PAIRS:
            raise ValueError(
                f"polynomial {self.polynomial}: 0 to {EXP2_PAIRS} pairs, -1 for automatic"
            )
        most, held = (MAX_FP8_LOG2, "e4m3") if self.is_fp8 else (MAX_RESCALE_LOG2, "fp16")
        if not 0.0 <= self.lag_log2 <= most:
            raise ValueError(
                f"rescale_log2 {self.rescale_log2}: from 0 to {most}, above which P in {held} "
                "overflows, or -1 for automatic"
            )

    def _check_inputs(self) -> None:
        if self.is_fp8 and self.dtype not in Q_DTYPES_OF_FP8:
            raise NotImplementedError(
                f"dtype {self.dtype!r} with K and V in {FP8}: Q is one of {Q_DTYPES_OF_FP8}"
            )
        if not self.is_fp8 and self.dtype not in IO_DTYPES:
            raise NotImplementedError(f"dtype {self.dtype!r}: supported are {(*IO_DTYPES, FP8)}")
        if not self.is_fp8 and self.keys_dtype != self.dtype:
            raise NotImplementedError(
                f"kv_dtype {self.kv_dtype!r} with Q in {self.dtype}: {FP8}, '' for the dtype of Q"
            )
        for name, dtype in (
            ("q_scale", self.dtype),
            ("k_scale", self.keys_dtype),
            ("v_scale", self.keys_dtype),
        ):
            if getattr(self, name) and dtype != FP8:
                raise ValueError(f"{name} with {dtype}: only {FP8} is scaled")
        if self.out_scale and self.o_dtype != FP8:
            raise ValueError(f"out_scale with out_dtype {self.o_dtype}: only {FP8} is scaled")

    def _check_options(self) -> None:
        if self.tree and self.right:
            raise ValueError("a tree with a right edge: its words name the newest keys of a row")
        if self.tree and self.rope_dim:
            raise NotImplementedError("a tree with rope: rows are turned by their number")
        if self.softcap and self.score_mod:
            raise NotImplementedError(
                "softcap with score_mod: write c * torch.tanh(score / c) into the function"
            )
        if self.sink_tokens and not self.left:
            raise ValueError(
                "sink_tokens without a left window: all rows see the first keys anyway"
            )
        if self.sinks and not self.normalize:
            raise ValueError(
                "sinks with normalize=False: sinks add to a denominator, a raw O has none"
            )
        if self.o_dtype == FP8 and not self.normalize:
            raise ValueError(
                f"out_dtype {FP8} with normalize=False: raw sums leave its range. Pass fp32, and "
                "quantise the merged O"
            )
        if self.page_size and not self.kv_lens:
            raise ValueError("pages without kv_lens: the number of keys in them is not known")
        if self.page_size and self.varlen_k:
            raise ValueError("pages conflict with cu_seqlens_k: both locate the keys")
        if self.rope_dim % 2 or not 0 <= self.rope_dim <= self.v_dim:
            raise ValueError(f"rope_dim {self.rope_dim}: even, from 0 to {self.v_dim}")
        if self.k_is_v and self.is_fp8:
            raise NotImplementedError("k_is_v with K and V in e4m3: V is transposed, K is not")
        if self.k_is_v and self.v_dim != self.head_dim:
            raise ValueError(
                f"k_is_v with v_head_dim {self.v_dim}: must be {self.head_dim}, as for K"
            )
        for name in ("k_stages", "v_stages"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)}: at least 1, 0 for automatic")


def check_head_dims(head_dim: int, v_dim: int) -> None:
    """Raise NotImplementedError, naming the value and what is possible."""
    dims = PORTABLE_DIMS
    if head_dim not in dims or v_dim not in dims:
        raise NotImplementedError(
            f"head_dim {head_dim} with v_head_dim {v_dim}: both are multiples of {dims.step} from "
            f"{dims[0]} to {dims[-1]}"
        )


def check_pages_by_tma(page_size: int) -> None:
    """Raise NotImplementedError for pages whose size is not a multiple of PAGE_STEP rows.

    The swizzle of shared memory repeats after PAGE_STEP rows, and a TMA box has rows of one page.
    """
    if page_size % PAGE_STEP:
        raise NotImplementedError(
            f"page_size {page_size} with TMA: a multiple of {PAGE_STEP}; config=AttentionConfig("
            "instructions='mma.sync') reads pages of any size, kvcache.gather_pages copies rows"
        )
