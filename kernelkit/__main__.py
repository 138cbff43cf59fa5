"""Manage compiled kernels: their cache on disk, kernels compiled ahead of time, options measured on
this GPU, and a report of what is installed."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kernelkit.compile import aot, store
from kernelkit.compile.arch import ARCHITECTURES
from kernelkit.compile.artifact import Artifact
from kernelkit.compile.keys import KernelKey
from kernelkit.tune import command as tune_command

EXAMPLES = f"""examples:
  python -m kernelkit cache list
  {aot.RECORD_VARIABLE}=run.jsonl python my_model.py    # records every kernel that a run compiles
  python -m kernelkit cache warm --for run.jsonl
  python -m kernelkit aot --for run.jsonl --out kernels
  {aot.VARIABLE}=kernels python my_model.py             # needs no DSL
  python -m kernelkit tune decode --shape batch=4 keys=8192
  python -m kernelkit doctor

environment:
  {store.VARIABLE}: the folder of the cache, or 'off'
  {store.LIMIT_VARIABLE}: limit of its size, {store.DEFAULT_LIMIT} by default
  {aot.VARIABLE}: folders of kernels compiled ahead of time, separated by colons; FOLDER@DIGEST
    uses a folder only if it has that digest
  {store.SHARED_VARIABLE}: folders that other users may write, separated by colons; their
    kernels are executed nevertheless
  {aot.RECORD_VARIABLE}: a file to record the kernels of a run in, one per line
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 where something is damaged or failed."""
    given = _parser().parse_args(arguments)
    try:
        return given.run(given)
    except (aot.AotError, ValueError, NotImplementedError, OSError) as error:
        print(f"kernelkit: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernelkit",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    cache = commands.add_parser("cache", help="list, clear, verify or warm the cache on disk")
    actions = cache.add_subparsers(required=True, metavar="action")
    _command(actions, "list", _list, "list its kernels, the last used first").add_argument(
        "--json", action="store_true", help="as JSON"
    )
    _command(actions, "clear", _clear, "remove all files")
    _command(actions, "verify", _verify, "read every file, and remove damaged ones")
    _with_keys(_command(actions, "warm", _warm, "load or compile the kernels of a record"))
    ahead = _command(
        commands, "aot", _aot, "compile kernels into a folder, for processes without the DSL"
    )
    _with_keys(ahead)
    ahead.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    _command(commands, "show", _show, "list the kernels of such a folder").add_argument(
        "folder", type=Path
    )
    tune_command.add_arguments(
        _command(commands, "tune", tune_command.run, "measure which options suit a shape")
    )
    _command(
        commands, "doctor", _doctor, "print GPUs, versions, caches, and what runs where"
    ).add_argument("--json", action="store_true", help="as JSON")
    return parser


def _command(
    commands: argparse._SubParsersAction, name: str, run: Callable, text: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    return command


def _with_keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--for", dest="record", type=Path, required=True, metavar="FILE",
        help=f"kernels, one per line, as recorded by {aot.RECORD_VARIABLE}",
    )  # fmt: skip
    parser.add_argument(
        "--arch", nargs="+", choices=ARCHITECTURES, metavar="ARCH",
        help=f"some of {', '.join(ARCHITECTURES)}, instead of those of the record; a kernel that "
        "is written for only one keeps it",
    )  # fmt: skip


def _doctor(given: argparse.Namespace) -> int:
    from kernelkit import doctor

    return doctor.main(given.json)


# ---- the cache


def _opened() -> store.Store:
    opened = store.from_environment()
    if opened is None:
        raise ValueError(f"{store.VARIABLE}={os.environ[store.VARIABLE]}: the cache is off")
    return opened


def _list(given: argparse.Namespace) -> int:
    opened = _opened()
    rows = opened.listed()
    if given.json:
        content = {"folder": str(opened.folder), "limit": opened.limit, "kernels": rows}
        print(json.dumps(content, indent=1))
        return 0
    for row in rows:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["used"]))
        print(f"{used}  {row['bytes'] / 1024:7.0f} kB  {row['title']}")
    total = sum(entry.nbytes for entry in opened.entries())
    plural, limit = "s" * (len(rows) != 1), opened.limit / 2**20
    print(f"{len(rows)} kernel{plural}, {total / 2**20:.1f} MB (limit {limit:,.0f} MB)")
    print(f"in {opened.folder}")
    return 0


def _clear(given: argparse.Namespace) -> int:
    opened = _opened()
    print(f"removed {opened.clear()} files from {opened.folder}")
    return 0


def _verify(given: argparse.Namespace) -> int:
    opened = _opened()
    good, damaged = opened.verify()
    for path in damaged:
        print(f"damaged, removed: {path}")
    print(f"{good} files of {opened.folder} are intact, {len(damaged)} were damaged")
    return 1 if damaged else 0


def _warm(given: argparse.Namespace) -> int:
    from kernelkit.compile.warm import warm

    _opened()
    print(warm(_keys(given), progress=True))
    return 0


def _keys(given: argparse.Namespace) -> list[KernelKey]:
    keys = aot.read_record(given.record)
    if not keys:
        raise ValueError(f"{given.record} names no kernels")
    return list(aot.for_archs(keys, given.arch)) if given.arch else keys


# ---- ahead of time


def _aot(given: argparse.Namespace) -> int:
    from kernelkit.compile.trace import PTXAS_VARIABLE, toolchain
    from kernelkit.compile.warm import print_progress, ready

    if os.environ.get(PTXAS_VARIABLE):
        raise ValueError(f"{PTXAS_VARIABLE} is set: artefacts are for GPUs, so unset it")
    keys = _keys(given)

    def compiled() -> Iterator[tuple[KernelKey, Artifact]]:
        for number, key in enumerate(keys, 1):
            start = time.perf_counter()
            yield key, ready(key).artifact
            print_progress(number, len(keys), key, time.perf_counter() - start)

    print(f"{aot.write(given.out, compiled(), toolchain())} kernels in {given.out}")
    print(f"digest {aot.digest_of(given.out)}")
    return 0


def _show(given: argparse.Namespace) -> int:
    manifest = aot.read_manifest(given.folder)
    for item in manifest["kernels"]:
        print(f"{item['file']}  {item['title']}")
    made = ", ".join(f"{name} {number}" for name, number in manifest["toolchain"].items())
    print(f"{len(manifest['kernels'])} kernels, made with {made}")
    print(f"digest {aot.digest_of(given.folder)}")
    changed = aot.changed_sources(manifest)
    print(f"sources differ: {', '.join(changed)}" if changed else "made from the sources here")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
