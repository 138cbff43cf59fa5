"""What `explain.py STEP` says: the kernels of a step, their configs, and plans if any."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from kernelkit.compile.compiler import collecting
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.plan_names import plan_of
from lab.cases.steps import Problem, problems_of
from lab.tools.common import describe
from lab.verbs.explain.plans import lines_of, parts_of, print_plan


def kernels_of(options: argparse.Namespace) -> list[tuple[Problem, list[KernelKey]]]:
    """Of every problem that the flags name, for --arch; ValueError for none."""
    found = []
    for problem in problems_of(
        options.family, options.steps, options.rows, options.hidden, options.names
    ):
        arguments = problem.draw(0, "cpu")
        with collecting() as keys:
            problem.peers[problem.ours](*arguments)
        arch = options.arch
        keys = [KernelKey(key.source, key.config, arch or key.arch) for key in keys]
        found.append((problem, list(dict.fromkeys(keys))))
    return found


def explain(options: argparse.Namespace) -> Iterator[str]:
    """Line by line."""
    for problem, keys in kernels_of(options):
        yield f"{problem}, {problem.nbytes:,} bytes"
        for key in keys:
            yield f"  {key.source} for {key.arch}: {describe(key.config)}"
            if found := plan_of(key):
                yield from lines_of(parts_of(*found))


def perform(options: argparse.Namespace) -> int:
    return print_plan(lambda: explain(options))
