"""Flags of `bench.py q8_0`: which matrices, layouts, tokens and operations."""

from __future__ import annotations

import argparse
import re

from workbench.flags import groups
from workbench.flags.groups import add

# What a layer has: up or gate, down, and q, k and v together: rows, columns.
SHAPES = ((8192, 2048), (2048, 8192), (6144, 2048))
FEW, MANY = (1, 4, 16), (1024, 2048)
LAYOUTS = ("soa", "interleaved")  # of q8_0.blocks, which are few enough to stand here
OPERATIONS = ("repack", "dequantise", "quantise", "matvec", "integer", "product")


def shape(text: str) -> tuple[int, int]:
    """Argument type: '8192x2048'."""
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: rows and columns, as in 8192x2048")
    return groups.positive_count(found[1]), groups.positive_count(found[2])


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Of `bench.py q8_0`."""
    group = parser.add_argument_group("problems")
    some = {"type": shape, "nargs": "+", "metavar": "ROWSxCOLS"}
    words = "of the weights"
    add(group, "shapes", words, SHAPES, shown=" ".join(f"{r}x{c}" for r, c in SHAPES), **some)
    some = {"type": groups.positive_count, "nargs": "*"}
    words = "of matrix-vector products, up to 16, and of larger ones"
    add(group, "tokens", words, FEW + MANY, shown=" ".join(map(groups.spelt, FEW + MANY)), **some)
    some = {"choices": LAYOUTS, "nargs": "+", "shown": "both"}
    add(group, "layouts", "of the weights", LAYOUTS, **some)
    some = {"choices": OPERATIONS, "nargs": "+", "shown": "all"}
    add(group, "operations", "what is timed", OPERATIONS, **some)
    group = parser.add_argument_group("output")
    groups.add_file(group, "show", "tables of an earlier run's file, nothing is measured")
    groups.add_file(group, "json", "every figure, a line per row; an array if it ends in .json")
