"""`soak.py kvcache`: runs random operations on small caches and on the naive model."""

from __future__ import annotations

import argparse
import inspect
import json
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from time import perf_counter

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvcache.books.checkpoints import Policy
from kvcache.books.slot_pool import Sizes
from lab.soak.driver import Driver, Operation
from lab.soak.small_caches import CASES, Case
from lab.tools.common import progress_bar, refuse, write_json

WEIGHTS = {
    "admit": 7,
    "append": 20,
    "append_unknown": 10,
    "resolve": 8,
    "rollback": 9,
    "fork": 4,
    "free": 6,
    "preempt": 1.5,
    "resume": 3,
    "offload": 2,
    "fetch": 3,
    "clear": 0.1,
    "abandon": 0.6,
    "discard": 0.6,
    "over": 13,
    "report": 4,
    "poll": 1,
    "misuse": 3,
}
HIGHEST = 1 << 16  # of an operation's numbers
DEEP = 64  # checkpoints and all requests are looked at after so many operations, at most


@cache
def takes(operation: str) -> int:
    """Return how many numbers an operation needs."""
    return len(inspect.signature(getattr(Driver, operation)).parameters) - 1  # without self


def drawn(seed: int, operations: int) -> list[Operation]:
    """Return `operations` operations, always the same ones for a seed."""
    source = random.Random(seed)
    kinds = source.choices(list(WEIGHTS), list(WEIGHTS.values()), k=operations)
    return [(kind, tuple(source.randrange(HIGHEST) for _ in range(takes(kind)))) for kind in kinds]


def case_of(name: str, seed: int) -> Case:
    """A case; for most seeds with pools and a policy of their own."""
    source = random.Random(seed)
    if seed % 4 == 0:
        return CASES[name]
    sizes = Sizes(
        blocks=source.randint(10, 48),
        states=source.randint(1, 7),
        checkpoints=source.randint(0, 6),
        host_blocks=source.randint(0, 16),
        host_states=source.randint(0, 3),
    )
    every = source.choice([None, 1, 2, 3])
    policy = Policy(every, prompt_end=source.random() < 0.7, rolling=source.random() < 0.7)
    return replace(CASES[name], sizes=sizes, policy=policy)


@dataclass(frozen=True)
class Failure:
    """An error, and the operations that led to it."""

    error: str
    trace: str
    log: list[Operation]


@dataclass(frozen=True)
class Run:
    """A life of a cache."""

    case: str
    seed: int
    operations: int
    counts: Counter[str]
    seconds: float
    failure: Failure | None = None


def run(case: str, seed: int, operations: int, every: int = 1) -> Run:
    """Random operations on a fresh cache; contents are compared after `every` of them."""
    begun = perf_counter()
    driver = Driver(case_of(case, seed), every=every)
    failure = None
    try:
        for index, (operation, numbers) in enumerate(drawn(seed, operations)):
            driver.run(operation, *numbers)
            if index % DEEP == 0:
                driver.ledger.deep()
        driver.finish()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is to be shrunk
        failure = Failure(repr(error), traceback.format_exc(), driver.log)
    return Run(case, seed, len(driver.log), driver.counts, perf_counter() - begun, failure)


def fails(case: str, seed: int, log: Sequence[Operation]) -> str:
    """Return the error when a log is replayed on the cache of that seed, "" for none."""
    driver = Driver(case_of(case, seed))
    try:
        for operation, numbers in log:
            driver.run(operation, *numbers)
        driver.finish()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return type(error).__name__
    return ""


def shrunk(
    log: Sequence[Operation], broken: Callable[[Sequence[Operation]], bool]
) -> list[Operation]:
    """Operations left out while what is left is still `broken`: half of them at a time, at last
    one by one; then their numbers made small."""
    log, size = list(log), len(log) // 2
    while size:
        at = 0
        while at < len(log):
            without = log[:at] + log[at + size :]
            if broken(without):
                log = without
            else:
                at += size
        size = size // 2 if size > 1 or len(log) > 100 else 0
    for at, (operation, numbers) in enumerate(log):
        for place, number in enumerate(numbers):
            for smaller in (0, 1, 2, number % 8, number % 40):
                changed = (*numbers[:place], smaller, *numbers[place + 1 :])
                shorter = [*log[:at], (operation, changed), *log[at + 1 :]]
                if smaller < number and broken(shorter):
                    log, numbers = shorter, changed
                    break
    return log


LIFE = 10_000  # operations of one cache, from empty to empty
FAILED = 1  # exit code
FAILURE = Path("out/soak_failure.json")


def lives(cases: list[str], operations: int, seed: int) -> Iterator[tuple[str, int, int]]:
    """(case, seed, operations) of each cache; the cases take turns."""
    index = 0
    while operations > 0:
        yield cases[index % len(cases)], seed + index // len(cases), min(LIFE, operations)
        operations -= LIFE
        index += 1


