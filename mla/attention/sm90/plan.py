"""LatentConfig -> roles, barriers and shared memory of the Hopper kernel. Plain data.

A CTA has 64 query rows and tiles of 64 keys. Two warpgroups compute: each has half of the columns
of O in its registers, and they take tiles alternately from S to P. P stays in registers for the own
half, and goes through shared memory for the other's. One more warpgroup loads. Slices are CTAs that
all compute S, and each a part of both halves of O. Tiles are bf16, or fp16 for codes, see
`halves.py`.

A tile lies in one of two buffers as nine panels of 64 columns: eight of V, then the last 64 columns
of K, if there are any. P of the tile overwrites the ninth, which no product needs once S is done.
A buffer is loaded as two pieces, its left and its right four panels. The ninth belongs to the piece
that the other warpgroup multiplies by P, and so releases.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kernelkit.plan import hw
from kernelkit.plan.barriers import BarrierPlan, NamedBarrier
from kernelkit.plan.edges import Edge, EdgePlan, Signal
from kernelkit.plan.smem import SmemBuffer, SmemPlan
from kernelkit.plan.warps import Role, RolePlan
from mla.attention.config import MAX_CLUSTER, LatentConfig
from mla.attention.formats import LATENT
from mla.attention.shared.intake import HALF, PANEL, PANEL_BYTES, PANELS, Intake, Spread
from mla.attention.shared.mail import MailPlan
from mla.attention.tiles import RowTiles, row_tiles

ROWS = 64  # M of wgmma
KEYS = 64  # of a tile
TEAMS = 2
BUFFERS = 2
UNIT_BYTES = 8  # a key's unit and its log2, see `halves.py`
BUFFER_BYTES = (PANELS + 1) * PANEL_BYTES
SLICES = (1, 2, 4)  # a panel of V for each team at least
# Registers of a computing and of a loading thread, by warpgroups that gather and slices. With 200
# and 128 of them for O, ptxas waits after every product. Of slices O needs 64 or 32.
REGISTERS = {
    **{(0, slices): (216, 72) for slices in SLICES},
    **{(1, slices): (208, 88) for slices in SLICES},
    (2, 1): (208, 48),
    (2, 2): (144, 112),
    (2, 4): (128, 128),
}


@dataclass(frozen=True)
class Plan90:
    """Plan of one config."""

    config: LatentConfig

    keys = KEYS  # of a tile
    most_rows = ROWS  # of a row tile

    @cached_property
    def tiles(self) -> RowTiles:
        return row_tiles(self.config, ROWS)

    @property
    def sharers(self) -> int:
        """Neighbouring row tiles that share tiles of keys."""
        return self.config.sharers

    @cached_property
    def columns(self) -> int:
        return self.config.columns

    @cached_property
    def panels(self) -> int:
        """Panels of K."""
        return self.columns // PANEL

    @cached_property
    def by_tma(self) -> bool:
        """Whether TMA brings tiles of keys as they are; else threads fetch and convert them."""
        keys = self.config.keys
        fits = keys.rows % 8 == 0 and (KEYS % keys.rows == 0 or keys.rows % KEYS == 0)
        plain = keys.form.plain and not keys.form.code
        return plain and fits and not keys.listed and self.config.extra is None

    @cached_property
    def copies(self) -> bool:
        """Whether threads fetch keys, since TMA cannot bring them."""
        return not self.by_tma

    @cached_property
    def crosses(self) -> bool:
        """Whether each of two CTAs gathers half of a tile, and gives it to the other one."""
        return self.config.ways.crosses

    @property
    def halves(self) -> bool:
        """Whether V and the same columns of K are fp16; else bf16."""
        return self.config.ways.halves

    @cached_property
    def half_panels(self) -> int:
        """Panels of Q and K in fp16."""
        return (self.config.keys.form.coded if self.halves else 0) // PANEL

    @cached_property
    def mixes(self) -> bool:
        """Whether the last panel of Q and K is bf16, and the others are fp16."""
        return self.halves and self.half_panels < self.panels

    @cached_property
    def has_units(self) -> bool:
        """Whether each key is divided by a power of two of its own."""
        return any(intake.has_unit for intake in self.intakes)

    @cached_property
    def gathered_keys(self) -> int:
        """Keys of a tile that a CTA gathers."""
        return KEYS // self.config.sharers if self.crosses else KEYS

    @cached_property
    def groups(self) -> int:
        """Warpgroups that gather. Two fill a half of a tile each: to convert codes takes long."""
        if self.by_tma:
            return 0
        return 2 if any(keys.form.code for keys in self.config.sources) else 1

    def intake(self, which: int) -> Intake:
        """Return how the entries of a source come."""
        keys = self.config.sources[which]
        spread = Spread(4 if keys.form.code else 8, self.gathered_keys // hw.WARPGROUP_WARPS)
        whole = self.config.slices > 1  # then there are registers for it
        return Intake(which, keys, spread, self.crosses, whole, halves=self.halves)

    @cached_property
    def intakes(self) -> tuple[Intake, ...]:
        return tuple(self.intake(which) for which in range(len(self.config.sources)))

    @cached_property
    def unordered(self) -> bool:
        """Whether keys arrive by other than the async proxy, so that consumers order the two."""
        if self.by_tma:
            return False
        return any(not i.converts or (i.stores_rest and i.rest) for i in self.intakes)

    @cached_property
    def meets_for_p(self) -> bool:
        """Whether the warps of a team meet before P of their tile goes to the ninth panel: it has
        columns of K, or some warps clear keys for all.
        """
        return self.panels > PANELS or self.by_tma

    @property
    def refills(self) -> bool:
        """Whether somebody waits for the release of the last pieces of a unit: clusters stay, or a
        peer releases them, too.
        """
        return self.config.ways.resident > 0 or self.config.sharers > 1

    @cached_property
    def box_rows(self) -> int:
        """Keys of a TMA box."""
        return min(self.config.keys.rows, KEYS)

    def piece_panels(self, buffer: int, right: bool) -> tuple[int, ...]:
        """Return the panels of a piece, in the order of their products."""
        first = HALF if right else 0
        own = tuple(range(first, first + HALF))
        with_last = self.panels > PANELS and (buffer == 0) == right
        return (*own, PANELS) if with_last else own

    @cached_property
    def mail(self) -> MailPlan:
        """Sizes of the exchange of O."""
        return MailPlan(
            rows=self.tiles.rows,
            cluster=self.config.cluster,
            stride=self.config.sharers,
            columns=LATENT // self.config.slices,
            space=BUFFER_BYTES * BUFFERS,
            most_rows=ROWS,
            threads=self.roles["math"].threads,
            barrier="math",
            sums=TEAMS,
        )

    @cached_property
    def ctas(self) -> int:
        """CTAs of a cluster. Those of a row tile have ranks `sharers` apart."""
        return self.config.cluster * self.config.sharers

    @cached_property
    def reduces(self) -> bool:
        """Whether several CTAs share the keys of a row tile."""
        return self.config.cluster > 1 or self.config.parts

    @cached_property
    def team_columns(self) -> int:
        """Columns of O of a team."""
        return HALF * PANEL // self.config.slices

    @cached_property
    def value_columns(self) -> int:
        """Columns of one product P V. For 512 threads ptxas has 128 registers, and refuses the
        instruction that sums 256 columns in them, whatever setmaxnreg says.
        """
        most = HALF * PANEL // (2 if self.groups == 2 else 1)
        return min(most, self.team_columns)

    @cached_property
    def roles(self) -> RolePlan:
        duty = "S = Q K^T, softmax, O += P V"
        computes, loads = REGISTERS[self.groups, self.config.slices]
        math = Role("math", 0, 8, duty, computes, TEAMS)
        others: tuple[Role, ...] = (
            Role("gather", 8, 4, "fetch and convert tiles of K and V", loads),
        )
        if self.groups == 2:
            others = (
                Role("gather", 8, 4, "fetch and convert left halves of tiles", loads),
                Role("gather_right", 12, 4, "fetch and convert right halves of tiles", loads),
            )
        if self.by_tma:
            others = (
                Role("load_left", 8, 1, "load left halves of tiles", loads),
                Role("load_right", 9, 1, "load right halves of tiles", loads),
                Role("load_q", 10, 1, "load Q", loads),
                Role("idle", 11, 1, "give registers to the warps that compute", loads),
            )
        return RolePlan((math, *others))

    @cached_property
    def edges(self) -> EdgePlan:
        # Copies of a thread arrive for it. Where none do, one arrival of a warp wakes fewer waits.
        threads = Signal.WARPS if all(i.converts for i in self.intakes) else Signal.THREADS
        signal = Signal.TMA if self.by_tma else threads
        ring: dict[str, Any] = {"release": Signal.WARPS, "multicast": self.config.sharers > 1}
        ring["tx_bytes"] = HALF * PANEL_BYTES if self.by_tma else 0
        left, right = ("load_left", "load_right") if self.by_tma else ("gather", "gather")
        if self.roles.warps > 12:
            right = "gather_right"
        return EdgePlan(
            self.roles,
            (
                Edge("left", left, "math", BUFFERS, signal, "left half of a tile", **ring),
                Edge("right", right, "math", BUFFERS, signal, "right half of a tile", **ring),
                Edge("p", "math", "math", TEAMS, Signal.WARPS, "P of a tile", freed_by="exit"),
            ),
        )

    @cached_property
    def barriers(self) -> BarrierPlan:
        math = self.roles["math"]
        return BarrierPlan(
            self.roles,
            (
                NamedBarrier("team", ("math",), math.team_threads, "S is read", TEAMS),
                NamedBarrier("math", ("math",), math.threads, "both teams are there"),
            ),
        )

    @cached_property
    def smem(self) -> SmemPlan:
        return SmemPlan(
            (
                SmemBuffer("barriers", self.edges.barrier_bytes, align=hw.MBARRIER_BYTES),
                SmemBuffer("q_full", 8, align=16),
                SmemBuffer("mail_full", 16, align=16),
                SmemBuffer("rows", 4 * ROWS * TEAMS * 3, align=16),
                SmemBuffer("valid", 8 * BUFFERS, align=16),
                SmemBuffer("factors", 4 * ROWS if self.halves else 0, align=16),
                SmemBuffer("units", UNIT_BYTES * KEYS * BUFFERS if self.has_units else 0, align=16),
                SmemBuffer("sQ", ROWS * self.columns * 2),
                SmemBuffer("sK", BUFFER_BYTES, BUFFERS),
                SmemBuffer("mail", BUFFER_BYTES, BUFFERS, over="sK"),
            )
        )

    def check(self) -> None:
        """Raise ValueError or NotImplementedError for configs that the kernel does not support."""
        cluster, sharers = self.config.cluster, self.config.sharers
        if self.config.slices not in SLICES or (self.config.slices > 1 and sharers > 1):
            raise ValueError(
                f"slices {self.config.slices} with {sharers} sharers: one of {SLICES}, and 1 with "
                "sharers"
            )
        mail = self.mail
        if not 1 <= self.ctas <= MAX_CLUSTER or not mail.fits:
            raise ValueError(
                f"cluster {cluster} of {sharers} row tiles of {mail.rows} rows: at most "
                f"{MAX_CLUSTER} CTAs, and {mail.owned_rows} x {cluster} rows at most "
                f"{mail.capacity}"
            )
        if sharers not in (1, 2) or self.tiles.count % sharers:
            raise ValueError(
                f"sharers {sharers} with {self.tiles.count} row tiles: 1, or 2 if there is an even "
                "number of tiles"
            )
        self._check_ways()
        self.roles.check()
        self.barriers.check()
        self.smem.check()

    def _check_ways(self) -> None:
        config, ways = self.config, self.config.ways
        if self.crosses and not all(keys.form.code for keys in config.sources):
            raise ValueError(f"{ways}: CTAs cross with codes alone")
        if self.crosses and config.parts and config.cluster == 1:
            raise ValueError(f"{ways}: parts of one CTA replace keys that copies may still read")
        if ways.resident and (self.reduces or config.slices > 1):
            raise ValueError(f"{ways}: clusters that stay have cluster 1, no parts and no slices")
        if ways.halves and (self.crosses or config.slices > 1 or not has_codes_of_v(config)):
            raise ValueError(f"{ways}: fp16 is for codes of all columns of V, with slices 1")
        if self.copies and self.crosses != (config.sharers == 2):
            raise ValueError(
                f"{ways} with {config.sharers} sharers: CTAs share gathered keys if they cross, "
                "and only then"
            )


def has_codes_of_v(config: LatentConfig) -> bool:
    """Whether each source of keys has codes for all columns of V."""
    forms = [keys.form for keys in config.sources]
    return all(form.code and form.coded >= LATENT for form in forms)


def make_plan(config: LatentConfig) -> Plan90:
    """Return the checked plan of a config, by which reports name roles and barriers."""
    plan = Plan90(config)
    plan.check()
    return plan
