"""Choose the config of a problem: CTAs that share the keys of a query entry, and the kernel.

Pure functions of sizes. A unit is one tile of rows of one query entry. CTAs that share a unit's
keys are a cluster, or several that merge through a workspace (parts). A rank of a cluster has a
share of the keys; on Blackwell it is a pair of CTAs. The mma.sync kernel has no clusters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from kernelkit.call.launch import Target, clusters_at_once, sms_of
from kernelkit.compile.arch import PORTABLE, written_for
from kernelkit.plan import hw
from mla.attention.arguments import MAX_PARTS, Arguments
from mla.attention.config import MAX_CLUSTER, LatentConfig, Ways
from mla.attention.formats import LATENT
from mla.attention.portable.plan import KEYS, PortablePlan
from mla.attention.shared.mail import PARTS_AHEAD
from mla.attention.sm90.plan import SLICES, Plan90, has_codes_of_v
from mla.attention.sm100.plan import PAIR, Plan100

KEPT = 1024  # cached decisions
WARP, WGMMA = "mla.attention.portable.kernel", "mla.attention.sm90.kernel"
UMMA = "mla.attention.sm100.kernel"
# architecture that a kernel is written for -> names for users -> module, the default first
KERNELS = {
    "sm_90a": {"wgmma": WGMMA, "warp": WARP},
    "sm_100a": {"umma": UMMA, "warp": WARP},
    PORTABLE: {"warp": WARP},
}
ARCHS = tuple(KERNELS)
# The last part reads the sums of all parts: about 650 ns for each, as long as ten keys take.
KEYS_OF_MERGE = 10
# With `batch_invariant` the split depends on the keys alone.
MIN_KEYS_OF_FIXED_PART, MAX_FIXED_PARTS = 512, 16


@dataclass(frozen=True)
class Costs:
    """Estimated microseconds of the parts of a launch with clusters.

    fixed, rank: a CTA without its tiles, and each CTA of its cluster.
    tile, gathered: a tile that TMA brings or fetches, or that threads copy.
    sent, owned: a row that a rank of a cluster sends, and one that it finishes.
    merge, turn: a merge of parts, and a turn of its threads: a store, or a wait for loads.
    """

    fixed: float
    rank: float
    tile: float
    gathered: float
    sent: float
    owned: float
    merge: float
    turn: float


COSTS = {
    WGMMA: Costs(3.3, 0.14, 1.4, 2.4, 0.06, 0.13, 0.9, 0.7),  # of an H200, notes/mla.md
    UMMA: Costs(4.0, 0.0, 1.5, 4.0, 0.02, 0.05, 2.0, 0.35),  # of a B200, modelled
}
TILES_OF_HALVES = 4  # of a CTA: Q in fp16 takes as long as two tiles gain
FEW_TILES = 20  # of a unit: clusters that stay gain 5 % of 10 tiles, and nothing of 32


@dataclass(frozen=True)
class Tile:
    """Tile of one kernel.

    rows, keys: of a tile.
    count: row tiles of an entry, or pairs of them.
    costs: of a kernel whose CTAs form clusters; None without clusters.
    gathered: whether threads copy keys, since TMA cannot bring them.
    pair: CTAs of a rank of a cluster, each with a row tile.
    capacity: rows of O that a CTA can receive from a cluster.
    finished: rows of O that the threads of a CTA finish at a time.
    slices: numbers of slices of the columns of V that clusters can divide.
    """

    rows: int
    keys: int
    count: int
    costs: Costs | None = None
    gathered: bool = False
    pair: int = 1
    capacity: int = 0
    finished: int = 1
    slices: tuple[int, ...] = (1,)


@dataclass(frozen=True, order=True)
class Split:
    """Division of a unit's work: ranks of a cluster, clusters that share its keys, and slices of
    the columns of V.
    """

    cluster: int = 1
    parts: int = 1
    slices: int = 1

    @property
    def whole(self) -> bool:
        """Whether one rank has a unit alone."""
        return self.cluster * self.parts * self.slices == 1


@dataclass(frozen=True)
class Load:
    """Sizes that a choice depends on.

    entries: query entries.
    keys: most keys of an entry.
    sms: SMs to fill.
    many: whether there are so many entries that none is split.
    """

    entries: int
    keys: int
    sms: int
    batch_invariant: bool = False
    many: bool = False
    cluster: int = 0
    parts: int = 0


@dataclass(frozen=True)
class Decision:
    """Config and kernel of a launch.

    kernel: module of the kernel.
    parts: clusters that share a unit.
    row_tiles: tiles of query rows of an entry.
    entries: query entries.
    """

    config: LatentConfig
    kernel: str
    parts: int
    row_tiles: int
    entries: int

    @property
    def grid(self) -> int:
        """Number of CTAs."""
        config = self.config
        every = self.entries * self.row_tiles * config.slices * self.parts * config.cluster
        stay = config.ways.resident * config.sharers
        return min(every, stay) if stay else every

    @property
    def senders(self) -> int:
        """Ranks that share an entry and send each other O in bf16; 0 if O stays in fp32."""
        sharing = self.config.cluster * self.parts
        return sharing if self.kernel != WARP and sharing > 1 else 0

    @property
    def workspace(self) -> tuple[int, int, int]:
        """Shape of the workspace in fp32 (units, parts, words); zeros without parts."""
        if not self.config.parts:
            return 0, 0, 0
        units = self.entries * self.row_tiles * self.config.slices
        if self.kernel == WARP:
            rows = tile_of(self.kernel, self.config).rows
            return units, self.parts, rows * (LATENT + 2)
        mail = plan_of(self.kernel, self.config).mail
        return units * self.config.cluster, self.parts, mail.owned_rows * mail.partial_words

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace, the counters included."""
        units, parts, words = self.workspace
        return units * (parts * words + 1) * 4


