"""Random decode steps, reproducible by a seed, and a trial of each against fp64."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gqa_lowlatency import decode
from gqa_lowlatency.api import fields_of
from gqa_lowlatency.arguments import Arguments
from gqa_lowlatency.config import (
    CLUSTERS,
    COLUMNS,
    HEAD_DIMS,
    IO_DTYPES,
    MAX_Q_TOKENS,
    STEPS,
    WARP_COUNTS,
    DecodeConfig,
)
from gqa_lowlatency.launch import ARCHS, DECODE, checked_decision, forward
from kernelkit.call.launch import Target
from kernelkit.compile.arch import written_for
from kernelkit.compile.compiler import collecting
from kernelkit.compile.keys import KernelKey
from kernelkit.numerics import tolerance
from lab.problems import draws, extremes
from lab.problems.decode import Case, grain_of, verdicts
from lab.problems.draws import Kernel
from lab.problems.fmha import moved
from lab.soak import campaign
from lab.soak.campaign import Family, Feature, Results

GROUPS = (1, 1, 2, 3, 4, 5, 8, 8, 16, 40)  # query heads of a KV head
EDGES = (0, 16, 64, 128, 256, 512, 1024)  # of tiles, and of what a CTA takes
BATCHES = (1, 1, 2, 3, 5, 9, 33)
# (amplitude of q, growth of k, scale, depth): maxima that stay, that move, that climb from tile to
# tile, and that are so low that a weight beside 0 would be none.
SCORES = (
    *((1.0, 0.0, None, 0.0),) * 4,
    *((0.0, 0.0, None, 0.0), (4.0, 0.0, None, 0.0), (20.0, 0.0, None, 0.0), (1.0, 0.0, 1.0, 0.0)),
    *((1.0, 8.0, None, 0.0), (1.0, -8.0, None, 0.0), (1.0, 0.0, 1.0, 16.0)),
)  # fmt: skip
EXTREME = 0.25  # of problems: their numbers are at the ends of what is accepted
TUNING = {
    "owners": (1, 2, 4), "max_columns": COLUMNS, "warps": WARP_COUNTS, "step": STEPS,
    "stages": (2, 3, 4),
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """The most keys of an entry, and of all entries and KV heads together."""

    keys: int
    rows: int


SIZES = {
    "small": Sizes(700, 1 << 11),
    "usual": Sizes(9000, 1 << 16),
    "long": Sizes(1 << 17, 1 << 20),
}


class Draws(draws.Draws):
    """Kinds of steps, each of a few kernels: batch and lengths choose the cluster, but where one is
    drawn."""

    sizes: Sizes

    def kind(self, pick: random.Random) -> Case:
        return drawn_kind(pick)

    def config(self, kind: Case, pick: random.Random) -> DecodeConfig:
        given = arguments_of(kind, self.arch)
        given.check()
        return checked_decision(given, Target("emulate", self.arch)).config

    def drawn(self, kernel: Kernel, pick: random.Random) -> Case:
        while True:
            case = drawn_problem(kernel.case, pick, self.sizes)
            if sum(case.lengths) * case.heads[1] <= self.sizes.rows:
                return case

    def keys(self, kernel: Kernel, numbers: Sequence[int]) -> list[KernelKey]:
        with collecting() as found:
            for number in numbers:
                forward(arguments_of(self.problem(kernel, number), self.arch))
        return [*dict.fromkeys(found)]


def arguments_of(case: Case, arch: str) -> Arguments:
    """Return the arguments of `decode` for the case, without memory."""
    options = moved(case.options(), "meta") | case.launch_options(arch)
    return DECODE.arguments(fields_of(*case.inputs("meta"), options))


def drawn_kind(pick: random.Random) -> Case:
    """Draw what is compiled; runtime values only show whether they are given."""
    window, tokens = pick.choice((None, None, 1)), pick.choice((1, 1, 1, 2, 3, MAX_Q_TOKENS))
    kv_dtype, keys = pick.choice(("", "", "e4m3")), pick.choice(("dense", "lens", "lens", 0, 0))
    tuned = pick.random() < 0.5
    return Case(
        (1,),
        (pick.choice(GROUPS), 1),
        tokens,
        pick.choice(HEAD_DIMS),
        pick.choice(IO_DTYPES),
        kv_dtype,
        pick.choice(("none", "one", "heads")),
        pick.choice(("", "", *IO_DTYPES, "fp32")),
        causal=pick.random() < 0.7,
        window=window,
        sink_tokens=int(window is not None and pick.random() < 0.5),
        firsts=(0,) if keys != "dense" and pick.random() < 0.2 else (),
        softcap=float(pick.random() < 0.25),
        sinks=pick.random() < 0.3,
        keys=keys or pick.choice((1, 8, 16, 64, 128)),
        flat=tokens == 1 and pick.random() < 0.5,
        pdl=pick.choice(("", "", "pdl", "ready")),
        batch_invariant=not tuned and pick.random() < 0.2,
        parts=pick.choice((0, 0, 1, 2, 3)),
        cluster=pick.choice(CLUSTERS) if tuned else 0,
        tuning=_tuning(pick) if tuned else (),
    )


def _tuning(pick: random.Random) -> tuple[tuple[str, int], ...]:
    return tuple(
        (name, pick.choice(values)) for name, values in TUNING.items() if pick.random() < 0.2
    )


def drawn_problem(kind: Case, pick: random.Random, sizes: Sizes) -> Case:
    """A problem of a kind of step."""
    batch, kv_heads = pick.choice(BATCHES), pick.choice((1, 1, 2, 3, 8))
    lens = [_length(pick, sizes.keys) for _ in range(batch)]
    firsts = [pick.choice((0, pick.randint(0, n + 20))) for n in lens if kind.firsts]
    amplitude, climb, scale, depth = pick.choice(SCORES)
    case = replace(
        kind,
        lens=tuple(lens),
        heads=(kind.heads[0] * kv_heads, kv_heads),
        window=None if kind.window is None else _width(pick, sizes.keys),
        sink_tokens=pick.choice((1, 4, 129, 300)) if kind.sink_tokens else 0,
        softcap=pick.choice((0.5, 15.0, 50.0)) if kind.softcap else 0.0,
        sink_value=pick.choice((None, None, -math.inf, 90.0)) if kind.sinks else None,
        amplitude=amplitude,
        climb=climb,
        scale=scale,
        depth=depth,
        firsts=tuple(firsts),
    )
    return extremes.of_case(case, pick) if pick.random() < EXTREME else case


def _length(pick: random.Random, most: int) -> int:
    """Draw a length: zero, small, near an edge, near the maximum, or any."""
    length = pick.choice((
        0, pick.randint(1, 16), pick.choice(EDGES) + pick.randint(-1, 1),
        most - pick.choice((0, 0, 1, 7, 129)), pick.randint(1, most),
    ))  # fmt: skip
    return min(max(length, 0), most)


def _width(pick: random.Random, most: int) -> int:
    return pick.choice((0, 1, 63, 128, pick.randint(0, 600), pick.randint(0, most)))


class Trial(campaign.Trial):
    """Against fp64 on the same device."""

    case: Case

    def prepare(self) -> Results:
        self.options = moved(self.case.options(), self.place.device)
        launched = self.case.launch_options(None)
        self.arguments = self.options | launched | self.place.given
        return self.case.inputs(self.place.device)

    def step(self, *inputs: torch.Tensor) -> Results:
        return decode(*inputs, return_lse=True, **self.arguments)

    def reports(self) -> Sequence[tolerance.Report]:
        options = self.options | {"arch": written_for(self.place.arch)}
        o = self.first[0]  # of which fp32 is held to its own precision
        grain = o.dtype if o.dtype == torch.float32 else grain_of(self.case, o)
        extreme = self.case.extreme > 0
        return verdicts(self.inputs, options, self.first, grain, extreme=extreme)

    def change(self) -> None:
        campaign.change_q_and_v(self.inputs)


FEATURES: dict[str, Feature] = {
    **{f"head dim {d}": lambda case, d=d: case.head_dim == d for d in HEAD_DIMS},
    "bf16": lambda case: case.dtype == "bf16",
    "fp16": lambda case: case.dtype == "fp16",
    "e4m3 keys": lambda case: case.kv_dtype == "e4m3",
    "O of another dtype": lambda case: case.out_dtype not in ("", case.dtype),
    "several tokens": lambda case: case.tokens > 1,
    "groups of heads": lambda case: case.heads[0] > case.heads[1],
    "more rows than a CTA has": lambda case: case.heads[0] // case.heads[1] * case.tokens > 64,
    "not causal": lambda case: not case.causal,
    "window": lambda case: case.window is not None,
    "sink tokens": lambda case: case.sink_tokens,
    "first keys": lambda case: case.firsts,
    "learned sinks": lambda case: case.sinks,
    "sinks of -inf or 90": lambda case: case.sink_value is not None,
    "softcap": lambda case: case.softcap,
    "lengths": lambda case: case.keys == "lens",
    "pages": lambda case: isinstance(case.keys, int),
    "entries without keys": lambda case: 0 in case.lengths,
    "rows of 100k keys": lambda case: max(case.lengths) >= 100_000,
    "scores of 0": lambda case: case.amplitude == 0.0,
    "large scores": lambda case: case.amplitude > Case.amplitude,
    "scores that climb": lambda case: case.climb,
    "scores far below 0": lambda case: case.depth,
    "extremes": lambda case: case.extreme,
    "several clusters a head": lambda case: case.parts > 1,
    "the same bits in any batch": lambda case: case.batch_invariant,
    "a tuned cluster": lambda case: case.cluster,
    "other tuned fields": lambda case: case.tuning,
    "pdl": lambda case: case.pdl == "pdl",
    "pdl, keys ready": lambda case: case.pdl == "ready",
}


FAMILY = Family(
    "gqa",
    ARCHS,
    Draws,
    SIZES,
    Trial,
    FEATURES,
    {"O": "output", "LSE": "lse"},
)
