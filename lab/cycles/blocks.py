"""Attention from a few of its blocks: what it takes with each set of parameters."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cycle_model.parameters.parameter import Gpu
from kernelkit.compile.arch import written_for
from lab.cycles import sample, subjects
from lab.cycles.peers import Call, Peer, launched
from lab.cycles.sample import Clusters
from lab.flags import attention
from lab.problems.fmha import case_of, config_of
from lab.tools.groups import ARCHS
from ptxemu.record.recording import Recording

CLUSTERS = 9  # of a grid whose CTAs differ; how near that is to all: docs/cycle_model.md


def case_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    attention.add_case(parser)
    return parser


def case_options(flags: str, options: argparse.Namespace) -> argparse.Namespace:
    """Of the case that flags spell, with all else as it is.

    What our attention chooses by sizes is spelled out: fewer heads or queries of it are recorded.
    """
    found = case_parser().parse_args(shlex.split(flags))
    case = argparse.Namespace(**{**vars(options), **vars(found)})
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
    """With each set of parameters; recorded once."""
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
    pieces = 1 if native == "sm_90a" else sample.PIECES  # where blocks may be of 192 rows
    even = not options.causal and options.window == (None, None)
    size = options.batch, options.kv_heads, options.q_len
    count = options.clusters if "clusters" in options.given else CLUSTERS
    how = {"even": even, "pieces": pieces, "memory": options.memory}
    timed = sample.timed_of(record, size, sets[0], count, kind=sample.Periodic, **how)
    return [timed.microseconds(each) for each in sets]
