"""`bench.py fmha`: interleaved times of our kernels and peers, or static figures from ptxas."""

from __future__ import annotations

import argparse
import dataclasses
import gc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, tools_found
from fmha.config import FP8, HEAD_DIMS
from fmha.launch import ARCHS
from lab.bench import fmha_tables
from lab.bench.fmha_peers import (
    INPUTS,
    OURS,
    PEERS,
    ROWS,
    Launch,
    Problem,
    compared,
    inputs_of,
    missing,
    of_recipe,
    sample_of,
    versions_of,
)
from lab.bench.fmha_tables import (
    PROBLEMS,
    TIMES,
    footnotes,
    markdown,
    ranked,
    summary,
)
from lab.bench.peers.run import values_of
from lab.bench.perform import Bench
from lab.flags.bench import OWN_DIMS
from lab.measure.timing import reason_of
from lab.measure.turns import Contestant, figures, flush_buffer, how, meter, take_turns
from lab.report.attention import draw_any
from lab.report.documents import Document
from lab.tools.groups import RECIPES
from lab.tools.place import why_not_here
from lab.tools.tables import show, table
from lab.verbs.dump import rows_of

# -- problems -------------------------------------------------------------------------------------


def problems_of(options: argparse.Namespace) -> Iterator[tuple[str, Problem]]:
    """(name of the set, problem) of --rows and of --shape, as --head-dim and --mask leave them."""
    for name in options.rows or ("anchor",) * (not options.shape):
        for problem in ROWS[name]:
            if not options.head_dim or problem.head_dim in options.head_dim:
                if not options.mask or problem.mask in options.mask:
                    yield name, _typed(problem, options)
    for head_dim in options.head_dim or OWN_DIMS:
        dims = (head_dim, dict(HEAD_DIMS)[head_dim])
        for size in options.shape or ():
            for causal in (False, True):
                problem = _typed(Problem(*size, *dims, causal=causal), options)
                wanted = not options.mask or problem.mask in options.mask
                if wanted and not (causal and problem.sq == 1):
                    yield "shape", problem  # a single row sees everything either way
            for problem in _recipes(Problem(*size, *dims), options):
                yield "shape", _typed(problem, options)


def _recipes(plain: Problem, options: argparse.Namespace) -> Iterator[Problem]:
    """The problem with each recipe of --mask; a tree has its own number of queries."""
    for mask in options.mask:
        name, _, number = mask.partition(":")
        if name == "tree":
            yield of_recipe(dataclasses.replace(plain, sq=int(number)), name)
        elif number or name in RECIPES:
            yield of_recipe(plain, mask)


def _typed(problem: Problem, options: argparse.Namespace) -> Problem:
    """The problem in the dtypes that the flags say, if they do."""
    if not options.dtype and not options.kv_dtype:
        return problem
    dtype = options.dtype or problem.dtype
    return dataclasses.replace(problem, dtype=dtype, kv_dtype=options.kv_dtype)


def check(problem: Problem) -> None:
    """ValueError for sizes that are no problem."""
    sizes = (problem.batch, problem.sq, problem.skv, problem.q_heads, problem.kv_heads)
    if min(sizes) < 1:
        raise ValueError(f"{problem}: sizes are at least 1")
    if problem.q_heads % problem.kv_heads:
        raise ValueError(
            f"{problem.q_heads} query heads: a multiple of {problem.kv_heads} KV heads"
        )


def check_wishes(options: argparse.Namespace, problems: Sequence[tuple[str, Problem]]) -> None:
    """ValueError for flags that leave nothing to be done."""
    if not options.timing and options.static is False:
        raise ValueError("--no-timing with --no-static: nothing is left")
    if options.timing and not problems and not options.static:
        asked = f"--head-dim {' '.join(map(str, options.head_dim))} --mask {' '.join(options.mask)}"
        raise ValueError(f"{asked}: no problem of these rows; --shape has sizes of its own")


# -- times ----------------------------------------------------------------------------------------


def launches_of(problem: Problem, rows: Sequence[dict]) -> dict[str, Launch]:
    """Launches of the peers that computed the problem and agree with the first that did, ours
    unless it is refused; the row of each says how far it is off, or why it is `refused`."""
    inputs, found, first = inputs_of(problem), {}, None
    dtype = problem.kv_dtype or problem.dtype
    plain = problem.window is None and not problem.sinks and not problem.recipe
    sample = sample_of(problem, inputs) if dtype == FP8 and plain else None
    for row in rows:
        name = row["peer"]
        try:
            launch = PEERS[name](problem, inputs)
            o = values_of(launch)
            first = first or (name, o)
            row |= compared(o, first[1], dtype, first[0], sample)
        except ImportError as error:
            row["refused"] = f"not installed: {error}"
        except Exception as refusal:  # noqa: BLE001  foreign libraries raise what they like
            row["refused"] = reason_of(refusal)
        else:
            found[name] = launch
    return found


