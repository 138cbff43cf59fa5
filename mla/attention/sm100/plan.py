"""LatentConfig -> roles, barriers and memory of the Blackwell kernel. Plain data.

A pair of CTAs has two row tiles of 64 query rows and tiles of 128 keys, and multiplies them with
one instruction (M = 128, cta_group::2). Each CTA has its rows of Q, S, P and O. Of the keys it has
64 for Q K^T, and half of the columns of all 128 for P V. Both come as panels of 64 columns of 64
keys: eight for Q K^T, and a ninth with RoPE columns, in two or three groups; and two pieces of V
with four panels each.

In tensor memory a row of S or O lies in two lanes r and 64 + r (PTX ISA, data path layout B): the
first has the first half of the columns, the second the other half.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from mla.attention.shared.intake import HALF, PANEL, PANEL_BYTES, Intake, Spread
from mla.attention.shared.mail import MailPlan
from mla.attention.tiles import RowTiles, row_tiles

PAIR = 2
ROWS = 64  # of a CTA
KEYS = 128  # of a tile
OWN_KEYS = KEYS // PAIR  # for Q K^T
PV_COLUMNS = 256  # N of P V
PRODUCTS = LATENT // PV_COLUMNS
LANE_COLUMNS = PV_COLUMNS // PAIR  # of a product in a lane, and in a CTA's V
COLUMNS = PRODUCTS * LANE_COLUMNS  # of O in a lane, and of a CTA's V
PIECES = PAIR  # of V: the keys that each CTA has for Q K^T
PIECE_BYTES = HALF * PANEL_BYTES
P_BYTES = ROWS * KEYS * 2
S_STAGES = 2
TURNS = 3  # slots in which the halves of a row exchange a number


@dataclass(frozen=True)
class Plan100:
    """Plan of one config."""

    config: LatentConfig

    keys = KEYS  # of a tile
    most_rows = ROWS  # of a row tile
    sharers = PAIR  # neighbouring row tiles that share tiles of keys

    @cached_property
    def tiles(self) -> RowTiles:
        """Row tiles of CTAs; two neighbours are a pair."""
        return row_tiles(self.config, ROWS, PAIR)

    @cached_property
    def columns(self) -> int:
        return self.config.columns

    @cached_property
    def panels(self) -> int:
        """Panels of Q and K."""
        return self.columns // PANEL

    @cached_property
    def groups(self) -> tuple[range, ...]:
        """Panels of K by barriers: the halves, and the panel behind them."""
        firsts = range(0, self.panels, HALF)
        return tuple(range(first, min(first + HALF, self.panels)) for first in firsts)

    @cached_property
    def by_tma(self) -> bool:
        """Whether TMA brings tiles of keys as they are; else threads fetch and convert them."""
        keys = self.config.keys
        fits = keys.rows % 8 == 0 and (KEYS % keys.rows == 0 or keys.rows % KEYS == 0)
        plain = keys.form.plain and not keys.form.code
        return plain and fits and not keys.listed and self.config.extra is None

    @cached_property
    def gathers(self) -> bool:
        """Whether TMA fetches entries by their numbers: slots of all sources have one row."""
        sources = self.config.sources
        plain = all(each.form.plain and not each.form.code for each in sources)
        return plain and all(each.listed and each.rows == 1 for each in sources)

    @cached_property
    def copies(self) -> bool:
        """Whether threads copy or convert keys, since TMA can neither bring nor fetch them."""
        return not self.by_tma and not self.gathers

    @cached_property
    def coded(self) -> bool:
        """Whether threads convert keys; else they copy them, if TMA does not bring them."""
        return any(keys.form.code for keys in self.config.sources)

    @cached_property
    def intakes(self) -> tuple[Intake, ...]:
        """How threads find and bring the entries of a source: 16 to a warp, in halves."""
        return tuple(
            Intake(which, keys, Spread(4 if keys.form.code else 8, 16), whole=True)
            for which, keys in enumerate(self.config.sources)
        )

    @cached_property
    def box_rows(self) -> int:
        """Keys of a TMA box."""
        return min(self.config.keys.rows, OWN_KEYS)

    @cached_property
    def mail(self) -> MailPlan:
        """Sizes of the exchange of O."""
        return MailPlan(
            rows=self.tiles.rows,
            cluster=self.config.cluster,
            stride=PAIR,
            columns=LATENT,
            space=self.mail_bytes,
            most_rows=ROWS,
            threads=self.roles["softmax"].threads,
            barrier="rows",
        )

    @cached_property
    def mail_bytes(self) -> int:
        """Bytes of P, K and V of a tile, which nobody needs any more when O is exchanged."""
        return P_BYTES + self.panels * PANEL_BYTES + PIECES * PIECE_BYTES

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
        brought = "if TMA can bring them" if self.copies else "by TMA"
        roles = [
            Role("softmax", 0, 4, "S -> P, rescale and store O: half a row per thread"),
            Role("mma", 4, 1, "S = Q K^T and O += P V on the tensor core"),
            Role("load_k", 5, 1, f"load Q by TMA, and keys {brought}"),
            Role("load_v", 6, 1, f"load values {brought}"),
            Role("idle", 7, 1, "complete the warpgroup"),
        ]
        if self.copies:
            verb = "convert" if self.coded else "copy"
            roles += [
                Role("copy_k", 8, 4, f"{verb} entries for Q K^T"),
                Role("copy_v", 12, 4, f"{verb} entries for P V, and mark them"),
            ]
        if self.gathers:
            roles += [
                Role("gather_k", 8, 4, "start TMA copies of entries for Q K^T"),
                Role("gather_v", 12, 4, "start TMA copies of entries for P V, and mark them"),
            ]
        if not self.by_tma:
            registers = (184, *[72] * 4, 128, 128)
            roles = [replace(role, registers=n) for role, n in zip(roles, registers, strict=True)]
        return RolePlan(tuple(roles))

    @cached_property
    def edges(self) -> EdgePlan:
        ring: dict[str, Any] = {"signal": Signal.TMA, "release": Signal.UMMA}
        half = {"tx_bytes": PIECE_BYTES, **ring}  # the last group of K has fewer
        k, v, marks = "load_k", "load_v", "gather_v" if self.gathers else "load_v"
        if self.copies:
            k, v, marks = "copy_k", "copy_v", "copy_v"
            half = {"signal": Signal.WARPS, "release": Signal.UMMA}
        q_bytes = self.panels * self.tiles.rows * PANEL * 2
        told: dict[str, Any] = {"signal": Signal.WARPS, "release": Signal.WARPS}
        edges = [
            Edge("k", k, "mma", len(self.groups), payload="panels of K", **half),
            Edge("v", v, "mma", PIECES, payload="piece of V", **half),
            Edge("q", "load_k", "mma", 1, Signal.TMA, "Q", q_bytes, freed_by="exit"),
            Edge("s", "mma", "softmax", S_STAGES, Signal.UMMA, "S", release=Signal.THREADS),
            Edge("p", "softmax", "mma", 1, Signal.THREADS, "P", freed_by="o"),
            Edge("o", "mma", "softmax", 1, Signal.UMMA, "O with P V added", freed_by="p"),
            Edge("marks", marks, "softmax", S_STAGES, payload="which keys of a tile exist", **told),
        ]
        if self.by_tma:
            edges += [
                Edge(
                    "landed", "load_v", "load_v", 1, Signal.TMA, "last tile of V",
                    PIECES * PIECE_BYTES, freed_by="exit",
                ),
                Edge(
                    "cleared", "load_v", "mma", 1, Signal.THREADS, "last tile of V, without rows "
                    "past the last key", freed_by="exit",
                ),
            ]  # fmt: skip
        return EdgePlan(self.roles, tuple(edges), PAIR, self.config.cluster)

    @cached_property
    def barriers(self) -> BarrierPlan:
        softmax, both = self.roles["softmax"], ("copy_k", "copy_v")
        first = NamedBarrier("first", both, 8 * hw.WARP_THREADS, "first keys are requested")
        return BarrierPlan(
            self.roles,
            (
                *((first,) if self.coded else ()),
                NamedBarrier("rows", ("softmax",), softmax.threads, "all rows are done"),
                NamedBarrier(
                    "halves", ("softmax",), 2 * hw.WARP_THREADS,
                    "both halves of 32 rows stored a number", count=ROWS // hw.WARP_THREADS,
                ),
            ),
        )  # fmt: skip

    @cached_property
    def smem(self) -> SmemPlan:
        return SmemPlan(
            (
                SmemBuffer("barriers", self.edges.barrier_bytes, align=hw.MBARRIER_BYTES),
                SmemBuffer("mail_full", 16, align=16),
                SmemBuffer("tmem_base", 4, align=4),
                SmemBuffer("marks", KEYS // 8, S_STAGES, align=16),
                SmemBuffer("halves", 4 * PAIR * ROWS, TURNS, align=16),
                SmemBuffer("sQ", PANEL_BYTES, self.panels),
                SmemBuffer("sP", P_BYTES),
                SmemBuffer("sK", PANEL_BYTES, self.panels),
                SmemBuffer("sV", PIECE_BYTES, PIECES),
                SmemBuffer("mail", self.mail_bytes, over="sP"),
            )
        )

    @cached_property
    def tmem(self) -> TmemPlan:
        """Columns of tensor memory."""
        return TmemPlan(
            (
                TmemRange("O", 0, COLUMNS, "O, fp32"),
                TmemRange("S0", COLUMNS, OWN_KEYS, "S, fp32"),
                TmemRange("S1", COLUMNS + OWN_KEYS, OWN_KEYS, "S, fp32"),
            )
        )

    def check(self) -> None:
        """Raise ValueError or NotImplementedError for configs that the kernel does not support."""
        config, mail = self.config, self.mail
        if not 1 <= self.ctas <= MAX_CLUSTER or not mail.fits:
            raise ValueError(
                f"cluster {config.cluster} of pairs with tiles of {mail.rows} rows: at most "
                f"{MAX_CLUSTER // PAIR} pairs, and {mail.owned_rows} x {config.cluster} rows at "
                f"most {mail.capacity}"
            )
        if config.sharers != 1:
            raise ValueError(f"sharers {config.sharers}: 1, a pair shares its keys anyway")
        self.roles.check()
        self.edges.check()
        self.barriers.check()
        self.smem.check()
        self.tmem.check()


def make_plan(config: LatentConfig) -> Plan100:
    """Return the checked plan of a config, by which reports name roles and barriers."""
    plan = Plan100(config)
    plan.check()
    return plan
