"""`python -m ptxemu dump`: PTX, machine code and launch shapes of all that a script launches."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ptxemu.commands import subject as subjects
from ptxemu.commands.machine_code import add_machine_code
from ptxemu.commands.subject import Progress
from ptxemu.host.command_line import add_inspect_arguments, source_lines
from ptxemu.host.patching import environment
from ptxemu.options import POLICIES
from ptxemu.schedules import Schedule
from ptxemu.watch import watched

ABOUT = f"""\
Write every kernel that a script launches into a folder:
  - its PTX, before the kernel is executed;
  - its machine code (cubin), if the DSL makes it in this run or `ptxas` is found;
  - its SASS, if `nvdisasm` is found (`pip install nvidia-cuda-nvdisasm`);
  - launches.json: entry, grid, block, cluster, dynamic shared memory and sizes of parameters of
    each launch, in order;
  - with --dump and --at: memory and registers at a line of Python.

{subjects.PROTOCOL}

{subjects.EXIT_CODES}"""
_LONGEST = 60  # characters of an entry's name in that of a file


@dataclass
class Kernel:
    """An entry of a module, and the files written for it."""

    entry: str
    ptx: Path
    files: list[str] = field(default_factory=list)
    launches: int = 0


class Folder:
    """Folder to which launches are written as they occur."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kernels: dict[tuple[str, str], Kernel] = {}
        self.launches: list[dict[str, Any]] = []
        path.mkdir(parents=True, exist_ok=True)

    def add(self, text: str, entry: str, shape: dict[str, Any]) -> None:
        """Add a launch, before it is executed."""
        kernel = self.kernels.get((text, entry))
        if kernel is None:
            name = re.sub(r"[^\w.]+", "_", entry)[:_LONGEST]
            path = self.path / f"{len(self.kernels):02}_{name}.ptx"
            path.write_text(text, encoding="utf-8")
            kernel = self.kernels[text, entry] = Kernel(entry, path, [path.name])
        kernel.launches += 1
        self.launches.append({"entry": entry, "ptx": kernel.ptx.name, **shape})
        self.write()

    def write(self) -> None:
        """launches.json, with all that is known."""
        kernels = [
            {"entry": k.entry, "launches": k.launches, "files": k.files}
            for k in self.kernels.values()
        ]
        found = {"kernels": kernels, "launches": self.launches}
        text = json.dumps(found, indent=1) + "\n"
        (self.path / "launches.json").write_text(text, encoding="utf-8")

    def add_machine_code(self, cubins: Path) -> None:
        """The cubin of each kernel, which the DSL left in `cubins` or ptxas makes; SASS of it."""
        codes = [(path, path.read_bytes()) for path in sorted(cubins.rglob("*.cubin"))]
        for kernel in self.kernels.values():
            kernel.files += add_machine_code(kernel.ptx, kernel.entry, codes)
        self.write()

    def table(self) -> str:
        """Kernels with their shapes and files."""
        lines = []
        for kernel in self.kernels.values():
            shapes = [x for x in self.launches if x["ptx"] == kernel.ptx.name]
            lines.append(f"kernel {kernel.entry}")
            told = dict.fromkeys(
                f"grid {x['grid']}, block {x['block']}, cluster {x['cluster']}, "
                f"{x['smem_bytes']} bytes of dynamic shared memory"
                for x in shapes
            )
            lines += [f"  {text}" for text in told]
            times = "once" if kernel.launches == 1 else f"{kernel.launches} times"
            lines.append(f"  launched {times}; {', '.join(kernel.files)}")
        return "\n".join(lines)


def main(words: list[str] | None, program: str | None = None) -> int:
    """Run the subject once and write; returns the exit code."""
    parser = arguments_of(program)
    options = subjects.parse(parser, words)

    from ptxemu.host.emulator import Emulator
    from ptxemu.host.gpu_machine import machine_with_gpu

    if options.dump_dir == parser.get_default("dump_dir"):
        options.dump_dir = str(options.out)
    looking = subjects.looking_inside(parser, options)
    folder = Folder(options.out)
    changes = {
        "policy": options.policy,
        "seed": options.seed,
        "limit": subjects.limit_of(options),
        "progress": Progress(),
    }
    with tempfile.TemporaryDirectory(prefix="ptxemu-") as kept:
        with (
            source_lines(),
            environment(_keeping_machine_code(kept)),
            machine_with_gpu(Emulator(), options.gpu),
            watched(**changes),
            looking,
            _written(folder, execute=not options.no_run),
        ):
            try:
                subject = subjects.subject_of(options)
            except subjects.Refused as error:
                parser.error(str(error))
            schedule = Schedule(options.policy, options.seed)
            failure = subjects.failure_of(subject, schedule, quiet=options.no_run)
        folder.add_machine_code(Path(os.environ.get("CUTE_DSL_DUMP_DIR", kept)))
    if not folder.kernels:
        print("nothing was launched", file=sys.stderr)
        return subjects.REFUSED
    print(folder.table())
    print(f"in {options.out}")
    if failure:
        why = ", which may be because nothing was executed" * options.no_run
        print(f"failed: {failure}{why}", file=sys.stderr)
    return subjects.WRONG if failure and not options.no_run else subjects.RIGHT


def arguments_of(program: str | None) -> argparse.ArgumentParser:
    parser = subjects.parser_of(program, ABOUT)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("ptxemu_dump"),
        metavar="FOLDER",
        help="where to write (default ptxemu_dump)",
    )
    parser.add_argument(
        "--no-run",
        action="store_true",
        help="execute no kernel: fast, but the script's results are wrong",
    )
    parser.add_argument("--policy", choices=POLICIES, default=POLICIES[0], help="schedule of warps")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random and adversarial policies"
    )
    subjects.add_limit(parser, 600.0)
    add_inspect_arguments(parser)
    return parser


def _keeping_machine_code(folder: str) -> dict[str, str]:
    """Settings of the DSL by which it leaves cubins in a folder, where the user names none."""
    values = {}
    for prefix in ("CUTE_DSL", "CUTE_EXPERIMENTAL_DSL"):
        kept = {*filter(None, os.environ.get(f"{prefix}_KEEP", "").split(",")), "ptx", "cubin"}
        values[f"{prefix}_KEEP"] = ",".join(sorted(kept))
        values[f"{prefix}_DUMP_DIR"] = os.environ.get(f"{prefix}_DUMP_DIR", folder)
    return values


@contextmanager
def _written(folder: Folder, *, execute: bool) -> Iterator[None]:
    """Within the block every launch goes to the folder first."""
    from ptxemu.module import launching
    from ptxemu.report import LaunchReport

    def through(launch: Callable[..., LaunchReport], module: Any) -> Callable[..., LaunchReport]:
        def run(entry: str | None = None, **given: Any) -> LaunchReport:
            name = module.entry(entry).name
            grid, block, cluster = (
                # None where a launch names no cluster.
                _dim3(given.get(what) or (1,))
                for what in ("grid", "block", "cluster")
            )
            shape = {
                "grid": grid,
                "block": block,
                "cluster": cluster,
                "smem_bytes": given.get("smem_bytes", 0),
                "parameter_bytes": [len(data) for data in given.get("params", ())],
            }
            folder.add(module.text, name, shape)
            if execute:
                return launch(module, entry, **given)
            return LaunchReport(name, grid, block, cluster)

        return run

    with launching(through):
        yield


def _dim3(dims: Any) -> tuple[int, int, int]:
    x, y, z = [*map(int, dims), 1, 1][:3]
    return x, y, z
