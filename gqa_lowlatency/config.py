"""Compile-time config of a decode kernel: DecodeConfig, and every limit on its fields.

A config is the key of the compile cache. Lengths, heads, batch, strides, window sizes and scales
are not in it: one compiled kernel serves them all.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from kernelkit.compile.arch import PORTABLE
from kernelkit.plan.dtypes import ITEM_BYTES

HEAD_DIMS = (64, 128, 256, 512)
IO_DTYPES = ("bf16", "fp16")
KV_DTYPES = (*IO_DTYPES, "e4m3")
OUT_DTYPES = (*KV_DTYPES, "fp32")
CLUSTERS = (1, 2, 4, 8, 16)  # every GPU of compute capability 9.0 and 10.0 can launch 8
COLUMNS = (8, 16, 32, 64)  # query rows of one CTA, padded: the N of its matrix products
WARP_COUNTS = (4, 8, 16)  # of a CTA of the Hopper kernel
STEPS = (16, 32)  # keys that a warp of it processes at a time
MAX_Q_TOKENS = 8
KERNELS = {
    "sm_100a": "gqa_lowlatency.sm100.kernel",
    "sm_90a": "gqa_lowlatency.portable.kernel",
    PORTABLE: "gqa_lowlatency.portable.kernel",
}


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Fields of `DecodeConfig` that a caller may choose.

    cluster: CTAs that share the keys of a KV head, and reduce through distributed shared memory; 1
        on compute capabilities 8.x and 12.x.
    owners: CTAs of the cluster that each finish columns / owners rows of O; 0 for as many as can.
    max_columns: most query rows of one CTA; 0 for as many as the architecture's registers hold.
    warps: warps of a CTA of the Hopper kernel, 4, 8 or 16. 0 is 8, or 4 if shared memory does not
        hold the rings of 8. More warps read faster, fewer end sooner.
    step: keys that a warp of the Hopper kernel processes at a time, 16 or 32; 0 is 16. With 32 the
        work independent of their number is halved, and a CTA needs at least twice as many keys.
    stages: depth of the ring of K and V, on Hopper of each warp. 0 chooses what shared memory
        allows. It holds two CTAs an SM on Hopper unless `alone`, and with PDL or `beside` if that
        is deep enough.
    """

    cluster: int = 1
    owners: int = 0
    max_columns: int = 0
    warps: int = 0
    step: int = 0
    stages: int = 0


TUNABLE = tuple(field.name for field in fields(Tuning))


@dataclass(frozen=True)
class Asked:
    """Fields of the config that the arguments of `decode` decide.

    head_dim: columns of Q, K, V and O.
    group: query heads that read one KV head.
    q_tokens: query tokens of an entry, which are the newest keys.
    dtype: dtype of Q.
    kv_dtype: dtype of K and V, '' for `dtype`, 'e4m3' for FP8.
    k_scale, v_scale: whether K and V in e4m3 have scale factors, fp32 [Hkv].
    out_dtype: dtype of O; '' for `dtype`.
    out_scale: whether an O in e4m3 is divided by one fp32 number before it is rounded.
    causal: query token t of T sees no key of later tokens; without it all tokens see all keys.
    left: how far a token sees back is bounded.
    tree: an int64 (B T) gives for each token a word of bits, the query tokens that it sees.
    sink_tokens: the first keys are visible in addition to the window.
    softcap: scores pass through c tanh(s / c).
    sinks: one learned logit per query head joins the maximum and the denominator.
    first: an int32 [B] gives the first key that rows of an entry may see.
    lens: an int32 [B] gives the valid keys of each entry; without it all keys are valid.
    page_size: rows of a page of K and V, located by a page table; 0 without pages.
    parts: several clusters share a KV head; the last to arrive merges the results of all.
    pdl: programmatic dependent launch.
    kv_ready: K, V, lengths and pages were complete before the previous grid began, so that only Q
        waits for it.
    alone: one CTA on an SM, with rings as deep as that allows.
    early: on Hopper the next grid begins together with this one, to fetch meanwhile, instead of
        when this one has fetched.
    beside: two CTAs on an SM of a Blackwell GPU even without PDL, if the ring is deep enough.
    """

    head_dim: int = 128
    group: int = 8
    q_tokens: int = 1
    dtype: str = "bf16"
    kv_dtype: str = ""
    k_scale: bool = False
    v_scale: bool = False
    out_dtype: str = ""
    out_scale: bool = False
    causal: bool = False
    left: bool = False
    tree: bool = False
    sink_tokens: bool = False
    softcap: bool = False
    sinks: bool = False
    lens: bool = False
    first: bool = False
    page_size: int = 0
    parts: bool = False
    pdl: bool = False
    kv_ready: bool = False
    alone: bool = False
    early: bool = False
    beside: bool = False


