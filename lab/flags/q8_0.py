"""Flags of `q8_0`: which matrices, layouts, tokens and operations."""

from __future__ import annotations

import argparse
import re

from lab.tools import groups
from lab.tools.groups import add

# What a layer has: up or gate, down, and q, k and v together: rows, columns.
SHAPES = ((8192, 2048), (2048, 8192), (6144, 2048))
FEW, MANY = (1, 4, 16), (1024, 2048)
SMALL_SHAPES, SMALL_TOKENS = ((40, 128),), (1, 3, 17)  # where the emulator runs it
LAYOUTS = ("soa", "interleaved")  # of q8_0.blocks, which are few enough to stand here
DTYPES = ("bf16", "fp16", "fp32")
OPERATIONS = ("repack", "dequantise", "quantise", "matvec", "integer", "product")
HOPPER = ("numbers",)  # operations with kernels for Hopper alone


def shape(text: str) -> tuple[int, int]:
    """Argument type: '8192x2048'."""
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: expected rows and columns, such as 8192x2048")
    return groups.positive_count(found[1]), groups.positive_count(found[2])


def _add_problems(
    parser: argparse.ArgumentParser,
    shapes: tuple[tuple[int, int], ...],
    tokens: tuple[int, ...],
    what: str,
) -> argparse._ArgumentGroup:
    """Every operation on every matrix. what: becomes of it."""
    group = parser.add_argument_group("problems")
    some = {"type": shape, "nargs": "+", "metavar": "ROWSxCOLS"}
    words = "shapes of the weights"
    add(group, "shapes", words, shapes, shown=" ".join(f"{r}x{c}" for r, c in shapes), **some)
    some = {"type": groups.positive_count, "nargs": "*"}
    words = "tokens of matrix-vector products (up to 16), and of larger products"
    add(group, "tokens", words, tokens, shown=" ".join(map(groups.spelt, tokens)), **some)
    some = {"choices": LAYOUTS, "nargs": "+", "shown": "both"}
    add(group, "layouts", "layouts of the weights", LAYOUTS, **some)
    some = {"choices": OPERATIONS + HOPPER, "nargs": "+", "shown": "all but numbers"}
    add(group, "operations", what, OPERATIONS, **some)
    return group


def _add_kind(group: argparse._ArgumentGroup) -> None:
    add(group, "dtype", "dtype of numbers, x and results", DTYPES[0], choices=DTYPES)
    groups.switch(group, "bias", "add a bias to products")


def add_static(parser: argparse.ArgumentParser) -> None:
    """Flags of `explain.py q8_0` and `dump.py q8_0`."""
    _add_kind(
        _add_problems(parser, SHAPES[:1], (*FEW, MANY[-1]), "operations whose kernels are shown")
    )
    add(parser, "arch", "architecture of the kernels", groups.ARCHS[0], choices=groups.ALL_ARCHS)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Flags of `run.py q8_0`."""
    _add_kind(_add_problems(parser, SMALL_SHAPES, SMALL_TOKENS, "operations to run"))
    groups.add_run(parser, groups.ALL_ARCHS, seed="inputs")


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py q8_0`."""
    _add_problems(parser, SHAPES, FEW + MANY, "operations to time")
    group = parser.add_argument_group("output")
    groups.add_file(group, "show", "print the tables of an earlier run's file; measure nothing")
    groups.add_file(
        group, "json", "write every figure: one line per row, or an array if it ends in .json"
    )
