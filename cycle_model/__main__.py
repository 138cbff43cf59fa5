"""`python -m cycle_model`: the time that a script's kernels would take on a GPU, and why."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, find_tool
from ptxemu.commands import subject as subjects
from ptxemu.host.command_line import output_file

if TYPE_CHECKING:
    from cycle_model.grid import LaunchModel
    from ptxemu.report import LaunchReport

ABOUT = f"""\
Model the time that the kernels of a CuTe DSL script would take on a GPU, and where it goes.

No GPU is needed: the process looks like one with a B200, and every launch runs in ptxemu, which
records what each warp does. The recording is replayed by the cycle on the kernel's machine code.
Nothing is measured. The range is that of parameters within their own ranges.

{subjects.PROTOCOL}

Exit code 0: modelled; 1: the script failed; 2: refused, or nothing was launched.
In a checkout, `python scripts/cycles.py` models the repository's own kernels by name, with changes
(--what-if), other people's kernels and pictures."""
LINE = "{kernel:<40}  {grid:>12}  {cycles:>12,} cycles  {us:10.2f} us  {low:.2f} .. {high:.2f}"
TOP = 6  # lines of each explanation


def main(words: list[str] | None = None) -> int:
    """Print the modelled launches and explain the longest; return the exit code."""
    parser = _parser()
    options = subjects.parse(parser, words)
    if find_tool("nvdisasm") is None:
        parser.error(HOW_TO_GET_TOOLS)
    try:
        launches, failure = _recorded(options)
        if failure:
            print(f"failed: {failure}", file=sys.stderr)
            return subjects.WRONG
        if not launches:
            parser.error("no kernel with machine code was launched")
        rows, models = _modelled(launches, options)
    except (subjects.Refused, ValueError, NotImplementedError) as error:
        parser.error(str(error))
    for row in rows:
        print(LINE.format_map(row))
    longest = max(range(len(rows)), key=lambda number: rows[number]["us"])
    durations = rows[longest]["durations"]
    cluster = max(durations, key=durations.__getitem__)
    print(f"\n{rows[longest]['kernel']}, cluster {cluster}: {durations[cluster]:,} cycles")
    print("\n".join(_explained(models[longest], cluster)))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = subjects.parser_of("python -m cycle_model", ABOUT, gpu=False)
    words = "its parameters, such as B200 or H200; default: the first for the kernels' architecture"
    parser.add_argument("--gpu", metavar="NAME", help=words)
    words = "what of the inputs is in L2 before; default: cold"
    parser.add_argument("--memory", choices=("cold", "warm"), default="cold", help=words)
    words = "clusters of a launch to run and model; default: 8, spread over the grid"
    parser.add_argument("--clusters", type=_count, default=8, metavar="N", help=words)
    words = "sets of parameters within their ranges; default: 12"
    parser.add_argument("--perturbed", type=_count, default=12, metavar="N", help=words)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the rows there")
    return parser


def _count(text: str) -> int:
    """Argument type: an integer of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 1 on")
    return int(text)


def _recorded(options: argparse.Namespace) -> tuple[list[LaunchReport], str]:
    """Run the subject on a machine that seems to have a GPU.

    Returns:
        The launches that have machine code, and how the subject failed, '' if it did not.
    """
    from ptxemu.host.emulator import Emulator
    from ptxemu.host.gpu_machine import machine_with_gpu
    from ptxemu.schedules import Schedule
    from ptxemu.watch import watched

    with (
        machine_with_gpu(Emulator()),
        watched(record=True, limit=None, clusters=options.clusters) as report,
    ):
        failure = subjects.failure_of(subjects.subject_of(options), Schedule())
    found = [each for each in report.launches if each.recording and each.recording.cubin]
    return found, failure


def _modelled(
    launches: list[LaunchReport], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[LaunchModel]]:
    """Model the launches as one stream: a row and a model of each."""
    from cycle_model import gpus
    from cycle_model.grid import LaunchModel, in_stream
    from cycle_model.launch import bind

    bound = [bind(launch.recording) for launch in launches if launch.recording]
    arch = bound[0].recording.arch
    gpu = gpus.named(options.gpu) if options.gpu else gpus.for_arch(arch)
    if gpu.arch[:5] != arch[:5]:  # a GB300, sm_103a, runs kernels for sm_100a
        raise ValueError(f"--gpu {gpu.name} is {gpu.arch}, the kernels are for {arch}")

    def models_on(gpu: Any) -> list[LaunchModel]:
        return [LaunchModel(each, gpu, memory=options.memory) for each in bound]

    models = models_on(gpu)
    found = in_stream(models)
    others = [in_stream(models_on(gpu.perturbed(seed))) for seed in range(options.perturbed)]
    rows = []
    for number, (launch, prediction) in enumerate(zip(launches, found, strict=True)):
        us = prediction.microseconds
        range_us = [us, *(each[number].microseconds for each in others)]
        rows.append({
            "kernel": launch.entry[:40], "gpu": gpu.name, "grid": "x".join(map(str, launch.grid)),
            "cycles": prediction.cycles, "us": us, "low": min(range_us), "high": max(range_us),
            "durations": prediction.durations,
        })  # fmt: skip
    return rows, models


def _explained(model: LaunchModel, cluster: int) -> Iterator[str]:
    """Yield lines: shares of the pipes, waits, the critical chain, the costliest instructions."""
    from cycle_model.explain import Spent, chain, summary

    result = model.simulated(cluster, log=True)
    spent = Spent(result)
    yield "  busy: " + ", ".join(f"{name} {share:.0%}" for name, share in spent.shares().items())
    for (role, what), cycles in spent.waits().most_common(TOP):
        yield f"  {cycles:>10,} cycles  {role} waits for {what}"
    for role, what, times, cycles in summary(chain(spent))[:TOP]:
        yield f"  {cycles / result.cycles:>10.0%} of the critical chain  {role} {what}, {times:,}x"
    for spot in spent.spots()[:TOP]:
        yield f"  {spot.cycles:>10,} cycles at {spot.address:#06x}  {spot.role}: {spot.text}"


if __name__ == "__main__":
    sys.exit(main())