def time_problem(problem: Problem, rows: list[dict], rounds: int, *, flush: bool) -> list[dict]:
    """The row of each peer, with its times or why it has none."""
    launches = launches_of(problem, rows)
    buffer, contestants = flush_buffer() if flush else None, {}
    by_name = {row["peer"]: row for row in rows}
    for name, launch in launches.items():
        try:
            contestants[name] = Contestant(launch, buffer)
        except RuntimeError as refusal:
            by_name[name]["refused"] = reason_of(refusal)
    gc.collect()
    for name, turns in take_turns(contestants, rounds).items():
        by_name[name] |= figures(turns)
        by_name[name]["tflops"] = problem.flop / by_name[name]["us"] * 1e-6
    return ranked(rows)


# -- the command ----------------------------------------------------------------------------------


def without_gpu(problems: Sequence[tuple[str, Problem]], peers: Sequence[str]) -> None:
    """Print why nothing is timed, which peers are missing, and which problems would be timed."""
    print(f"fmha is not timed: {why_not_here(ARCHS)}")
    print(f"peers that are not installed: {', '.join(missing(peers)) or 'none'}")
    rows = [{"rows": name, "problem": problem, "flop": problem.flop} for name, problem in problems]
    show(*table("would be timed", PROBLEMS, rows))


class Attention(Bench):
    """Attention beside its peers, and what ptxas made of it."""

    kind = "time"
    selects = ("peers",)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.peers = options.peers or [*PEERS]

    @property
    def wants_times(self) -> bool:
        return self.options.timing

    @property
    def wants_static(self) -> bool | None:
        return self.options.static

    def problems(self) -> list[tuple[str, Problem]]:
        found = list(problems_of(self.options))
        check_wishes(self.options, found)
        for _, problem in found:
            check(problem)
        return found

    def setting(self) -> dict[str, Any]:
        return {"inputs": INPUTS, **how(self.options.rounds, flush=self.options.flush)}

    def machine(self) -> dict[str, Any]:
        if OURS in self.peers and why_not_here(ARCHS):
            print(f"fmha is not timed: {why_not_here(ARCHS)}")
        found = {"cudnn": torch.backends.cudnn.version(), "clock_and_power": meter() or "unknown"}
        return {**found, "peers": versions_of(self.peers)}

    def rows(self, problem: tuple[str, Problem]) -> list[dict]:
        name, sizes = problem
        same = {"rows": name, "problem": str(sizes), **dataclasses.asdict(sizes)}
        rows = [{**same, "flop": sizes.flop, "peer": peer} for peer in self.peers]
        return time_problem(sizes, rows, self.options.rounds, flush=self.options.flush)

    def untimed(self, problems: Sequence[tuple[str, Problem]]) -> None:
        without_gpu(problems, self.peers)

    def static(self, problems: Sequence[tuple[str, Problem]]) -> list[dict]:
        if not tools_found():
            print(HOW_TO_GET_TOOLS)
            return []
        rows = rows_of(fmha_tables.grid(self.options), Console(stderr=True))
        show(*table("", fmha_tables.STATIC, fmha_tables.lines_of(rows)))
        timed = self.wants_times and torch.cuda.is_available()
        if self.options.plot and rows and not timed:
            fmha_tables.draw(self.options.plot, rows)
        return [{"kind": "static", **row} for row in rows]

    def show(self, rows: Sequence[dict]) -> None:
        show(*table(rows[0]["problem"], TIMES, rows))

    def tell(self, rows: Sequence[dict]) -> None:
        show(*summary(rows))
        for reason, number in footnotes(rows).items():
            print(f"[{number}] {reason}")

    def subject(self, row: Mapping[str, Any]) -> tuple[str, str]:
        return row["rows"], row["problem"]

    def has(self, row: Mapping[str, Any]) -> bool:
        return row["peer"] in self.peers

    def markdown(self, rows: Sequence[dict]) -> str:
        return markdown(rows)

    def draw(self, path: Path, document: Document) -> None:
        draw_any(path, document)


BENCH = Attention