Places = Callable[[int], int]  # CTAs of a cluster -> clusters that run at once


def decide(arguments: Arguments, target: Target) -> Decision:
    """Choose the launch of checked arguments."""
    config = plain_config(arguments)
    kernel = kernel_of(arguments.kernel, target.arch)
    load = load_of(arguments, target)
    return _decision(config, kernel, load, target, arguments.q.device)


def load_of(arguments: Arguments, target: Target) -> Load:
    """Return the sizes of a call, and the options that fix its division."""
    return Load(
        entries=entries_of(arguments),
        keys=arguments.longest,
        sms=sms_for(arguments.q.device, target),
        batch_invariant=arguments.batch_invariant,
        many=getattr(arguments, "many", False),
        cluster=arguments.cluster,
        parts=arguments.parts,
    )


@lru_cache(KEPT)
def _decision(
    config: LatentConfig, kernel: str, load: Load, target: Target, device: torch.device
) -> Decision:
    limit = None
    if target.backend == "cuda":
        limit = lambda width: clusters_at_once(device, width)  # noqa: E731
    return decision_for(config, kernel, load, limit)


def decision_for(
    config: LatentConfig, kernel: str, load: Load, limit: Places | None = None
) -> Decision:
    """Choose cluster and parts for a config that has neither.

    limit: returns how many clusters of so many CTAs run at once; None for no limit.
    """
    tile = tile_of(kernel, config)
    found = split(tile, load, limit)
    chosen = replace(config, cluster=found.cluster, parts=found.parts > 1, slices=found.slices)
    if kernel == WGMMA:
        chosen = _with_ways(chosen, tile, load, found)
    return Decision(chosen, kernel, found.parts, tile.count * tile.pair, load.entries)