def finished(options: argparse.Namespace, cases: list[str]) -> Iterator[Run]:
    """Every cache's run as it ends; a failure is the last one."""
    todo = lives(cases, options.operations, options.seed)
    with ProcessPoolExecutor(options.jobs) as pool:
        running: set[Future[Run]] = set()
        while True:
            for life in todo:
                running.add(pool.submit(run, *life, options.every))
                if len(running) > options.jobs:
                    break
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
                if future.result().failure:
                    pool.shutdown(cancel_futures=True)
                    return


def table(runs: list[Run], seconds: float) -> Table:
    """Return a table of the operations done and refused, and of events on the way."""
    counts = sum((one.counts for one in runs), Counter())
    total = sum(one.operations for one in runs)
    shown = Table(
        "operations", "", "refused", "", "on the way", "",
        title=f"{total:,} operations on {len(runs)} caches, {seconds:.0f} s, "
        f"{total / seconds:,.0f} operations/s",
        box=SIMPLE_HEAD,
    )  # fmt: skip
    for place in (1, 3, 5):
        shown.columns[place].justify = "right"
    refused = {n[9:]: c for n, c in counts.items() if n.startswith("refused: ")}
    other = {n: c for n, c in counts.items() if n not in WEIGHTS and not n.startswith("refused")}
    columns = [
        [(name.replace("_", " "), f"{part[name]:,}") for name in sorted(part, key=part.get)[::-1]]
        for part in ({name: counts[name] for name in WEIGHTS}, refused, other)
    ]
    for row in range(max(map(len, columns))):
        cells = [column[row] if row < len(column) else ("", "") for column in columns]
        shown.add_row(*(text for cell in cells for text in cell))
    return shown


def document(runs: list[Run], seconds: float, options: argparse.Namespace) -> dict:
    """The figures, by case, too."""
    cases = {}
    for one in runs:
        case = cases.setdefault(one.case, {"operations": 0, "seconds": 0.0, "counts": Counter()})
        case["operations"] += one.operations
        case["seconds"] += one.seconds
        case["counts"] += one.counts
    return {
        "operations": sum(one.operations for one in runs),
        "seconds": seconds,
        "seed": options.seed,
        "every": options.every,
        "counts": sum((one.counts for one in runs), Counter()),
        "cases": cases,
    }


def report(console: Console, failed: Run) -> int:
    """Shrink a failure, store it and say how it looks."""
    failure = failed.failure
    console.print(failure.trace, markup=False, highlight=False)
    kind, log = fails(failed.case, failed.seed, failure.log), failure.log
    if kind:
        with console.status("making it short"):
            log = shrunk(log, lambda shorter: fails(failed.case, failed.seed, shorter) == kind)
    else:
        console.print("A replay with a full comparison after every operation does not fail.")
    stored = {"case": failed.case, "seed": failed.seed, "error": failure.error, "log": log}
    write_json(FAILURE, stored)
    console.print(f"{failed.case}, seed {failed.seed}: {failure.error}", markup=False)
    for operation, numbers in log[:40]:
        console.print(f"    {operation}{numbers}", markup=False, highlight=False)
    console.print(f"{len(log)} operations, stored in {FAILURE}")
    return FAILED


def replay(console: Console, path: Path) -> int:
    """Run the operations of a stored failure."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        log = [(operation, tuple(numbers)) for operation, numbers in stored["log"]]
        case, seed = stored["case"], int(stored["seed"])
    except (ValueError, TypeError, KeyError) as error:
        return refuse(f"--replay {path}: no failure that soak.py stored ({error!r})")
    if case not in CASES:
        return refuse(f"--replay {path}: no case {case!r}; there are {', '.join(CASES)}")
    kind = fails(case, seed, log)
    console.print(f"{len(log)} operations on {case}: {kind or 'nothing fails'}")
    return FAILED if kind else 0


def perform(options: argparse.Namespace) -> int:
    """Do what the flags request; return the exit code."""
    console = Console()
    if options.replay:
        return replay(console, options.replay)
    wanted = options.layout or [""]
    cases = [name for name in CASES if any(text in name for text in wanted)]
    if not cases:
        return refuse(f"no case has {wanted} in its name; there are {', '.join(CASES)}")
    if options.operations < 1 or options.every < 1 or options.jobs < 1:
        return refuse("--operations, --every and --jobs are at least 1")
    begun, runs = time.perf_counter(), []
    with progress_bar(console) as progress:
        task = progress.add_task("operations", total=options.operations)
        for one in finished(options, cases):
            runs.append(one)
            progress.update(task, advance=one.operations, description=one.case)
    if runs[-1].failure:
        return report(console, runs[-1])
    seconds = time.perf_counter() - begun
    console.print(table(runs, seconds))
    if options.json:
        write_json(options.json, document(runs, seconds, options))
    return 0
