"""Flags that run scripts share: where it runs, in which order, how exact it is, who is told."""

from __future__ import annotations

import argparse
from pathlib import Path

from ptxemu.options import POLICIES

BACKENDS = ("auto", "cuda", "emulate")  # of kernelkit.launch, which imports torch


def positive(text: str) -> float:
    """Argument type: a number above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def add_backend_arguments(group: argparse._ArgumentGroup, *, seed: str) -> None:
    """--backend, --policy and --seed; seed: of what it is."""
    group.add_argument("--backend", choices=BACKENDS, default="auto", help="default: auto")
    group.add_argument("--policy", choices=POLICIES, default="round-robin", help="of the emulator")
    group.add_argument("--seed", type=int, default=0, help=seed)


def add_result_arguments(group: argparse._ArgumentGroup, *, limit: str) -> None:
    """--tolerance and --json; limit: what the factor scales."""
    group.add_argument(
        "--tolerance", type=positive, default=1.0, metavar="FACTOR", help=f"scales {limit}"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
