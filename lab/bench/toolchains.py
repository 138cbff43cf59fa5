"""`bench.py toolchains`: the same kernels made by other versions of the compiler, side by side.

`--make FOLDER` compiles the kernels of every case with the DSL of this environment, and writes them
as `python -m kernelkit aot` does, with what became of each in `compiled.json`. Folders of several
environments are then compared on a GPU: a process for each loads its kernels, compares results with
the reference, and takes its times in turns with the others. The DSL is not needed there.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cycle_model.sass.tools import read
from kernelkit.compile import aot, store
from kernelkit.compile.artifact import Artifact
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.names import kernel_name
from lab.bench.toolchain_cases import CASES, Case
from lab.measure.timing import heading, reason_of
from lab.measure.turns import take_turns
from lab.report.toolchains import ARCH, COMPILED, TIMED, cases_table, matrix_table
from lab.tools.common import environment, read_rows, refuse, save_rows
from lab.tools.tables import markdown, show

MADE = "compiled.json"
# Chips that no kernel of ours is offered for: what is written for sm_100a is compiled for them.
UNOFFERED = {"sm_110a": "sm_100a", "sm_101a": "sm_100a"}
VERSION = re.compile(r"^\.version\s+([\d.]+)", re.MULTILINE)
FIGURES = ("registers", "stack", "spills", "instructions", "serialised", "ptxas")


# ---- making


def make(folder: Path, archs: Sequence[str]) -> list[dict[str, Any]]:
    """Compile the kernels of all cases into a folder; returns a row per kernel."""
    rows: list[dict[str, Any]] = []
    made: dict[KernelKey, Artifact | str] = {}
    for arch in archs:
        for case in CASES:
            for key in _keys(case, arch, rows):
                if key not in made:
                    made[key] = compiled(key)
                rows.append(row_of(case, key, made[key]))
            print(f"{arch} {case.name}", file=sys.stderr, flush=True)
        _write(folder, made, rows)
    return rows


def _write(
    folder: Path, made: Mapping[KernelKey, Artifact | str], rows: Sequence[Mapping[str, Any]]
) -> None:
    from kernelkit.compile.trace import toolchain

    good = [(k, a) for k, a in made.items() if isinstance(a, Artifact) and k.arch == ARCH]
    aot.write(folder, good, toolchain())
    document = {"toolchain": toolchain(), "rows": rows}
    (folder / MADE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _keys(case: Case, arch: str, rows: list[dict[str, Any]]) -> list[KernelKey]:
    """Keys of a case; a row where there is none."""
    try:
        found = case.keys(UNOFFERED.get(arch, arch))
    except NotImplementedError as refusal:
        rows.append(_about(case, arch) | {"unwritten": reason_of(refusal)})
        return []
    return [replace(key, arch=arch) for key in found]


def _about(case: Case, arch: str) -> dict[str, Any]:
    return {"kind": COMPILED, "family": case.family, "case": case.name, "arch": arch}


def compiled(key: KernelKey) -> Artifact | str:
    """The kernel, or why the compiler makes none."""
    from kernelkit.compile.trace import Traced

    given, kept = replace(key, arch=UNOFFERED.get(key.arch, key.arch)), store.from_environment()
    look_up = kept.kernel if kept else lambda _: None
    try:
        traced = Traced(given.host_function(), key.arch, look_up, kernel_name(key))
        artifact: Artifact = traced.artifact
        if kept and not traced.found:
            kept.put_kernel(traced.key, artifact)
        if not VERSION.search(artifact.ptx or ""):
            return "no PTX, and no error"
        return artifact if cubin_of(artifact) else "no cubin, and no error"
    except Exception as error:  # noqa: BLE001  the DSL raises what it likes
        return reason_of(error)


def cubin_of(artifact: Artifact) -> bytes:
    """Machine code of a kernel; empty where the compiler left none."""
    from kernelkit.compile.kernel import CompiledKernel

    return CompiledKernel(artifact).cubin


def row_of(case: Case, key: KernelKey, made: Artifact | str) -> dict[str, Any]:
    """What became of a kernel: its PTX version, and figures of its machine code."""
    row = _about(case, key.arch) | {"kernel": key.title()}
    if isinstance(made, str):
        return row | {"failed": made}
    cubin = cubin_of(made)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        figures = read(path)[0]
    found = VERSION.search(made.ptx)
    code = VERSION.sub("", made.ptx).encode()
    digests = {"code": _digest(code), "cubin": _digest(cubin)}
    about = {"ptx": found[1] if found else "", **digests}
    return row | about | {name: figures[name] for name in FIGURES}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


# ---- a process for each toolchain


def work(folder: str) -> int:
    """Serve the process that compares: lines of JSON in, lines of JSON out.

    {"prepare": n} checks case n and captures its graphs, {"sample": n} replays them n times and
    returns microseconds of a call, {"drop": 0} forgets the case.
    """
    from kernelkit.tune.choices import forcing
    from kernelkit.tune.stopwatch import replay

    aot.load(folder, trust=True)
    sys.modules["cutlass"] = None  # type: ignore[assignment]
    answer, sample = sys.stdout, None
    sys.stdout = sys.stderr
    for line in sys.stdin:
        (verb, number), *_ = json.loads(line).items()
        said: dict[str, Any] = {}
        if verb == "prepare":
            try:
                with forcing("", {}):  # options that were measured here are of other kernels
                    sample = replay(CASES[number].launches())
            except Exception as error:  # noqa: BLE001  the case is refused, the others go on
                said = {"failed": f"{type(error).__name__}: {str(error)[:600]}"}
        elif verb == "sample" and sample:
            said = {"us": [sample() for _ in range(number)]}
        elif verb == "drop":
            sample = None
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        print(json.dumps(said), file=answer, flush=True)
    return 0


class Worker:
    """A process that runs the kernels of one folder."""

    def __init__(self, folder: Path) -> None:
        variables = environment() | {store.VARIABLE: "off"}
        variables.pop(aot.VARIABLE, None)
        command = [sys.executable, "-m", "lab.bench.toolchains", str(folder)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, text=True)

    def ask(self, verb: str, number: int = 0) -> None:
        """Send a request."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({verb: number}), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Wait for the answer of the last request; of a process that died that it did."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"failed": f"exit code {self.process.wait()}"}

    def end(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait(60)


# ---- comparing


def compare(folders: Sequence[Path], rounds: int, turn: int) -> Iterator[dict[str, Any]]:
    """Yield a row per case and folder: microseconds of a call, or why it failed."""
    workers = {name_of(folder): Worker(folder) for folder in folders}
    for place, case in enumerate(CASES):
        for worker in workers.values():
            worker.ask("prepare", place)
        said = {name: worker.answer() for name, worker in workers.items()}
        right = {name: workers[name] for name in said if not said[name]}

        def turn_of(worker: Worker) -> list[float]:
            worker.ask("sample", turn)
            return worker.answer().get("us", [])

        turns = {name: lambda worker=worker: turn_of(worker) for name, worker in right.items()}
        taken = take_turns(turns, rounds)
        for name in workers:
            row = {"kind": TIMED, "family": case.family, "case": case.name, "toolchain": name}
            yield row | (figures(taken[name]) if name in right else said[name])
        for worker in workers.values():
            worker.ask("drop")
            worker.answer()
    for worker in workers.values():
        worker.end()


def figures(turns: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The median over turns of their medians, and the quartiles' distance over it."""
    medians = [statistics.median(turn) for turn in turns if turn]
    if len(medians) < 2:
        return {"failed": "no samples"}
    low, middle, high = statistics.quantiles(medians, n=4)
    return {"us": middle, "spread": (high - low) / middle, "samples_us": medians}


def name_of(folder: Path) -> str:
    """'4.8.1 cu13': version of the DSL, and of the libraries that are installed with it."""
    return toolchain_name(aot.read_manifest(folder)["toolchain"])


def toolchain_name(versions: Mapping[str, str]) -> str:
    """Return '4.8.1 cu13' of the versions in a manifest."""
    libraries = [name[-4:] for name in versions if name[-4:] in ("cu12", "cu13")]
    return f"{versions['nvidia-cutlass-dsl']} {' '.join(libraries)}"


# ---- the command


def static_rows(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Rows of what was compiled, of all folders."""
    found = []
    for folder in folders:
        document = json.loads((folder / MADE).read_text(encoding="utf-8"))
        name = toolchain_name(document["toolchain"])
        found += [{**row, "toolchain": name} for row in document["rows"]]
    return found


def perform(options: argparse.Namespace) -> int:
    """Return the exit code: 1 where a result is wrong or a case failed."""
    if options.make:
        rows = make(options.make, options.arch)
        failed = [row for row in rows if "failed" in row]
        for row in failed:
            print(f"{row['arch']} {row['case']}, {row['kernel']}: {row['failed']}")
        print(f"{len(rows)} kernels, {len(failed)} not compiled, in {options.make}")
        return 0
    if options.show:
        head, *rows = read_rows(options.show)
        print_tables(head, rows, as_markdown=options.markdown)
        return 0
    if not options.folders:
        return refuse("no folders: --make FOLDER in each environment first")
    head, rows = heading(rounds=options.rounds, turn=options.turn), static_rows(options.folders)
    if options.times:
        head, *timed = read_rows(options.times)
        rows += [row for row in timed if row["kind"] == TIMED]
    elif torch.cuda.is_available():
        for row in compare(options.folders, options.rounds, options.turn):
            print(json.dumps(row | {"samples_us": None}), flush=True)
            rows.append(row)
            if options.json:
                save_rows(options.json, [head, *rows])
    if options.json:
        save_rows(options.json, [head, *rows])
    print_tables(head, rows, as_markdown=options.markdown)
    return int(any("failed" in row for row in rows if row["kind"] == TIMED))


def print_tables(
    head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], *, as_markdown: bool
) -> None:
    """The matrix of toolchains, then figures of each case."""
    for title, heads, lines in (matrix_table(rows), cases_table(rows)):
        if as_markdown:
            print(f"{title}:\n\n{markdown(heads, lines)}\n")
        else:
            show(title, heads, lines)
    print(f"{head.get('gpu', {}).get('name', 'no GPU')}, {head['date']}")


if __name__ == "__main__":
    os.environ.setdefault(store.VARIABLE, "off")
    sys.exit(work(sys.argv[1]))
