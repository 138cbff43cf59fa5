"""Warps and shared memory of the mma.sync kernel, for Hopper and for GPUs without clusters, as
data.

GPUs without clusters use one CTA per cluster: CTAs share keys through the parts of
`shared/finish.py`. They have less shared memory, 99 or 163 KB (`kernelkit.plan.hw`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from gqa_lowlatency.config import COLUMNS, WARP_COUNTS, DecodeConfig
from kernelkit.compile.arch import PORTABLE, WITHOUT_E4M3, require_pdl, written_for
from kernelkit.plan import hw
from kernelkit.plan.barriers import BarrierPlan, NamedBarrier
from kernelkit.plan.dtypes import ITEM_BYTES
from kernelkit.plan.smem import SmemBuffer, SmemPlan
from kernelkit.plan.warps import Role, RolePlan

KEYS = 16  # the M of a warp's products
MAX_DIMS = 256  # of the head in one warp; the warps of a team divide more
WARPS = 8
FEWER_WARPS = 4  # if shared memory does not hold the rings of 8
MAX_ELEMENTS = 4096  # of O in the registers of a warp: 128 per thread, of at most 255
SCORE_STAGES = 2  # of what a team exchanges: one of this step, one that may still be read
MAX_ELEMENTS_OF_TWO = 8192  # of O in all warps of a CTA, if two CTAs fit on an SM
SMEM_OF_ONE = 150 * 1024  # of a CTA; more was not faster
MIN_SLOTS, MAX_SLOTS = 2, 8
BARRIER_BYTES = 16  # the mailbox's mbarrier, then the flag of `shared/finish.py`
PAD = 4  # fp32 between columns of partial results: no two lanes write to one bank
# Parts whose sums are loaded at once without clusters. A KV head then has tens of parts, and one
# load after the other would take longer than their keys.
PARTS_AHEAD = 8


@dataclass(frozen=True)
class PortablePlan:
    """Plan of the mma.sync kernel.

    The ring of a warp has slots for the keys of a step, K and V alternately, and finally its
    results.

    A team is a warp, or above head dim 256 two warps with the same keys, each with a slice of the
    columns of Q, K, V and O. They exchange their sums for Q K^T once a step.
    """

    config: DecodeConfig
    arch: str = "sm_90a"

    @property
    def portable(self) -> bool:
        """Whether the GPU has compute capability 8.x or 12.x: no clusters."""
        return written_for(self.arch) == PORTABLE

    @cached_property
    def warps(self) -> int:
        if self.config.warps or not self.portable:
            return self.config.warps or WARPS
        usual = replace(self, config=replace(self.config, warps=WARPS))
        return WARPS if usual.smem_bytes <= self.smem_limit else FEWER_WARPS

    @property
    def slices(self) -> int:
        """Slices of the head: warps of a team, 1 or 2."""
        return -(-self.config.head_dim // MAX_DIMS)

    @property
    def dims(self) -> int:
        """Columns of the head in a slice."""
        return self.config.head_dim // self.slices

    @property
    def teams(self) -> int:
        """Teams of a CTA, each with its own keys."""
        return self.warps // self.slices

    @property
    def parts_ahead(self) -> int:
        """Number of parts that the last part to arrive loads at once."""
        return PARTS_AHEAD if self.portable else 1

    @property
    def smem_limit(self) -> int:
        """Most bytes of shared memory of a CTA."""
        return hw.smem_bytes_per_cta(self.arch)

    @property
    def smem_of_two(self) -> int:
        """Bytes of shared memory of a CTA if two fit on an SM, so that more clusters fit on the
        GPU.
        """
        return hw.smem_bytes_per_sm(self.arch) // 2 - hw.SMEM_RESERVED_BYTES

    @property
    def q_dtype(self) -> str:
        """dtype of Q and K in the first product: e4m3 to fp16 costs a quarter of the
        instructions.
        """
        return self.p_dtype

    @property
    def scaled(self) -> bool:
        """Whether Q has to be converted to fp16, see `queries.py`."""
        return self.q_dtype != self.config.dtype

    @property
    def p_dtype(self) -> str:
        """dtype of P and V in the second product: fp16 holds every e4m3, and P more exactly than
        bf16.
        """
        return "fp16" if self.config.keys_dtype == "e4m3" else self.config.dtype

    @property
    def keys(self) -> int:
        """Keys that a team processes at a time."""
        return self.config.step or KEYS

    @property
    def page_holds_step(self) -> bool:
        """Whether the keys of a step lie in one page; true without pages."""
        return self.config.page_size % self.keys == 0

    @property
    def blocks(self) -> int:
        """Blocks of 16 keys that a team processes at a time."""
        return self.keys // KEYS

    @cached_property
    def roles(self) -> RolePlan:
        """Roles: all warps have the same one."""
        return RolePlan((Role("stream", 0, self.warps, "S = K Q^T, softmax, O^T += V^T P"),))

    @cached_property
    def barriers(self) -> BarrierPlan:
        """Named barriers."""
        meaning = "an owner's sums are in the workspace, or the number of parts is known"
        named = [NamedBarrier("finish", ("stream",), self.threads, meaning)]
        if self.slices > 1:
            meaning = "both slices of a team have stored their sums for the keys of a step"
            threads = hw.WARP_THREADS * self.slices
            named.append(NamedBarrier("team", ("stream",), threads, meaning, self.teams))
        return BarrierPlan(self.roles, tuple(named))

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tile(self) -> int:
        """Keys that a CTA processes at a time."""
        return self.keys * self.teams

    @property
    def row_bytes(self) -> int:
        """Bytes of K or V of one key."""
        return self.dims * ITEM_BYTES[self.config.keys_dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of K or V of 16 keys."""
        return KEYS * self.row_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of K or V of one step of a warp."""
        return self.keys * self.row_bytes

    @property
    def slots(self) -> int:
        """Slots of a warp's ring, which K and V use alternately."""
        wide = min(SMEM_OF_ONE, self.smem_limit)
        room = wide if self.config.alone else self.smem_of_two
        return self.config.stages or self.slots_within(room)

    def slots_within(self, smem_bytes: int) -> int:
        """Return the slots that fit into `smem_bytes` of a CTA, at least MIN_SLOTS."""
        left = smem_bytes - self.config.statistics_bytes - self.config.mail_bytes - BARRIER_BYTES
        if self.portable:  # on Hopper they fit in addition
            left -= self.query_bytes + self.score_bytes * self.warps
        return max(MIN_SLOTS, min(MAX_SLOTS, left // (self.warps * self.slot_bytes)))

    @property
    def partial_words(self) -> int:
        """Number of fp32 of one warp's results: columns of its slice of O, then a maximum and a sum
        of each.
        """
        return self.config.columns * (self.dims + PAD + 2)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring of one warp, enough for the warp's results."""
        return max(self.slots * self.slot_bytes, 4 * self.partial_words)

    @property
    def bounded(self) -> bool:
        """Whether ptxas has to leave registers for a second CTA; with 8 columns it always does."""
        elements = self.config.columns * self.dims
        few = self.config.columns > 8 and elements * self.warps <= MAX_ELEMENTS_OF_TWO
        return few and (not self.portable or self.smem_bytes <= self.smem_of_two)

    @property
    def queries_in_smem(self) -> bool:
        """Whether fragments of Q exceed the registers left by O, and are read again for every 16
        keys.
        """
        return self.config.columns * self.dims > MAX_ELEMENTS // 2

    @property
    def query_bytes(self) -> int:
        """Bytes of the fragments of Q in shared memory."""
        return self.config.columns * self.config.head_dim * 2 if self.queries_in_smem else 0

    @property
    def score_bytes(self) -> int:
        """Bytes of the sums for Q K^T, fp32, that a warp leaves for the other slice of its team."""
        own = 4 * self.keys * self.config.columns
        return own * SCORE_STAGES if self.slices > 1 else 0

    @cached_property
    def smem(self) -> SmemPlan:
        """Shared memory. The mailbox has separate memory: peers may fill it while this CTA still
        works.
        """
        config = self.config
        return SmemPlan((
            SmemBuffer("rings", self.ring_bytes, self.warps, align=16),
            SmemBuffer("queries", self.query_bytes, align=16),
            SmemBuffer("scores", self.score_bytes, self.warps, align=16),
            SmemBuffer("statistics", config.statistics_bytes, align=16),
            SmemBuffer("mail", config.mail_bytes, align=16),
            SmemBuffer("arrived", BARRIER_BYTES, align=hw.MBARRIER_BYTES),
        ))  # fmt: skip

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory; with PDL and `alone` more than half of an SM's."""
        least = self.smem_of_two + 16 if self.config.pdl and self.config.alone else 0
        return max(self.smem.bytes, least)

    def check(self) -> None:
        """Raise ValueError or NotImplementedError if a CTA cannot hold the plan, or the GPU lacks a
        feature.
        """
        if self.portable:
            self._check_gpu()
        if self.config.max_columns not in (0, *COLUMNS):
            raise NotImplementedError(f"max_columns {self.config.max_columns}: one of {COLUMNS}")
        if self.warps not in WARP_COUNTS:
            raise NotImplementedError(
                f"warps {self.config.warps}: one of {WARP_COUNTS}, 0 for {WARPS}"
            )
        if self.slots < MIN_SLOTS:
            raise ValueError(f"stages {self.slots}: at least {MIN_SLOTS}, for K and V of a step")
        limit = MAX_ELEMENTS * 8 // max(self.warps, 8)
        if self.config.columns * self.dims > limit:
            raise NotImplementedError(
                f"{self.config.columns} columns of head_dim {self.config.head_dim} with "
                f"{self.warps} warps: O of a warp is at most {limit} elements (registers), and "
                f"{self.slices} of them divide head_dim"
            )
        if self.smem_bytes > self.smem_limit:
            raise ValueError(f"{self.smem_bytes} bytes of shared memory, limit {self.smem_limit}")
        self.barriers.check()

    def _check_gpu(self) -> None:
        """Raise NotImplementedError for features that compute capabilities 8.x and 12.x lack in
        this kernel.
        """
        config, arch = self.config, self.arch
        if config.cluster > 1:
            raise NotImplementedError(
                f"cluster {config.cluster} on {arch}: 1; use `parts` to split keys over CTAs"
            )
        if config.pdl:
            require_pdl(arch)
        if config.keys_dtype == "e4m3" and arch in WITHOUT_E4M3:
            raise NotImplementedError(
                f"e4m3 keys on {arch}: their conversion needs compute capability 8.9"
            )
        if config.o_dtype == "e4m3" and arch in WITHOUT_E4M3:
            raise NotImplementedError(
                f"out_dtype e4m3 on {arch}: its conversion needs compute capability 8.9"
            )
