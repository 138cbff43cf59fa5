"""Implementation of cycles.py: records launches, models them, and reports times and their
causes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from cycle_model import gpus
from cycle_model.binding.bound import BoundLaunch
from cycle_model.edits import Edit, edited, edits_of, rewritten
from cycle_model.explain import Spent, chain, summary, timeline
from cycle_model.grid import LaunchModel, Prediction, in_stream
from cycle_model.launch import bind
from cycle_model.parameters.parameter import Gpu
from cycle_model.sass.tools import HOW_TO_GET_TOOLS, find_tool
from kernelkit.compile.plan_names import naming, plan_of, warps_of
from lab.cycles import headline, subjects
from lab.cycles.peers import launched, peers_of
from lab.tools.common import refuse, tracked, write_json
from lab.tools.tables import show, table
from lab.verbs.emulate import draw, key_of
from ptxemu.errors import PtxEmuError
from ptxemu.report import LaunchReport
from ptxemu.watch import watched

LONGEST = 60  # characters of a kernel's name
ROWS = 12  # of a table that explains
COLUMNS = (
    ("launch", "{kernel}"),
    ("gpu", "{gpu}"),
    ("grid", "{grid}"),
    ("CTAs\nan SM", "{per_sm}"),
    ("waves", "{waves}"),
    ("cycles", "{cycles:,}"),
    ("us", "{us:.2f}"),
    ("range", lambda row: f"{row['low_us']:.2f} .. {row['high_us']:.2f}"),
    ("TFLOP/s", lambda row: f"{row['tflops']:.0f}" if row["tflops"] >= 1 else "-"),
    ("read\nTB/s", "{read_tbs:.2f}"),
)


@dataclass
class Modelled:
    """A launch, its model, and what comes out."""

    report: LaunchReport
    model: LaunchModel
    prediction: Prediction
    row: dict[str, Any]


def perform(options: argparse.Namespace) -> int:
    if find_tool("nvdisasm") is None:
        return refuse(HOW_TO_GET_TOOLS)
    if options.subject == "fmha":
        if headline.is_asked(options):
            return headline.perform(options)
        if options.row:
            return refuse("--row selects rows of the table that --peers makes without a case")
    try:
        subjects.check(options)
        edits = {text: edits_of(text) for text in options.what_if}
        for each in edits.values():  # every GPU has parameters of the same names
            edited(gpus.named(options.gpu or next(iter(gpus.GPUS))), each)
        launches = recorded(options)
        if not launches:
            return refuse("nothing was launched")
        if options.launch is not None and options.launch >= len(launches):
            return refuse(
                f"--launch {options.launch}: there were {len(launches)} launches, numbered from 0"
            )
        found = modelled(launches, options)
        rivals = of_peers(options)
        rows = [*(each.row for each in found), *rivals]
        shown(rows)
        subjects.told(options)
        chosen = max(found, key=lambda each: each.prediction.cycles)
        if options.launch is not None:
            chosen = found[options.launch]
        ours = [each.row for each in found]
        document = {"parameters": subjects.origin(options), "launches": ours, "peers": rivals,
                    **explained(chosen, options)}  # fmt: skip
        document["what_if"] = what_if(chosen, edits, options.perturbed)
    except (ValueError, NotImplementedError, OSError, PtxEmuError) as refused:
        return refuse(refused)
    if options.json:
        write_json(options.json, document)
    return 0


def shown(rows: Sequence[dict[str, Any]]) -> None:
    """The table, and below it what was refused: a reason is longer than any column."""
    show(*table("modelled, not measured", COLUMNS, [row for row in rows if "us" in row]))
    for row in rows:
        if "refused" in row:
            print(f"{row['kernel']} is not modelled: {row['refused']}")


def recorded(options: argparse.Namespace) -> list[LaunchReport]:
    """All launches of the subject that have machine code."""
    with ExitStack() as stack:
        if options.subject == "of_file":
            from ptxemu.host.emulator import Emulator
            from ptxemu.host.gpu_machine import machine_with_gpu

            stack.enter_context(machine_with_gpu(Emulator()))
            call = subjects.of_file(options.file, options)
        else:
            call = subjects.of_family(options)
        report = stack.enter_context(watched(record=True, limit=None, clusters=options.clusters))
        call()
    return [launch for launch in report.launches if launch.recording and launch.recording.cubin]


def of_peers(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of each launch of other people's kernels for the same case, where they are asked for;
    one that says why, of those that cannot be had or do not take the case."""
    rows: list[dict[str, Any]] = []
    for name, peer in (peers_of(options.subject) if options.peers else {}).items():
        try:
            with peer(options) as call:
                launches = launched(call, options.clusters)
            found = modelled(launches, options)
            rows += [{**each.row, "kernel": name} for each in found]
        except (ValueError, NotImplementedError, ImportError, PtxEmuError) as error:
            rows.append({"kernel": name, "refused": str(error)})
    return rows


def modelled(launches: Sequence[LaunchReport], options: argparse.Namespace) -> list[Modelled]:
    """Launches one behind the other on the GPU of the options, and within the ranges of its
    parameters."""
    if not launches:
        return []
    bound = [bind(each.recording) for each in launches]
    gpu = subjects.gpu_of(options, options.gpu or "", bound[0].recording.arch)
    models = [LaunchModel(each, gpu, memory=options.memory) for each in bound]
    predictions = in_stream(models)
    others = [
        in_stream([LaunchModel(each, other, memory=options.memory) for each in bound])
        for other in map(gpu.perturbed, tracked(range(options.perturbed), "within ranges"))
    ]
    return [
        _modelled(launch, model, found, [each[number].microseconds for each in others])
        for number, (launch, model, found) in enumerate(
            zip(launches, models, predictions, strict=True)
        )
    ]


