"""A launch that is too large to be executed, from few of its clusters.

A persistent kernel whose tiles all take as long is recorded with fewer heads or queries, so that
one of its CTAs has a tile more than another: the others take what this tile took. Of any other grid
some clusters are recorded; where their lengths follow the period in which a grid orders its work,
as those of causal attention do, each of the others has the length that its place in it gives.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from cycle_model.binding.bound import BoundLaunch
from cycle_model.grid import COLD, LaunchModel, Lengths, in_stream
from cycle_model.launch import bind
from cycle_model.parameters.parameter import Gpu
from kernelkit.compile.arch import written_for
from lab.cycles import subjects
from lab.cycles.peers import Call, Peer, launched, spread
from lab.flags import attention
from lab.problems.fmha import case_of, config_of
from lab.tools.groups import ARCHS
from ptxemu.record.recording import Recording

TILES = 3  # of a persistent CTA that are executed; the rest are as long as the last of them
PERSISTENT = 2  # CTAs that are executed with all their tiles, where that is not enough
NEAR = 0.02  # of the range of lengths: those that a period explains lie as near as that
LEAST = 4  # places in a period that have to be known
EVEN = 0.02  # lengths that differ by less are no reason to look for a period

PIECES, PIECE = 16, 512  # of the queries; so many at least, which are whole tiles

Clusters = int | Callable[[int], Sequence[int]]
# (entries of the batch, KV heads, queries of each, which clusters) -> what is launched
Record = Callable[[int, int, int, Clusters], Sequence[Recording]]


class Periodic(LaunchModel):
    """Knows the lengths of clusters that were not recorded from the period of the grid."""

    @cached_property
    def lengths(self) -> dict[int, Lengths]:
        known = super().lengths
        took = {number: each.took for number, each in known.items()}
        found = period_of(self.clusters, took)
        if found is None:
            return known
        places = [place_of(number, found) for number in known]
        fits = [
            np.polyfit(places, each, 1) for each in zip(*map(astuple, known.values()), strict=True)
        ]
        more = {
            number: Lengths(
                *(round(float(np.polyval(fit, place_of(number, found)))) for fit in fits)
            )
            for number in range(self.clusters)
        }
        return more | known


def period_of(total: int, took: Mapping[int, int]) -> tuple[int, int] | None:
    """(width, count) of a grid of so many clusters in which number // width % count says how long
    one takes: the longer or the shorter the further, by as much each time. None where nothing of
    the kind explains the lengths that are known, or they hardly differ."""
    lengths = np.array(list(took.values()), float)
    scale = np.ptp(lengths)
    if len(took) == total or scale <= EVEN * lengths.max():
        return None
    best: tuple[float, tuple[int, int]] | None = None
    for period in _periods(total):
        places = np.array([place_of(number, period) for number in took])
        if len(np.unique(places)) < LEAST:
            continue
        fit = np.polyfit(places, lengths, 1)
        off = float(np.abs(np.polyval(fit, places) - lengths).max() / scale)
        if off <= NEAR and (best is None or off < best[0]):
            best = off, period
    return best[1] if best else None


def place_of(number: int, period: tuple[int, int]) -> int:
    """Return the position of a cluster in its period."""
    width, count = period
    return number // width % count


def _periods(total: int) -> Iterator[tuple[int, int]]:
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    for width in divisors:
        yield from ((width, count) for count in divisors if total // width % count == 0)


@dataclass(frozen=True)
class Timed:
    """Times of launches on any GPU: the recorded launches, and `more` additional tiles of a
    persistent CTA."""

    launches: Sequence[BoundLaunch]
    model: Callable[[BoundLaunch, Gpu], LaunchModel]
    more: int = 0

    def microseconds(self, gpu: Gpu) -> float:
        us = 0.0
        for prediction in in_stream([self.model(each, gpu) for each in self.launches]):
            us += prediction.microseconds
            if self.more:
                took = prediction.durations
                tile = took[min(took)] - took[max(took)]
                us += self.more * tile / gpu.value("clock") / 1e3
        return us


def timed_of(
    record: Record,
    size: tuple[int, int, int],
    gpu: Gpu,
    clusters: int,
    *,
    even: bool = True,
    pieces: int = PIECES,
    kind: type[LaunchModel] = LaunchModel,
    memory: str = COLD,
) -> Timed:
    """Record few clusters of a launch, from which the time of all of them follows.

    Args:
        size: entries of the batch, KV heads, queries.
        clusters: clusters to record of a grid that is not persistent.
        even: whether all tiles take equally long.
        pieces: number of parts of the queries, in whole tiles, if there are many.
        kind: class that models launches.
    """
    model = partial(kind, memory=memory)

    batch, kv_heads, queries = size
    heads = batch * kv_heads

    def models(*given: Any) -> list[LaunchModel]:
        return [model(bind(each), gpu) for each in record(*given)]

    def timed(found: Sequence[LaunchModel], more: int = 0) -> Timed:
        return Timed([each.launch for each in found], model, more)

    pieces = pieces if even and queries >= pieces * PIECE else 1
    one = models(1, 1, queries // pieces, 1) if heads > 1 else []
    places, tiles = (one[0].places, one[0].clusters) if len(one) == 1 else (0, 1)
    known, tiles = tiles < places, tiles * pieces  # else they may be more, of a persistent kernel
    if even and known and heads * tiles > TILES * places:
        found = models(1, *_few(tiles, places, queries), _ends)
        if found[0].clusters == places:
            return timed(found, -(-heads * tiles // places) - TILES)

    def chosen(total: int) -> Sequence[int]:
        persistent = total <= places < heads * tiles
        return spread(total, PERSISTENT if persistent else clusters)

    return timed(models(*size, chosen))


def _ends(total: int) -> Sequence[int]:
    """Clusters of a grid the first cluster and the last, and one that reads what the first one
    does."""
    return sorted({0, min(1, total - 1), total - 1})


def _few(tiles: int, places: int, queries: int) -> tuple[int, int]:
    """KV heads and queries with which some places have `TILES` tiles and others one less; tiles: of
    one KV head with all queries."""
    most = TILES * places - 1
    heads = most // tiles
    if heads * tiles > (TILES - 1) * places:
        return heads, queries
    pieces = most * PIECES // ((heads + 1) * tiles)
    return heads + 1, queries * pieces // PIECES


CLUSTERS = 9  # of a grid whose CTAs differ; how near that is to all: docs/cycle_model.md


def case_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    attention.add_case(parser)
    return parser


def case_options(flags: str, options: argparse.Namespace) -> argparse.Namespace:
    """Options of the case that flags spell, with all else as it is.

    What our attention chooses by sizes is spelled out: fewer heads or queries of it are recorded.
    """
    found = case_parser().parse_args(shlex.split(flags))
    case = argparse.Namespace(**{**vars(options), **vars(found), "subject": "fmha"})
    arch = getattr(options, "arch", None) or ARCHS[0]
    config = config_of(case_of(case), arch)
    case.pack_heads = config.group > 1
    if written_for(arch) == "sm_90a":
        case.ctas = config.ctas or 1
    else:
        case.schedule = config.schedule or "base"
    return case


@contextmanager
def ours(options: argparse.Namespace) -> Iterator[Call]:
    yield subjects.of_family(options)


def microseconds(peer: Peer, options: argparse.Namespace, sets: Sequence[Gpu]) -> list[float]:
    """Return the time with each set of parameters; launches are recorded once."""
    group = options.q_heads // options.kv_heads

    def record(batch: int, kv_heads: int, queries: int, clusters: Clusters) -> list[Recording]:
        smaller = {"batch": batch, "kv_heads": kv_heads, "q_heads": kv_heads * group}
        smaller |= {"q_len": queries}
        with peer(argparse.Namespace(**{**vars(options), **smaller})) as call:
            found = [each.recording for each in launched(call, clusters)]
        recordings = [each for each in found if each is not None and each.cubin]
        if not recordings:
            raise ValueError("it launches nothing that has machine code")
        return recordings

    native = written_for(options.arch or ARCHS[0])
    pieces = 1 if native == "sm_90a" else PIECES  # where blocks may be of 192 rows
    even = not options.causal and options.window == (None, None)
    size = options.batch, options.kv_heads, options.q_len
    count = options.clusters if "clusters" in options.given else CLUSTERS
    how = {"even": even, "pieces": pieces, "memory": options.memory}
    timed = timed_of(record, size, sets[0], count, kind=Periodic, **how)
    return [timed.microseconds(each) for each in sets]
