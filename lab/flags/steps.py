"""Steps: the kernels beside attention, decode and the grouped GEMM, each a call on some rows.

`lab.problems.steps` makes their problems: inputs, peers, the bytes that they move, and a check.
"""

from __future__ import annotations

import argparse

from lab.tools import groups
from lab.tools.groups import add

# family -> (its steps, the rows that its benchmark takes, what a row is)
FAMILIES = {
    "merge": (("merge",), (1, 128, 2048, 8192, 32768), "rows of O (positions x heads)"),
    "moe": (
        ("quantise", "route", "route_tokens", "permutation", "combine"),
        (1, 64, 4096, 32768),
        "tokens",
    ),
    "kvcache": (
        ("append", "gather", "copy", "checksum", "host"),
        (1, 128, 2048, 8192, 32768),
        "rows appended or gathered, or as many bytes",
    ),
    "dsv4": (
        ("compress", "query", "score", "topk", "norm_rope"),
        (1, 32, 128, 1024, 4096),
        "tokens of a step",
    ),
}
ABOUT = {  # what a step does
    "merge": "Merges attention results over disjoint keys.",
    "quantise": "Quantises tokens to nvfp4, mxfp8 and mxfp4.",
    "route": "Routes tokens to experts.",
    "route_tokens": "Routes tokens: the router's linear layer, then the choice of experts.",
    "permutation": "Sorts the choices of all tokens by expert.",
    "combine": "Sums the weighted expert rows of each token.",
    "append": "Writes new entries into the cache.",
    "gather": "Reads entries of the cache as bf16.",
    "copy": "Copies blocks of the cache, and segments of states.",
    "checksum": "Computes checksums of cache blocks.",
    "host": "Moves blocks of the cache to the host's memory and back.",
    "compress": "Compresses windows of tokens to entries of a CSA or HCA layer.",
    "query": "Rotates and quantises the queries of the indexer.",
    "score": "Scores the keys of the indexer.",
    "topk": "Selects the best of the scores.",
    "norm_rope": "Normalises, rotates, casts and appends rows between projections.",
}
STEPS = {step: family for family, (steps, *_) in FAMILIES.items() for step in steps}
ARCHS_OF = {"merge": groups.ALL_ARCHS}  # family -> --arch; those of others: SERVED
HIDDEN = 7168  # of the tokens of a MoE layer
SMALL_HIDDEN, SMALL_ROWS = 256, 5  # where the emulator runs it
NATIVE_ONLY = ("host",)  # pinned memory and a bus


def add_problems(group: argparse._ArgumentGroup, rows: tuple[int, ...], hidden: int) -> None:
    """Add flags that choose problems of the steps."""
    shown = " ".join(map(groups.spelt, rows))
    many = {"type": groups.positive_count, "nargs": "+", "shown": shown}
    add(group, "rows", "rows, also as 8k", rows, old=["tokens"], **many)
    words = "hidden size of a MoE layer"
    add(group, "hidden", words, hidden, type=groups.positive_count)
    some = {"type": str, "nargs": "+", "metavar": "WORD", "shown": "all"}
    add(group, "names", "problems whose name contains one of these words", (), **some)


def _add_steps(group: argparse._ArgumentGroup, steps: tuple[str, ...]) -> None:
    """Add the flag that chooses steps of a family."""
    some = {"choices": steps, "nargs": "+", "metavar": "STEP", "shown": "all"}
    add(group, "steps", f"steps: {', '.join(steps)}", steps, **some)


def _add_arch(parser: argparse.ArgumentParser, family: str) -> None:
    archs = ARCHS_OF.get(family, groups.SERVED)
    add(parser, "arch", "architecture to compile for", choices=archs, shown="the kernel's first")


def add_case(step: str, parser: argparse.ArgumentParser) -> None:
    """Flags of `dump.py STEP`."""
    add_problems(parser.add_argument_group("problem"), (SMALL_ROWS,), SMALL_HIDDEN)
    _add_arch(parser, STEPS[step])
    parser.set_defaults(steps=(step,), family=STEPS[step])


def add_family(family: str, parser: argparse.ArgumentParser) -> None:
    """Flags of `cycles.py FAMILY`: of all its steps that have a kernel."""
    kernels = tuple(step for step in FAMILIES[family][0] if step not in NATIVE_ONLY)
    group = parser.add_argument_group("problem")
    _add_steps(group, kernels)
    add_problems(group, (SMALL_ROWS,), SMALL_HIDDEN)
    _add_arch(parser, family)
    parser.set_defaults(family=family)


def add_run(step: str, parser: argparse.ArgumentParser) -> None:
    """Flags of `run.py STEP`."""
    add_problems(parser.add_argument_group("problem"), (SMALL_ROWS,), SMALL_HIDDEN)
    groups.add_run(parser, ARCHS_OF.get(STEPS[step], groups.SERVED), seed="inputs")
    parser.set_defaults(steps=(step,), family=STEPS[step])


def add_bench(family: str, parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py FAMILY`."""
    steps, rows, _ = FAMILIES[family]
    group = parser.add_argument_group("problems")
    _add_steps(group, steps)
    add_problems(group, rows, HIDDEN)
    groups.add_report(parser.add_argument_group("output"), "bandwidth")
    parser.set_defaults(family=family)
