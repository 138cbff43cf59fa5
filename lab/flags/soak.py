"""The flags of campaigns of random problems: `soak.py fmha`, `gqa`, `mla`, `moe`, `rows`."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence

from lab.tools import groups
from lab.tools.groups import add, switch

OF_ATTENTION = {
    "small": "a few tiles per entry",
    "long": "up to 4,096 queries and 131,072 keys per entry",
}
OF_DECODE = {
    "small": "a few tiles per entry",
    "long": "up to 131,072 keys per entry",
}
OF_EXPERTS = {
    "small": "a few tiles per expert",
    "large": "model sizes: up to 128 experts, K up to 2,880",
}
OF_LATENT = {
    "small": "up to 150 keys and 72 rows per entry",
    "long": "up to 40,000 keys per entry",
}
OF_ROWS = {"small": "a few short rows"}


def problem(text: str) -> tuple[int, int]:
    """Argument type: 'K.N', problem N of kernel K."""
    kernel, dot, number = text.partition(".")
    if not (dot and kernel.isdigit() and number.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not K.N, a kernel and one of its problems")
    return int(kernel), int(number)


def add_campaign(
    sizes: Mapping[str, str],
    parser: argparse.ArgumentParser,
    archs: Sequence[str] = groups.ARCHS,
) -> None:
    """Flags of a campaign. sizes: names of those that are not the usual ones, and what they are.
    archs: architectures that the emulator can run."""
    _add_problems(sizes, parser)
    group = parser.add_argument_group("other ways to run each problem, with equal bits")
    switch(group, "graphs", "also in a CUDA graph that is replayed with other contents")
    switch(group, "streams", "also concurrently with other problems, each on its own stream")
    switch(group, "compile", "also with torch.compile")
    _add_run(parser, archs)


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Flags of a campaign whose problems run twice, and in no other way."""
    _add_problems(OF_ROWS, parser)
    _add_run(parser, groups.ARCHS)
    parser.set_defaults(graphs=False, streams=False, compile=False)


def _add_problems(sizes: Mapping[str, str], parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("problems")
    add(group, "seed", "seed of everything that is drawn", 0)
    many = {"type": groups.positive_count}
    add(group, "configs", "kernels to compile", shown="60, emulated 4", **many)
    add(group, "problems", "problems for all kernels together", shown="3000, emulated 8", **many)
    some = {"type": problem, "nargs": "+", "metavar": "K.N", "shown": "none"}
    add(group, "problem", "only these, as a failure names them", (), **some)
    one = group.add_mutually_exclusive_group()
    for size, words in sizes.items():
        how = {"action": "store_const", "const": size, "dest": "size"}
        one.add_argument(f"--{size}", help=words, **how)


def _add_run(parser: argparse.ArgumentParser, archs: Sequence[str]) -> None:
    group = parser.add_argument_group("run")
    groups.add_backend(group, archs)
    words = "processes that compile; 1: only this one"
    add(group, "jobs", words, os.cpu_count() or 1, type=groups.positive_count, shown="as many CPUs")
    words = "stop after this time, with the results so far"
    minutes = {"type": groups.positive, "metavar": "MINUTES", "shown": "none"}
    add(group, "minutes", words, math.inf, **minutes)
    switch(group, "check", "the first call of each problem under the emulator's checker")
    groups.add_json(group, "the results")
    parser.set_defaults(strict=False, check_json=None)
