"""`bench.py fmha`: interleaved times of our kernels and peers, or static figures from ptxas."""

from __future__ import annotations

import argparse
import dataclasses
import gc
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, tools_found
from fmha.config import HEAD_DIMS
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
)
from lab.bench.fmha_tables import (
    PROBLEMS,
    TIMES,
    footnotes,
    markdown,
    noted,
    ranked,
    summary,
)
from lab.flags.bench import OWN_DIMS
from lab.measure.timing import heading, reason_of, setting
from lab.measure.turns import HOW, Contestant, figures, flush_buffer, meter, take_turns
from lab.report.attention import draw_any as draw
from lab.report.documents import measured
from lab.tools.common import progress_bar, read_rows, refuse, save_rows
from lab.tools.place import why_not_here
from lab.tools.tables import show, table
from lab.verbs.dump import rows_of

# -- problems -------------------------------------------------------------------------------------


def problems_of(options: argparse.Namespace) -> Iterator[tuple[str, Problem]]:
    """(name of the set, problem) of --rows and of --shape, as --head-dim and --mask leave them."""
    for name in options.rows or ("anchor",) * (not options.shape):
        for problem in ROWS[name]:
            if not options.head_dim or problem.head_dim in options.head_dim:
                if problem.mask in options.mask:
                    yield name, _typed(problem, options)
    for head_dim in options.head_dim or OWN_DIMS:
        dims = (head_dim, dict(HEAD_DIMS)[head_dim])
        for size in options.shape or ():
            for causal in (False, True):
                problem = _typed(Problem(*size, *dims, causal=causal), options)
                if problem.mask in options.mask and not (causal and problem.sq == 1):
                    yield "shape", problem  # a single row sees everything either way


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
    if options.markdown:
        raise ValueError("--markdown without --show: it is of the file of an earlier run")
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
    for row in rows:
        name = row["peer"]
        try:
            launch = PEERS[name](problem, inputs)
            o = launch()
            first = first or (name, o)
            row |= compared(o, first[1], problem.kv_dtype or problem.dtype, first[0])
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


def time_all(
    options: argparse.Namespace, problems: Sequence[tuple[str, Problem]], head: dict
) -> list[dict]:
    """Rows of all problems; whoever stops a run keeps in --json what there is."""
    rows: list[dict] = []
    console = Console(stderr=True)
    with progress_bar(console) as bar:
        task = bar.add_task("", total=len(problems))
        for name, problem in problems:
            bar.update(task, description=str(problem))
            gc.collect()
            torch.cuda.empty_cache()
            same = {"kind": "time", "rows": name, "problem": str(problem)}
            same |= {**dataclasses.asdict(problem), "flop": problem.flop}
            blank = [{**same, "peer": peer} for peer in options.peers or PEERS]
            rows += time_problem(problem, blank, options.rounds, flush=options.flush)
            if options.json:
                save_rows(options.json, [head, *rows])
            bar.advance(task)
    return rows


# -- told -----------------------------------------------------------------------------------------


def tell(rows: Sequence[dict], title: str) -> None:
    """Every figure, then a line per problem, then why there are holes."""
    notes = footnotes(rows)
    lines = [noted(row, notes) for row in rows]
    for row, before in zip(lines[1:], rows, strict=False):
        row |= {"problem": ""} if row["problem"] == before["problem"] else {}
    show(*table(title, TIMES, lines))
    show(*summary(rows))
    for reason, number in notes.items():
        print(f"[{number}] {reason}")


def title_of(head: dict) -> str:
    gpu = head.get("gpu", {}).get("name", "no GPU")
    return f"{gpu}, {head['date']}, {head['order']}"


def show_again(options: argparse.Namespace) -> int:
    """Tables of the file of an earlier run."""
    others = sorted(options.given - {"show", "peers", "markdown", "plot"})
    if others:
        return refuse(f"--show with --{others[0].replace('_', '-')}: a file is shown as it is")
    head, *found = read_rows(options.show)
    rows = [row for row in found if row["kind"] == "time"]
    rows = [row for row in rows if not options.peers or row["peer"] in options.peers]
    if not rows:
        return refuse(f"{options.show}: no times in it of {', '.join(options.peers or PEERS)}")
    if options.markdown:
        print(markdown(rows))
    else:
        tell(rows, title_of(head))
    if options.plot:
        draw(options.plot, measured(head, rows))
    return 0


def without_gpu(problems: Sequence[tuple[str, Problem]], peers: Sequence[str]) -> None:
    """Print why nothing is timed, which peers are missing, and which problems would be timed."""
    print(f"fmha is not timed: {why_not_here(ARCHS)}")
    print(f"peers that are not installed: {', '.join(missing(peers)) or 'none'}")
    rows = [{"rows": name, "problem": problem, "flop": problem.flop} for name, problem in problems]
    show(*table("would be timed", PROBLEMS, rows))


def static_rows(options: argparse.Namespace) -> list[dict]:
    """Show a table of what ptxas made of our kernels, and return its rows."""
    if not tools_found():
        print(HOW_TO_GET_TOOLS)
        return []
    rows = rows_of(fmha_tables.grid(options), Console(stderr=True))
    show(*table("", fmha_tables.STATIC, fmha_tables.lines_of(rows)))
    return [{"kind": "static", **row} for row in rows]


def perform(options: argparse.Namespace) -> int:
    if options.show:
        return show_again(options)
    problems, peers = list(problems_of(options)), options.peers or [*PEERS]
    try:
        check_wishes(options, problems)
        for _, problem in problems:
            check(problem)
    except ValueError as error:
        return refuse(error)
    here = torch.cuda.is_available()
    order = f"{options.rounds} rounds, {'cold L2' if options.flush else 'L2 as it is'}"
    head = heading(inputs=INPUTS, timing=HOW, order=order, flush=options.flush)
    rows: list[dict] = []
    if options.timing and here:
        head |= {"cudnn": torch.backends.cudnn.version(), "clock_and_power": meter() or "unknown"}
        if OURS in peers and why_not_here(ARCHS):
            print(f"fmha is not timed: {why_not_here(ARCHS)}")
        rows = time_all(options, problems, head)
        tell(rows, title_of(head))
        if options.plot and rows:
            draw(options.plot, measured(head, rows))
        rows.append({"kind": "after", "gpu": setting().get("gpu")})
    elif options.timing:
        without_gpu(problems, peers)
    wanted = options.static if options.static is not None else not rows
    found = static_rows(options) if wanted else []
    if options.json:
        save_rows(options.json, [head, *found, *rows])
    if options.plot and found and not rows:
        fmha_tables.draw(options.plot, found)
    return 0
