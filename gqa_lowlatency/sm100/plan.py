"""Warps, barriers, shared memory and tensor memory of the Blackwell kernel, as data.

Both products have their operands swapped, so that M is never wasted on few query rows: a tile of
128 keys gives S (128 keys x N) = K Q^T and O^T (head_dim x N) += V^T P, N = config.columns. K and V
use one ring, in pieces of 128 keys by at most 128 columns of the head, in the order
K0, (K1, V0), (K2, V1), ...
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from gqa_lowlatency.config import DecodeConfig
from kernelkit.plan import hw
from kernelkit.plan.barriers import BarrierPlan, NamedBarrier
from kernelkit.plan.dtypes import ITEM_BYTES
from kernelkit.plan.edges import Edge, EdgePlan, Signal
from kernelkit.plan.smem import SmemBuffer, SmemPlan
from kernelkit.plan.tmem import TmemPlan, TmemRange
from kernelkit.plan.warps import Role, RolePlan

TILE = 128  # keys of a tile: the M of S; one thread per key in the softmax
PIECE = 128  # columns of the head in a piece, and the M of O^T
P_BIAS_LOG2 = 8  # log2 factor of weights in e4m3, whose largest number is 448
MIN_STAGES = 3  # K of the next tile, and K and V of this one, in one or two pieces
IN_FLIGHT_BYTES = 8_000_000 // hw.SMS  # an SM's part of 8 TB/s (B200) during 1 us of latency
BESIDE_COLUMNS = 32  # with 64, scores and sums fill the 128 registers of a thread of two CTAs
BARRIER_BYTES = 512  # reserved for mbarriers, whose number depends on the depth of the ring
MAILBOX_BARRIER_BYTES = 16  # the mailbox's mbarrier, then the flag of `shared/finish.py`
MIN_BOX_BYTES = 128  # TMA writes to multiples of this in shared memory

ROLES = RolePlan(
    (
        Role("epilogue", 0, 4, "softmax, correct O, reduce over the cluster: one key per thread"),
        Role("mma", 4, 1, "S = K Q^T and O^T += V^T P on the tensor core"),
        Role("load_kv", 5, 1, "load pieces of K and V by TMA"),
        Role("load_q", 6, 1, "load rows of Q by cp.async"),
    )
)
BARRIERS = BarrierPlan(
    ROLES,
    tuple(
        NamedBarrier(name, ("epilogue",), ROLES["epilogue"].threads, meaning)
        for name, meaning in (
            ("columns", "each warp stored its part of every column"),
            ("done", "tensor memory is read, the own mailbox is filled"),
            ("finish", "an owner's sums are in the workspace, or the number of parts is known"),
        )
    ),
)


@dataclass(frozen=True)
class Plan100:
    """Everything about a config that is decided before tracing."""

    config: DecodeConfig

    @property
    def barriers(self) -> BarrierPlan:
        """Named barriers, equal for all configs."""
        return BARRIERS

    @property
    def columns(self) -> int:
        return self.config.columns

    @property
    def kv_bytes(self) -> int:
        """Bytes of an element of K, V, and of Q and P as operands."""
        return ITEM_BYTES[self.config.keys_dtype]

    @property
    def piece_columns(self) -> int:
        """Columns of the head in a piece: K of a part of S, and M of a part of O^T."""
        return min(self.config.head_dim, PIECE)

    @property
    def pieces(self) -> int:
        """Number of pieces of K, and of V, in a tile."""
        return self.config.head_dim // self.piece_columns

    @property
    def in_turn(self) -> bool:
        """Whether the MMA waits for one piece of V after the other.

        A wait for all of V would keep most of the ring idle if V has four pieces.
        """
        return self.pieces > 2

    @property
    def min_stages(self) -> int:
        """Fewest stages of the ring: all pieces of V, which the epilogue may have to clear before
        any is released, and three for K and V of this tile and K of the next.
        """
        return max(MIN_STAGES, self.pieces)

    @property
    def is_fp8(self) -> bool:
        """Whether all operands are e4m3: the kernel quantises Q row by row, and P."""
        return self.config.keys_dtype == "e4m3"

    @property
    def bias_log2(self) -> int:
        """log2 of the factor of weights over exp2(score - maximum), since e4m3 has few small
        numbers.
        """
        return P_BIAS_LOG2 if self.is_fp8 else 0

    @property
    def line_bytes(self) -> int:
        """Bytes of a swizzled line of Q, K and V; lines of P always have the most bytes."""
        return min(hw.SMEM_LINE_BYTES, self.piece_columns * self.kv_bytes)

    @property
    def panel(self) -> int:
        """Columns of the head in a line."""
        return self.line_bytes // self.kv_bytes

    @property
    def piece_bytes(self) -> int:
        """Bytes of a stage of the ring."""
        return TILE * self.piece_columns * self.kv_bytes

    @property
    def box_rows(self) -> int:
        """Keys of one TMA copy: the largest number that divides both a tile and a page."""
        return gcd(TILE, self.config.page_size or TILE)

    @property
    def ragged(self) -> bool:
        """Whether a tile may hold keys that exist in memory and that no row sees."""
        return self.config.lens or self.config.has_begin

    @property
    def o_lanes(self) -> int:
        """Rows of O^T in the 32 lanes of a warp.

        With M = 64 only the first half of the lanes is used (PTX ISA, tcgen05 data path layout F).
        """
        return self.piece_columns // hw.WARPGROUP_WARPS

    @cached_property
    def fixed(self) -> tuple[SmemBuffer, ...]:
        """Buffers in shared memory before the ring."""
        config, warps = self.config, ROLES["epilogue"].warps
        columns = 4 * self.columns
        return (
            SmemBuffer("barriers", BARRIER_BYTES, align=hw.MBARRIER_BYTES),
            SmemBuffer("arrived", MAILBOX_BARRIER_BYTES, align=hw.MBARRIER_BYTES),
            SmemBuffer("tmem_base", 4, align=4),
            SmemBuffer("parts", warps * columns, 2, align=16),  # a stage per parity of the tile
            SmemBuffer("bases", 2 * columns, warps, align=16),  # each warp its own copy
            SmemBuffer("row_scales", columns if self.is_fp8 else 0, align=16),
            SmemBuffer("statistics", config.statistics_bytes, align=16),
            SmemBuffer("mail", config.mail_bytes, align=16),
            SmemBuffer("sQ", self.columns * config.head_dim * self.kv_bytes),
            SmemBuffer("sP", self.columns * TILE * self.kv_bytes),
        )

    def stages_of(self, ctas: int) -> int:
        """Return the stages of the ring that fit if `ctas` CTAs share an SM."""
        room = hw.SMEM_BYTES_PER_SM // ctas - hw.SMEM_RESERVED_BYTES
        return (room - SmemPlan(self.fixed).bytes) // self.piece_bytes

    @property
    def enough_stages(self) -> int:
        """Stages for reading at full speed: those in flight, and one that the tensor core reads."""
        return 1 + -(-IN_FLIGHT_BYTES // self.piece_bytes)

    @property
    def ctas_per_sm(self) -> int:
        """Number of CTAs on an SM: two if possible, with PDL or with more CTAs than SMs.

        With PDL a CTA of the next grid then fetches while one of this grid works.
        """
        depth = self.config.stages or self.enough_stages
        few = self.columns <= BESIDE_COLUMNS
        beside = (self.config.pdl or self.config.beside) and not self.config.alone
        return 2 if beside and few and depth <= self.stages_of(2) else 1

    @property
    def stages(self) -> int:
        return self.config.stages or self.stages_of(self.ctas_per_sm)

    @cached_property
    def smem(self) -> SmemPlan:
        """Shared memory of a CTA, in the order of allocation."""
        return SmemPlan((*self.fixed, SmemBuffer("ring", self.piece_bytes, self.stages)))

    @cached_property
    def tmem(self) -> TmemPlan:
        """Columns of tensor memory: one S, and O^T in parts of at most 128 rows."""
        columns = self.columns
        parts = [
            TmemRange(f"O{part}", (part + 1) * columns, columns, f"rows {part * PIECE}.. of O^T")
            for part in range(self.pieces)
        ]
        return TmemPlan((TmemRange("S", 0, columns, "S of a tile, fp32"), *parts))

    @cached_property
    def edges(self) -> EdgePlan:
        """Edges of a CTA: which role waits for which.

        On ragged tiles the epilogue waits for `kv`, too.
        """
        once, threads = {"freed_by": "exit"}, Signal.THREADS
        ring = {"signal": Signal.TMA, "release": Signal.UMMA}
        edges = (
            Edge("kv", "load_kv", "mma", self.stages, payload="K or V piece",
                 tx_bytes=self.piece_bytes, **ring),
            Edge("q", "load_q", "mma", 1, threads, "rows of Q", **once),
            Edge("s", "mma", "epilogue", 1, Signal.UMMA, "S tile", freed_by="taken"),
            Edge("taken", "epilogue", "mma", 1, threads, "S in registers", freed_by="s"),
            Edge("p", "epilogue", "mma", 1, threads, "P, and O to accumulate into", freed_by="o"),
            Edge("o", "mma", "epilogue", 1, Signal.UMMA, "O with V^T P added", freed_by="p"),
        )  # fmt: skip
        return EdgePlan(ROLES, edges)

    @cached_property
    def first_edges(self) -> EdgePlan:
        """Edges that are initialised first, since fetching begins with them."""
        return EdgePlan(ROLES, self.edges.edges[:1])

    @cached_property
    def other_edges(self) -> EdgePlan:
        """Remaining edges, whose barriers follow in memory."""
        return EdgePlan(ROLES, self.edges.edges[1:])

    def check(self) -> None:
        """Raise for a plan that cannot run, naming value and limit."""
        config = self.config
        if self.box_rows * self.line_bytes < MIN_BOX_BYTES:
            raise NotImplementedError(
                f"page_size {config.page_size} on sm_100a with {self.line_bytes} bytes of "
                f"{config.keys_dtype} a key: a multiple of {MIN_BOX_BYTES // self.line_bytes}, "
                f"since TMA copies at least {MIN_BOX_BYTES} bytes"
            )
        if self.stages < self.min_stages:
            raise ValueError(
                f"{self.stages} stages of {self.piece_bytes} bytes: at least {self.min_stages}, in "
                f"{hw.SMEM_BYTES_PER_CTA} bytes next to {SmemPlan(self.fixed).bytes} of Q, P and "
                f"the mailbox of {config.cluster} CTAs with {config.owner_ctas} owners; more "
                "owners need a smaller mailbox"
            )
        if self.edges.barrier_bytes > BARRIER_BYTES:
            raise ValueError(
                f"{self.edges.barrier_bytes} bytes of mbarriers, limit {BARRIER_BYTES}"
            )
        ROLES.check()
        BARRIERS.check()
        self.edges.check()
        self.smem.check()
        self.tmem.check()
        self.check_neighbours()

    def check_neighbours(self) -> None:
        """Raise ValueError if an SM has shared memory for more CTAs than it has tensor memory for.

        CTAs of a cluster on one SM wait for each other while they hold their columns of tensor
        memory.
        """
        ctas = hw.SMEM_BYTES_PER_SM // (self.smem.bytes + hw.SMEM_RESERVED_BYTES)
        if ctas * self.tmem.allocated > hw.TMEM_COLUMNS:
            raise ValueError(
                f"{ctas} CTAs of {self.smem.bytes} bytes fit on an SM, and each allocates "
                f"{self.tmem.allocated} TMEM columns of {hw.TMEM_COLUMNS}"
            )


def make_plan(config: DecodeConfig) -> Plan100:
    """The plan of `config`, checked."""
    config.check_values()
    plan = Plan100(config)
    plan.check()
    return plan