@dataclass(frozen=True)
class DecodeConfig(Tuning, Asked):
    """Config of one compiled decode kernel: the fields that arguments decide, and a `Tuning`."""

    label: ClassVar = ("gqa_decode", "head_dim", "dtype", "group")

    @property
    def io_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def has_begin(self) -> bool:
        """Whether there may be keys before the first one that a row sees."""
        return self.left or self.first

    @property
    def keys_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def o_dtype(self) -> str:
        return self.out_dtype or self.dtype

    @property
    def rows(self) -> int:
        """Query rows that read one KV head: row t group + g is head g of token t."""
        return self.group * self.q_tokens

    @property
    def columns(self) -> int:
        """Number of query rows of one CTA, padded: the N of its products."""
        limit = self.max_columns or COLUMNS[-1]
        return next((n for n in COLUMNS if n >= self.rows or n == limit), limit)

    @property
    def row_tiles(self) -> int:
        """Number of CTAs that read the same keys, each for `columns` query rows."""
        return -(-self.rows // self.columns)

    @property
    def owner_ctas(self) -> int:
        """Number of CTAs of a cluster that finish O."""
        return self.owners or min(self.cluster, self.columns)

    @property
    def owned_columns(self) -> int:
        """Columns that each owner finishes."""
        return self.columns // self.owner_ctas

    @property
    def statistics_bytes(self) -> int:
        """Bytes of the statistics in an owner's mailbox: fp32 maximum and sum of each column and
        CTA.
        """
        return 8 * self.owned_columns * self.cluster

    @property
    def mail_bytes(self) -> int:
        """Bytes of O in an owner's mailbox: O of every CTA, in fp32."""
        return 4 * self.owned_columns * self.cluster * self.head_dim

    def check_values(self) -> None:
        """Raise ValueError or NotImplementedError, naming the value and what is possible."""
        _one_of("head_dim", self.head_dim, HEAD_DIMS)
        _one_of("dtype", self.dtype, IO_DTYPES)
        _one_of("kv_dtype", self.keys_dtype, KV_DTYPES)
        _one_of("out_dtype", self.o_dtype, OUT_DTYPES)
        _one_of("cluster", self.cluster, CLUSTERS)
        _one_of("warps", self.warps, (0, *WARP_COUNTS))
        _one_of("step", self.step, (0, *STEPS))
        if self.max_columns:
            _one_of("max_columns", self.max_columns, COLUMNS)
        if self.keys_dtype not in (self.dtype, "e4m3"):
            raise NotImplementedError(f"kv_dtype {self.keys_dtype!r} with dtype {self.dtype!r}")
        if self.group < 1:
            raise ValueError(f"group {self.group}: at least 1")
        if not 1 <= self.q_tokens <= MAX_Q_TOKENS:
            raise ValueError(f"q_tokens {self.q_tokens}: from 1 to {MAX_Q_TOKENS}")
        if self.page_size < 0:
            raise ValueError(f"page_size {self.page_size}: at least 1 row, 0 for no pages")
        self._check_options()

    def _check_options(self) -> None:
        if (self.k_scale or self.v_scale) and self.keys_dtype != "e4m3":
            raise ValueError(f"scales with kv_dtype {self.keys_dtype!r}: only e4m3 is scaled")
        if self.out_scale and self.o_dtype != "e4m3":
            raise ValueError(f"out_scale with out_dtype {self.o_dtype!r}: only e4m3 is scaled")
        if self.tree and self.causal:
            raise ValueError("a tree with causal: its words name the tokens that a token sees")
        if self.sink_tokens and not self.left:
            raise ValueError("sink_tokens without a window: all rows see the first keys anyway")
        if self.sink_tokens and self.first:
            raise NotImplementedError("sink_tokens with first_keys: pass only one of them")
        if self.stages < 0:
            raise ValueError(f"stages {self.stages}: at least 1, 0 for automatic")
        if self.page_size and not self.lens:
            raise ValueError("pages without kv_lens: the number of keys in them is not known")
        if self.kv_ready and not self.pdl:
            raise ValueError(
                "kv_ready_before_pdl without pdl: there is no earlier kernel to wait for"
            )
        if self.early and not self.kv_ready:
            raise ValueError("early without kv_ready: a grid that cannot fetch only occupies SMs")
        if self.owners < 0 or self.owners > self.cluster or self.columns % self.owner_ctas:
            raise ValueError(
                f"owners {self.owners}: at most cluster {self.cluster}, a divisor of "
                f"{self.columns} columns, 0 for automatic"
            )


def _one_of(name: str, value: object, supported: tuple) -> None:
    if value not in supported:
        raise NotImplementedError(f"{name} {value!r}: supported are {supported}")