def _with_ways(config: LatentConfig, tile: Tile, load: Load, found: Split) -> LatentConfig:
    """Return the config with the ways of the Hopper kernel that are fastest, see notes/mla.md."""
    if load.batch_invariant:
        return config
    units, codes = load.entries * tile.count, [bool(s.form.code) for s in config.sources]
    alone = found.whole and units >= load.sms
    pairs = alone and tile.count % 2 == 0 and (all(codes) or not tile.gathered)
    sharers, crosses = 2 if pairs else 1, pairs and tile.gathered
    tiles = -(-load.keys // (tile.keys * found.cluster * found.parts))  # of a CTA
    worthwhile = any(codes) or tiles <= FEW_TILES
    stays = alone and tile.gathered and units > load.sms and worthwhile
    plain = not crosses and found.slices == 1
    halves = plain and tiles >= TILES_OF_HALVES and has_codes_of_v(config)
    ways = Ways(crosses, load.sms // sharers if stays else 0, halves)
    return replace(config, sharers=sharers, ways=ways)


def kernel_of(name: str, arch: str) -> str:
    """Return the module of a kernel by its name for users, 'auto' for the first one.

    Raises: NotImplementedError for a kernel that the architecture does not have.
    """
    known = KERNELS[written_for(arch)]
    if name == "auto":
        return next(iter(known.values()))
    if name not in known:
        raise NotImplementedError(f"kernel {name!r} on {arch}: one of {('auto', *known)}")
    return known[name]


def plan_of(kernel: str, config: LatentConfig) -> Plan90 | Plan100:
    """Return the plan of a kernel whose CTAs form clusters."""
    return Plan90(config) if kernel == WGMMA else Plan100(config)


@lru_cache(KEPT)
def tile_of(kernel: str, config: LatentConfig) -> Tile:
    """Return the tile of a kernel."""
    if kernel == WARP:
        rows = PortablePlan(config).rows
        return Tile(rows, KEYS, -(-config.heads * config.tokens // rows))
    plan, pair = plan_of(kernel, config), PAIR if kernel == UMMA else 1
    return Tile(
        rows=plan.tiles.rows,
        keys=plan.keys,
        count=plan.tiles.count // pair,
        costs=COSTS[kernel],
        gathered=plan.copies,
        pair=pair,
        capacity=plan.mail.capacity,
        finished=plan.mail.threads // plan.mail.vectors,
        slices=SLICES if kernel == WGMMA else (1,),
    )


def split(tile: Tile, load: Load, limit: Places | None = None) -> Split:
    """Return the division of a unit.

    Chosen so that about all SMs have work in one wave, and each CTA has at least one tile.
    """
    if load.many:
        return Split(load.cluster or 1, load.parts or 1)
    if tile.costs is not None:
        return _cheapest(tile, load, limit or (lambda width: load.sms // width))
    units = tile.count * (1 if load.batch_invariant else max(load.entries, 1))
    tiles = max(-(-load.keys // tile.keys), 1)
    return Split(load.cluster or 1, load.parts or _parts(units, tiles, load))  # it has no clusters


def _cheapest(tile: Tile, load: Load, limit: Places) -> Split:
    """Return the split that takes least time by the estimate of `cost_us`."""
    if load.batch_invariant:
        # Slices change no bits, so they may depend on the batch.
        load = replace(load, batch_invariant=False)
        fixed = _cheapest(replace(tile, slices=(1,)), replace(load, entries=1), limit)
        load = replace(load, cluster=fixed.cluster, parts=fixed.parts)
    units, tiles = max(load.entries, 1) * tile.count, max(-(-load.keys // tile.keys), 1)
    best = (math.inf, Split(load.cluster or 1, load.parts or 1))
    widest = min(tiles, MAX_CLUSTER // tile.pair)
    for width in [load.cluster] if load.cluster else range(1, widest + 1):
        at_once = limit(width * tile.pair)
        if not load.cluster and not _possible(tile, width, units * (load.parts or 1), at_once):
            continue
        best = min(best, _cheapest_of(tile, load, width, at_once))
    return best[1]


@lru_cache(KEPT)
def _cheapest_of(tile: Tile, load: Load, cluster: int, at_once: int) -> tuple[float, Split]:
    """Return (microseconds, split) of the cheapest split with clusters of one size."""
    units, tiles = max(load.entries, 1) * tile.count, max(-(-load.keys // tile.keys), 1)
    tried = []
    for slices in tile.slices:
        most = max(min(at_once // (units * slices), tiles // cluster, MAX_PARTS), 1)
        every = [load.parts] if load.parts else _parts_to_try(tiles, cluster, most)
        tried += [Split(cluster, parts, slices) for parts in every]
    return min((cost_us(tile, load, each, at_once), each) for each in tried)


def _parts_to_try(tiles: int, cluster: int, most: int) -> Iterator[int]:
    """Yield the fewest parts for each number of tiles that a CTA can have: more take longer."""
    parts = 1
    while parts <= most:
        yield parts
        each = -(-tiles // (cluster * parts))
        if each == 1:
            return
        parts = -(-tiles // (cluster * (each - 1)))


def _possible(tile: Tile, cluster: int, clusters: int, at_once: int) -> bool:
    """Whether so many clusters run at once, and their ranks can divide the rows of a tile."""
    return fits(tile, cluster) and (cluster == 1 or clusters <= at_once)


def cost_us(tile: Tile, load: Load, each: Split, at_once: int) -> float:
    """Estimate the microseconds of a launch.

    at_once: clusters that run at the same time.
    """
    costs, cluster, parts = tile.costs, each.cluster, each.parts
    assert costs is not None
    tiles = -(-max(-(-load.keys // tile.keys), 1) // (cluster * parts))
    clusters = max(load.entries, 1) * tile.count * parts * each.slices
    time = costs.fixed + costs.rank * cluster
    time += tiles * (costs.gathered if tile.gathered else costs.tile)
    owned = -(-tile.rows // cluster)
    if cluster > 1:
        moved = costs.sent * tile.rows * (1 - 1 / cluster) + costs.owned * owned
        time += moved / each.slices
    if parts > 1:
        turns = -(-owned // (tile.finished * each.slices))
        time += costs.merge + costs.turn * turns * (1 + -(-parts // PARTS_AHEAD))
    return -(-clusters // max(at_once, 1)) * time


def _parts(units: int, tiles: int, load: Load) -> int:
    """Return the CTAs that share a unit without a cluster."""
    if load.batch_invariant:
        return max(1, min(load.keys // MIN_KEYS_OF_FIXED_PART, MAX_FIXED_PARTS))
    return max(1, min(load.sms // units, tiles, MAX_PARTS, _worthwhile(load.keys)))


def _worthwhile(keys: int) -> int:
    """Return the parts from which on the merge costs more than one more part saves."""
    return math.isqrt(keys // KEYS_OF_MERGE)


def fits(tile: Tile, cluster: int) -> bool:
    """Whether the ranks of a cluster can divide the rows of a tile."""
    return cluster == 1 or cluster * -(-tile.rows // cluster) <= tile.capacity


def entries_of(arguments: Arguments) -> int:
    """Return the number of query entries."""
    lead = arguments.q.shape[:-2]
    return int(lead[0] if hasattr(arguments, "kv") else math.prod(lead))


def sms_for(device: torch.device, target: Target) -> int:
    """Return the SMs of the GPU, or of the architecture for an emulated launch."""
    if target.backend == "cuda":
        return sms_of(device)
    return hw.SMS_OF[target.arch]


def plain_config(arguments: Arguments) -> LatentConfig:
    """Return the config of the arguments, without cluster and parts."""
    sources = arguments.sources
    return LatentConfig(
        heads=arguments.heads,
        tokens=arguments.tokens,
        keys=sources[0].keys,
        extra=sources[1].keys if len(sources) > 1 else None,
        causal=arguments.causal and arguments.tokens > 1,
        sinks=arguments.sinks is not None,
        rope=64 if getattr(arguments, "cos", None) is not None else 0,
        key_scale=arguments.kv_scale is not None,
        pdl=arguments.pdl,
    )
