"""Measure on this GPU which options of a kernel suit your shapes, and keep the fastest.

Every candidate is compiled and sampled a few times, the slower half is dropped, and so on. Later
calls with such shapes, of any process, use what was found if it is faster than the rules' choice.
Nobody else should use the GPU meanwhile. docs/tuning.md explains the files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelkit.tune.tuner import Outcome

OPERATORS = "attention, decode, grouped_gemm, mixed_gemm, mla, q8_0.matvec, q8_0.product"
SHOWN = 5  # options of a shape, the fastest
EXAMPLES = """examples:
  python -m kernelkit tune decode --shapes                          # the names of a shape
  python -m kernelkit tune decode --shape batch=4 keys=8192 --shape batch=64 keys=1024
  python -m kernelkit tune decode --random 20 --exhaustive --dry --json   # how good the race is
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog, parser.formatter_class = EXAMPLES, argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    parser.add_argument("operator", help=f"what to tune: one of {OPERATORS}; also fmha and gqa")
    parser.add_argument(
        "--shape", action="append", nargs="*", default=[], metavar="NAME=VALUE",
        help="a call; omitted names have their defaults (--shapes); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--shapes", action="store_true", help="print the names and defaults of a shape, and stop"
    )
    parser.add_argument(
        "--random", type=int, default=0, metavar="N", help="also tune N random shapes"
    )
    parser.add_argument("--known", action="store_true", help="also tune the shapes of known models")
    parser.add_argument("--seed", type=int, default=0, help="seed for --random")
    parser.add_argument(
        "--exhaustive", action="store_true",
        help="also sample every candidate to the end; print how far the answer is from the best",
    )  # fmt: skip
    parser.add_argument("--dry", action="store_true", help="do not save the result")
    parser.add_argument("--device", default=None, help="such as cuda:0; default: the current one")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2),
        help="processes that compile; default: half of the CPUs",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print all times as JSON")


def run(given: argparse.Namespace) -> int:
    """Exit code 0. ValueError for a wrong name or value."""
    from kernelkit.tune.tuner import subject, tune

    about = subject(given.operator)
    if given.shapes:
        print((about.shape.__doc__ or "").strip())
        for item in dataclasses.fields(about.shape):
            print(f"  {item.name}={item.default}")
        return 0
    order = random.Random(given.seed)
    shapes = [shape_of(about.shape, words) for words in given.shape]
    shapes += about.known if given.known else ()
    shapes += [about.draw(order) for _ in range(given.random)]
    if not shapes:
        raise ValueError("no shape: pass --shape (may be empty), --known or --random")
    found = tune(
        given.operator,
        shapes,
        device=given.device,
        exhaustive=given.exhaustive,
        keep=not given.dry,
        workers=given.workers,
        progress=lambda words: print(words, file=sys.stderr, flush=True),
    )
    if given.json:
        print(json.dumps([outcome.as_json() for outcome in found], indent=1))
        return 0
    for outcome in found:
        print("\n".join(lines(outcome, exhaustive=given.exhaustive)))
    return 0


def shape_of(kind: type, words: Sequence[str]) -> Any:
    """A shape of words such as 'batch=4'. ValueError for another name or another type."""
    plain = {item.name: item.default for item in dataclasses.fields(kind)}
    values = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in plain:
            raise ValueError(f"{word!r}: a shape consists of {', '.join(plain)}")
        values[name] = _value(word, text, type(plain[name]))
    return kind(**values)


def _value(word: str, text: str, kind: type) -> Any:
    if kind is bool:
        known = {"true": True, "1": True, "false": False, "0": False}
        if text.lower() not in known:
            raise ValueError(f"{word!r}: expected true or false")
        return known[text.lower()]
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"{word!r}: expected {kind.__name__}") from error


def lines(outcome: Outcome, *, exhaustive: bool) -> list[str]:
    """A table of the fastest options."""
    shape = " ".join(f"{name}={value}" for name, value in outcome.shape.items()) or "by default"
    verdict = "kept" if outcome.kept else "the rules' choice stays"
    found = [f"{outcome.operator} {shape}: {verdict}"]
    shown = outcome.times[:SHOWN]
    if all(choice for choice, _ in shown):
        shown = [*shown, ({}, outcome.time_of({}))]
    for choice, time in shown:
        words = " ".join(f"{name}={value}" for name, value in choice.items()) or "(rules)"
        found.append(f"  {time.us:10.2f} us +-{time.error:5.1%} of {time.samples:3}  {words}")
    if outcome.refused:
        found.append(f"  {len(outcome.refused)} candidates do not fit, or gave wrong results")
    if exhaustive:
        found.append(f"  {outcome.excess:.1%} slower than the fastest candidate")
    return found
