"""Checks inside the wheel's environment: `python -I inside.py VERSION PACKAGES JOBS FILE...`.

Nothing but the standard library and what is installed there can be imported here. Each file is an
example and runs in a process of its own, forked after torch and the DSL were imported once.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import distribution
from pathlib import Path
from textwrap import indent

ENTRY_POINTS = {  # groups, by distribution
    "blackwell-kernels": {"vllm.general_plugins", "sglang.srt.plugins"},
    "ptxemu": {"pytest11"},
}
SLOW = ("torch", "cutlass.cute")  # imported once for all examples; nothing of ours
LIMIT = 300  # seconds of an example
FAILED = "FAILED"


def report(name: str, began: float, problem: str = "") -> str:
    """A line on what was tried, and behind it `problem`, which is empty where nothing is wrong.

    began: of the monotonic clock.
    """
    line = f"{FAILED if problem else 'ok':7}{time.monotonic() - began:5.1f} s  {name}\n"
    return line + (indent(problem.rstrip(), "    ") + "\n" if problem else "")


def package_problems(version: str, packages: Sequence[str]) -> Iterator[str]:
    """Yield problems of the packages: where they come from, their version, their marker."""
    for name in packages:
        module = importlib.import_module(name)
        folder = Path(str(module.__file__)).parent
        if Path(sys.prefix) not in folder.parents:
            yield f"{name} comes from {folder}"
        if module.__version__ != version:
            yield f"{name}.__version__ is {module.__version__}, the wheels' {version}"
        if not (folder / "py.typed").exists():
            yield f"{name} has no py.typed"


def entry_point_problems() -> Iterator[str]:
    """Yield unexpected groups of entry points; a point that does not load raises."""
    for name, groups in ENTRY_POINTS.items():
        points = distribution(name).entry_points
        for point in points:
            point.load()
        if points.groups != groups:
            yield f"entry points of {name} in {sorted(points.groups)}, not in {sorted(groups)}"


def tried(name: str, check: Callable[[], Iterable[str]]) -> str:
    """The report of what a check says, or raises."""
    began = time.monotonic()
    try:
        problem = "\n".join(check())
    except Exception:  # noqa: BLE001  whatever it is, it is the report
        problem = traceback.format_exc()
    return report(name, began, problem)


def start(example: Path) -> int:
    """Run it in a process of its own, what it prints in a file beside it; returns the process."""
    process = os.fork()
    if process:
        return process
    signal.alarm(LIMIT)
    log = os.open(example.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        runpy.run_path(str(example), run_name="__main__")
        code = 0
    except BaseException:  # noqa: BLE001  SystemExit, too: this process ends here and nowhere else
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def run_all(examples: Sequence[Path], jobs: int) -> Iterator[str]:
    """Run them, so many at a time; the report of each when it ends."""
    waiting, running = list(examples), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            example = waiting.pop(0)
            running[start(example)] = example, time.monotonic()
        process, status = os.wait()
        example, began = running.pop(process)
        code = os.waitstatus_to_exitcode(status)
        ending = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        log = example.with_suffix(".log").read_text(encoding="utf-8")
        yield report(f"example {example.stem}", began, f"{ending}\n{log}" if code else "")


def main(version: str, packages: str, jobs: str, *examples: str) -> None:
    """packages: their names, with commas between."""
    names = packages.split(",")
    print(tried("version, place and type mark", lambda: package_problems(version, names)), end="")
    print(tried("entry points", entry_point_problems), end="", flush=True)
    for name in SLOW:
        importlib.import_module(name)
    for text in run_all([Path(example) for example in examples], int(jobs)):
        print(text, end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
