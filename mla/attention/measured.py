"""Options of attention to latent keys that are measured: their problems and candidates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernelkit.compile.arch import written_for
from kernelkit.plan import hw
from kernelkit.tune.choices import Choice, Tuned, are_open
from mla.attention.arguments import MAX_PARTS, Arguments
from mla.attention.choose import KERNELS, Tile, entries_of, fits, plain_config, tile_of
from mla.attention.config import MAX_CLUSTER, LatentConfig

OPTIONS = ("cluster", "parts", "kernel")
TUNED = Tuned("mla", {arch: tuple(named.values()) for arch, named in KERNELS.items()}, OPTIONS)
CLUSTERS = (1, 2, 3, 4, 6, 8, 12, 16)
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MAX_PARTS)
WAVES = 2  # of CTAs, at most, if keys are divided


@dataclass(frozen=True)
class Measured:
    """Problem that a measured choice depends on.

    config: config of the arguments, without cluster and parts.
    entries, keys, many: as of `choose.Load`.
    """

    config: LatentConfig
    entries: int
    keys: int
    many: bool = False


def problem_of(arguments: Arguments) -> Measured | None:
    """Return the measured problem; None if the arguments fix an option or promise bits."""
    if arguments.batch_invariant or not are_open(arguments, OPTIONS):
        return None
    many = getattr(arguments, "many", False)
    return Measured(plain_config(arguments), entries_of(arguments), arguments.longest, many)


def choices(problem: Measured, arch: str) -> list[Choice]:
    """Return the options that may suit a problem; some of them do not fit."""
    found: list[Choice] = []
    for name, module in KERNELS[written_for(arch)].items():
        tile = tile_of(module, problem.config)
        found += [
            {"kernel": name, "cluster": cluster, "parts": parts}
            for cluster, parts in _splits(problem, tile, hw.SMS_OF[arch])
        ]
    return found


def _splits(problem: Measured, tile: Tile, sms: int) -> Iterator[tuple[int, int]]:
    """Yield (CTAs of a cluster, clusters that share an entry), a tile of keys for each CTA."""
    units, tiles = max(problem.entries, 1) * tile.count, max(-(-problem.keys // tile.keys), 1)
    clusters = [each for each in CLUSTERS if each * tile.pair <= MAX_CLUSTER]
    for cluster in clusters if tile.costs is not None else CLUSTERS[:1]:
        for parts in PARTS:
            sharing = cluster * parts
            few = sharing == 1 or (sharing <= tiles and units * sharing <= WAVES * sms)
            if few and fits(tile, cluster):
                yield cluster, parts
