"""Choose the config of a problem: CTAs that share the keys of a query entry, and the kernel.

Pure functions of sizes. A unit is one tile of rows of one query entry. CTAs that share a unit's
keys are a cluster, or several that merge through a workspace (parts). The mma.sync kernel has no
clusters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from kernelkit.call.launch import Target, clusters_at_once, sms_of
from kernelkit.compile.arch import PORTABLE, written_for
from kernelkit.plan import hw
from mla.attention.arguments import MAX_PARTS, Arguments
from mla.attention.config import MAX_CLUSTER, LatentConfig
from mla.attention.formats import LATENT
from mla.attention.portable.plan import KEYS, PortablePlan

KEPT = 1024  # cached decisions
WARP, WGMMA = "mla.attention.portable.kernel", "mla.attention.sm90.kernel"
# architecture that a kernel is written for -> names for users -> module, the default first
KERNELS = {
    "sm_90a": {"warp": WARP, "wgmma": WGMMA},
    "sm_100a": {"warp": WARP},
    PORTABLE: {"warp": WARP},
}
ARCHS = tuple(KERNELS)
ROWS_OF_WGMMA, KEYS_OF_WGMMA = 64, 64  # of a tile
MOST_OWNED = 72  # rows that all CTAs of a cluster finish together, padding included
# The last part reads the sums of all parts: about 650 ns for each, as long as ten keys take.
KEYS_OF_MERGE = 10
# With `batch_invariant` the split depends on the keys alone.
MIN_KEYS_OF_FIXED_PART, MAX_FIXED_PARTS, FIXED_CLUSTER = 512, 16, 4


@dataclass(frozen=True)
class Tile:
    """Tile of one kernel: query rows, keys, and whether CTAs form clusters."""

    rows: int
    keys: int
    clustered: bool


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
        return self.entries * self.row_tiles * self.parts * self.config.cluster

    @property
    def workspace(self) -> tuple[int, int, int]:
        """Shape of the workspace in fp32 (units, parts, words); zeros without parts."""
        if not self.config.parts:
            return 0, 0, 0
        rows = tile_of(self.kernel, self.config).rows
        cluster = self.config.cluster
        units = self.entries * self.row_tiles * cluster
        return units, self.parts, -(-rows // cluster) * (LATENT + 2)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace, the counters included."""
        units, parts, words = self.workspace
        return units * (parts * words + 1) * 4


Places = Callable[[int], int]  # CTAs of a cluster -> clusters that run at once


def decide(arguments: Arguments, target: Target) -> Decision:
    """Choose the launch of checked arguments."""
    arch = target.arch
    kernel = kernel_of(arguments.kernel, arch)
    config = plain_config(arguments)
    load = Load(
        entries=entries_of(arguments),
        keys=arguments.longest,
        sms=sms_for(arguments.q.device, target),
        batch_invariant=arguments.batch_invariant,
        many=getattr(arguments, "many", False),
        cluster=arguments.cluster,
        parts=arguments.parts,
    )
    return _decision(config, kernel, load, target, arguments.q.device)


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
    row_tiles = -(-config.heads * config.tokens // tile.rows)
    cluster, parts = split(tile, row_tiles, load, limit)
    chosen = _with(config, cluster, parts)
    return Decision(chosen, kernel, parts, row_tiles, load.entries)


def _with(config: LatentConfig, cluster: int, parts: int) -> LatentConfig:
    fields = {name: getattr(config, name) for name in LatentConfig.__dataclass_fields__}
    return LatentConfig(**fields | {"cluster": cluster, "parts": parts > 1})


def kernel_of(name: str, arch: str) -> str:
    """Return the module of a kernel by its name for users; NotImplementedError if it has none."""
    known = KERNELS[written_for(arch)]
    if name == "auto":
        return next(iter(known.values()))
    if name not in known:
        raise NotImplementedError(f"kernel {name!r} on {arch}: one of {('auto', *known)}")
    return known[name]


def tile_of(kernel: str, config: LatentConfig) -> Tile:
    """Return the tile of a kernel."""
    if kernel == WARP:
        return Tile(PortablePlan(config).rows, KEYS, False)
    return Tile(ROWS_OF_WGMMA, KEYS_OF_WGMMA, True)


def split(tile: Tile, row_tiles: int, load: Load, limit: Places | None = None) -> tuple[int, int]:
    """Return (CTAs of a cluster, clusters that share a unit).

    Chosen so that about all SMs have work in one wave, and each CTA has at least one tile.
    """
    units = row_tiles * (1 if load.batch_invariant else max(load.entries, 1))
    tiles = max(-(-load.keys // tile.keys), 1)
    if load.cluster or not tile.clustered or load.many:
        cluster = load.cluster or 1
        if load.parts or load.many:
            return cluster, load.parts or 1
        return cluster, _parts(units * cluster, -(-tiles // cluster), load, tile)
    if load.parts:
        wanted = max(load.sms // (units * load.parts), 1)
        return _cluster(tile, min(wanted, -(-tiles // load.parts)), units * load.parts, limit), (
            load.parts
        )
    if load.batch_invariant:
        cluster = _cluster(tile, min(FIXED_CLUSTER, tiles), 1, limit)
        return cluster, max(1, min(load.keys // (MIN_KEYS_OF_FIXED_PART * cluster), 8))
    wanted = max(min(load.sms // units, tiles), 1)
    cluster = _cluster(tile, wanted, units, limit)
    if cluster < MAX_CLUSTER // 2 or wanted < 2 * cluster:
        return cluster, 1
    return cluster, max(1, min(wanted // cluster, MAX_PARTS, _worthwhile(load.keys // cluster)))


def _parts(units: int, tiles: int, load: Load, tile: Tile) -> int:
    """Return the CTAs that share a unit without a cluster."""
    if load.batch_invariant:
        return max(1, min(load.keys // MIN_KEYS_OF_FIXED_PART, MAX_FIXED_PARTS))
    return max(1, min(load.sms // units, tiles, MAX_PARTS, _worthwhile(load.keys)))


def _worthwhile(keys: int) -> int:
    """Return the parts from which on the merge costs more than one more part saves."""
    return math.isqrt(keys // KEYS_OF_MERGE)


def _cluster(tile: Tile, wanted: int, units: int, limit: Places | None) -> int:
    """Return the largest possible cluster of at most `wanted` CTAs, all of which run at once."""
    widths = [width for width in range(1, min(wanted, MAX_CLUSTER) + 1) if fits(tile, width)]
    for width in reversed(widths):
        if limit is None or width == 1 or limit(width) >= units:
            return width
    return 1


def fits(tile: Tile, cluster: int) -> bool:
    """Whether the CTAs of a cluster can divide the rows of a tile."""
    return cluster * -(-tile.rows // cluster) <= MOST_OWNED


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