def _modelled(
    launch: LaunchReport, model: LaunchModel, prediction: Prediction, others: Sequence[float]
) -> Modelled:
    """others: microseconds with other parameters."""
    us, bound, gpu = prediction.microseconds, model.launch, model.gpu
    share = model.clusters / max(len(bound.clusters), 1)
    key = key_of(launch.entry)
    row = {
        "kernel": (key.title() if key else launch.entry)[:LONGEST],
        "gpu": gpu.name,
        "grid": "x".join(map(str, launch.grid)),
        "per_sm": prediction.per_sm,
        "waves": prediction.waves,
        "cycles": prediction.cycles,
        "us": us,
        "low_us": min([us, *others]),
        "high_us": max([us, *others]),
        "tflops": launch.counts["mma.flops"] * share / us * 1e-6,
        "read_tbs": model.traffic.nbytes / us * 1e-6,
        "memory": model.memory,
        "durations": prediction.durations,
    }
    return Modelled(launch, model, prediction, row)


def explained(found: Modelled, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of the longest of its clusters: pipes, waits, the critical chain, the costliest
    instructions; printed, and as plain values."""
    durations = found.prediction.durations
    cluster = max(durations, key=lambda number: durations[number])
    result = found.model.simulated(cluster, log=True)
    key = key_of(found.report.entry)
    plan = plan_of(key) if key else None
    roles = warps_of(plan[1]) if plan else {}
    spent = Spent(result, roles, dict(naming(key)["names"]))
    shares = spent.shares()
    waits = [(role, what, n) for (role, what), n in spent.waits().most_common(ROWS)]
    links = summary(chain(spent))[:ROWS]
    spots = spent.spots()[:ROWS]
    print(f"\n{found.row['kernel']}, cluster {cluster}: {result.cycles:,} cycles")
    print("busy: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    columns = (("role", "{role}"), ("waits for", "{what}"), ("cycles", "{cycles:,}"))
    rows = [{"role": role, "what": what, "cycles": n} for role, what, n in waits]
    show(*table("waits", columns, rows))
    chained = [
        {"role": who, "what": what, "times": times, "cycles": n, "share": n / result.cycles}
        for who, what, times, n in links
    ]
    columns = (
        *(("role", "{role}"), ("", "{what}"), ("times", "{times:,}"), ("cycles", "{cycles:,}")),
        ("share", "{share:.0%}"),
    )
    show(*table("critical chain", columns, chained))
    columns = (
        *(("role", "{role}"), ("at", "{address:#x}"), ("instruction", "{text}")),
        *(("times", "{times:,}"), ("cycles", "{cycles:,}")),
    )
    hot = [vars(spot) for spot in spots]
    show(*table("costliest instructions", columns, hot))
    if options.trace or options.plot:
        trace = timeline(spent)
        if options.trace:
            trace.to_perfetto(options.trace)
        if options.plot:
            agents = {f"warp {warp}": role for warp, role in roles.items()}
            draw(trace, options.plot, title=f"{found.row['kernel']}, modelled", roles=agents)
    told = {"kernel": found.row["kernel"], "cluster": cluster, "cycles": result.cycles}
    return {**told, "shares": shares, "waits": rows, "chain": chained, "spots": hot}


LEAST_CHANGE = 0.10  # a smaller one is not told apart from the model's own errors
WHAT_IF = (
    *(("what if", "{edit}"), ("us", "{us:.2f}"), ("change", "{change:+.1%}")),
    ("range", lambda row: f"{row['low']:+.1%} .. {row['high']:+.1%}"),
    ("sign holds", "{holds} in {sets}"),
    ("counts", lambda row: "yes" if row["counts"] else "no"),
)


def what_if(
    found: Modelled, wanted: dict[str, tuple[Edit, ...]], perturbed: int
) -> list[dict[str, Any]]:
    """The launch with each of the changes alone, beside the launch without it, with the GPU's
    parameters and with each set within their ranges. A change counts if its sign holds in all of
    them and it is above `LEAST_CHANGE`."""
    gpu = found.model.gpu
    sets = [gpu, *(gpu.perturbed(seed) for seed in range(perturbed))] if wanted else []
    before = [_us(found, found.model.launch, each) for each in sets]
    rows = []
    for text, edits in wanted.items():
        launch = rewritten(found.model.launch, edits)
        after = [_us(found, launch, edited(each, edits)) for each in sets]
        changes = [new / old - 1 for new, old in zip(after, before, strict=True)]
        holds = sum(change * changes[0] > 0 for change in changes[1:])
        counts = holds == perturbed > 0 and abs(changes[0]) > LEAST_CHANGE
        row = {"edit": text, "us": after[0], "change": changes[0], "counts": counts}
        row |= {"low": min(changes), "high": max(changes), "holds": holds, "sets": perturbed}
        rows.append(row)
    if rows:
        show(*table("what if", WHAT_IF, rows))
    return rows


def _us(found: Modelled, launch: BoundLaunch, gpu: Gpu) -> float:
    return LaunchModel(launch, gpu, memory=found.model.memory).predict().microseconds
