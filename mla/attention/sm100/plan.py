"""LatentConfig -> roles, barriers and memory of the Blackwell kernel. Plain data.

A pair of CTAs has 128 query rows and tiles of 128 keys. Each CTA multiplies all rows by its own 64
keys, so each score is computed once, and adds up its own 256 columns of O over all 128 keys. So the
CTAs exchange maxima and weights, and each needs

- its own keys, own columns: four panels of 64 columns, operands of both products;
- its own keys, other columns: five panels, or four without RoPE columns, for Q K^T alone;
- the peer's keys, own columns: four panels, for P V alone.

With 17 panels of 64 keys the operands of Q K^T of a tile and of P V of the tile before fit in
shared memory at the same time. Six panels of Q are in tensor memory for that, the others in shared
memory. On their way they take the place of P, of the peer's keys, and of the second tile's own
columns, which are all needed later.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kernelkit.plan import hw
from kernelkit.plan.barriers import BarrierPlan, NamedBarrier
from kernelkit.plan.edges import Edge, EdgePlan, Signal
from kernelkit.plan.smem import SmemBuffer, SmemPlan
from kernelkit.plan.tmem import TmemPlan, TmemRange
from kernelkit.plan.warps import Role, RolePlan
from mla.attention.config import MAX_CLUSTER, LatentConfig
from mla.attention.formats import LATENT
from mla.attention.shared.mail import MailPlan
from mla.attention.tiles import RowTiles, row_tiles

PAIR = 2
ROWS = 128  # M of the products
KEYS = 128  # of a tile
OWN_KEYS = KEYS // PAIR
COLUMNS = LATENT // PAIR  # of O in a CTA
PANEL = 64  # columns of a panel: 128 bytes
HALF = COLUMNS // PANEL  # panels of V in a CTA
PANEL_BYTES = OWN_KEYS * PANEL * 2
STAGE_BYTES = HALF * PANEL_BYTES  # own columns of 64 keys
GROUP = 2  # panels that a barrier announces: the tensor core takes as long as a wait and its issue
GROUP_BYTES = GROUP * PANEL_BYTES
OWN_TILES, OWN_GROUPS = 2, HALF // GROUP
OWN_STAGES, KEY_STAGES = OWN_TILES * OWN_GROUPS, 3
PIECES = 2  # of the peer's keys of a tile, which become free one after the other
PIECE_KEYS = OWN_KEYS // PIECES
PIECE_BYTES = STAGE_BYTES // PIECES
Q_PANEL_BYTES = ROWS * PANEL * 2
Q_TMEM_PANELS = 6
Q_TMEM_COLUMNS = PANEL // 2  # of tensor memory, a panel
P_BYTES = ROWS * OWN_KEYS * 2  # weights of 64 keys
KEY_BYTES = (OWN_TILES + 1) * STAGE_BYTES + KEY_STAGES * GROUP_BYTES


@dataclass(frozen=True)
class Plan100:
    """Plan of one config."""

    config: LatentConfig

    keys = KEYS  # of a tile

    @cached_property
    def tiles(self) -> RowTiles:
        return row_tiles(self.config, ROWS)

    @cached_property
    def columns(self) -> int:
        return self.config.columns

    @cached_property
    def panels(self) -> int:
        """Panels of K."""
        return self.columns // PANEL

    @cached_property
    def key_panels(self) -> int:
        """Panels of K outside the CTA's own columns: the peer's, then that of RoPE."""
        return self.panels - HALF

    @cached_property
    def key_groups(self) -> tuple[range, ...]:
        """Panels outside the own columns, by barriers."""
        return tuple(
            range(first, min(first + GROUP, self.key_panels))
            for first in range(0, self.key_panels, GROUP)
        )

    @cached_property
    def q_smem_panels(self) -> int:
        """Panels of Q in shared memory: the last ones of those outside the own columns."""
        return self.panels - Q_TMEM_PANELS

    @cached_property
    def by_tma(self) -> bool:
        """Whether TMA brings tiles of keys as they are; else threads fetch and convert them."""
        keys = self.config.keys
        fits = keys.rows % 8 == 0 and (OWN_KEYS % keys.rows == 0 or keys.rows % OWN_KEYS == 0)
        plain = keys.form.plain and not keys.form.code
        return plain and fits and not keys.listed and self.config.extra is None

    @cached_property
    def box_rows(self) -> int:
        """Keys of a TMA box of own keys."""
        return min(self.config.keys.rows, OWN_KEYS)

    @cached_property
    def piece_box_rows(self) -> int:
        """Keys of a TMA box of the peer's keys."""
        return min(self.config.keys.rows, PIECE_KEYS)

    @cached_property
    def mail(self) -> MailPlan:
        """Sizes of the exchange of O."""
        return MailPlan(
            rows=self.tiles.rows,
            cluster=self.config.cluster,
            stride=PAIR,
            columns=COLUMNS,
            space=KEY_BYTES,
            most_rows=ROWS,
            threads=self.roles["softmax"].threads,
            barrier="rows",
        )

    @cached_property
    def ctas(self) -> int:
        """CTAs of a cluster. Those of a pair are neighbours."""
        return self.config.cluster * PAIR

    @cached_property
    def reduces(self) -> bool:
        """Whether several pairs share the keys of a row tile."""
        return self.config.cluster > 1 or self.config.parts

    @cached_property
    def roles(self) -> RolePlan:
        brought = "by TMA" if self.by_tma else "if TMA can bring them"
        roles = [
            Role("softmax", 0, 4, "S -> P, rescale and store O"),
            Role("mma", 4, 1, "Q to tensor memory, S = Q K^T and O += P V on the tensor core"),
            Role("load_k", 5, 1, f"load Q by TMA, and own keys {brought}"),
            Role("load_v", 6, 1, f"load the peer's keys {brought}"),
            Role("idle", 7, 1, "complete the warpgroup"),
        ]
        if not self.by_tma:
            roles.append(Role("gather", 8, 4, "copy tiles of keys"))
        return RolePlan(tuple(roles))

    @cached_property
    def edges(self) -> EdgePlan:
        ring: dict[str, Any] = {"signal": Signal.TMA, "release": Signal.UMMA}
        group, piece = ({"tx_bytes": size, **ring} for size in (GROUP_BYTES, PIECE_BYTES))
        own, peer = "load_k", "load_v"
        if not self.by_tma:
            own = peer = "gather"
            group = piece = {"signal": Signal.THREADS, "release": Signal.UMMA}
        q_bytes = self.panels * self.tiles.rows * PANEL * 2
        return EdgePlan(
            self.roles,
            (
                Edge("key", own, "mma", KEY_STAGES, payload="panels of K", **group),
                Edge("own", own, "mma", OWN_STAGES, payload="panels of own columns", **group),
                Edge("peer", peer, "mma", PIECES, payload="the peer's keys", **piece),
                Edge("q", "load_k", "mma", 1, Signal.TMA, "panels of Q", q_bytes,
                     freed_by="exit"),
                Edge("lent", "mma", "load_k", 1, Signal.UMMA, "buffers that Q has left",
                     freed_by="exit"),
                Edge("s", "mma", "softmax", 1, Signal.UMMA, "S", release=Signal.THREADS),
                Edge("p", "softmax", "mma", 1, Signal.THREADS, "P of own keys", freed_by="o"),
                Edge("o", "mma", "softmax", 1, Signal.UMMA, "O with P V added", freed_by="p"),
            ),
        )  # fmt: skip

    @cached_property
    def barriers(self) -> BarrierPlan:
        softmax = self.roles["softmax"]
        return BarrierPlan(
            self.roles, (NamedBarrier("rows", ("softmax",), softmax.threads, "all rows are done"),)
        )

    @cached_property
    def smem(self) -> SmemPlan:
        return SmemPlan(
            (
                SmemBuffer("barriers", self.edges.barrier_bytes, align=hw.MBARRIER_BYTES),
                SmemBuffer("exchanged", 8 * 4, align=8),  # p_full, p_free, maxima_full[2]
                SmemBuffer("mail_full", 16, align=16),
                SmemBuffer("tmem_base", 4, align=4),
                SmemBuffer("valid", 8 * OWN_TILES, align=16),
                SmemBuffer("maxima", 4 * ROWS * 2, align=16),
                SmemBuffer("sQ", Q_PANEL_BYTES, self.q_smem_panels),
                SmemBuffer("sP", P_BYTES, PAIR),
                SmemBuffer("sOwn", GROUP_BYTES, OWN_STAGES),
                SmemBuffer("sPeer", PIECE_BYTES, PIECES),
                SmemBuffer("sKey", GROUP_BYTES, KEY_STAGES),
                SmemBuffer("mail", KEY_BYTES, over="sOwn"),
            )
        )

    @cached_property
    def tmem(self) -> TmemPlan:
        """Columns of tensor memory."""
        q_begin = COLUMNS + OWN_KEYS
        return TmemPlan(
            (
                TmemRange("O", 0, COLUMNS, "O, fp32"),
                TmemRange("S", COLUMNS, OWN_KEYS, "S of own keys, fp32"),
                TmemRange("Q", q_begin, Q_TMEM_PANELS * Q_TMEM_COLUMNS, "panels of Q, bf16"),
            )
        )

    def check(self) -> None:
        """Raise ValueError or NotImplementedError for configs that the kernel does not support."""
        config = self.config
        for keys in config.sources:
            if keys.form.code:
                raise NotImplementedError(f"record {keys.record}")
        mail = self.mail
        if not 1 <= self.ctas <= MAX_CLUSTER or not mail.fits:
            raise ValueError(
                f"cluster {config.cluster} of pairs with {mail.rows} rows: at most "
                f"{MAX_CLUSTER // PAIR} pairs, and {mail.owned_rows} x {config.cluster} rows at "
                f"most {mail.capacity}"
            )
        if config.sharers != 1:
            raise ValueError(f"sharers {config.sharers}: 1, a pair has up to {ROWS} rows")
        self.roles.check()
        self.barriers.check()
        self.smem.check()
        self.tmem.check()


def make_plan(config: LatentConfig) -> Plan100:
    """Return the checked plan of a config, by which reports name roles and barriers."""
    plan = Plan100(config)
    plan.check()
    return plan
