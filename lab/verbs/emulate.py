"""What emulate.py does: a run in the emulator, one launch of it as a trace and as a picture, with
the plan's names for what a timeline calls by address."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kernelkit.compile.compiler import in_memory
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.plan_names import plan_of, warps_of
from kernelkit.plan import hw
from kernelkit.plan.warps import RolePlan
from lab.commands import RUN
from lab.tools import style
from lab.tools.common import refuse
from ptxemu.report import LaunchReport
from ptxemu.trace import Span, Trace
from ptxemu.watch import watched

SMEM_RESERVED = 1024  # the CTA's own data begins behind what the system keeps
BARRIER = re.compile(r"mbarrier (0x[0-9a-f]+) of cta\(.*\)")
LOAD = re.compile(r"load (\S+) at \(.*?\)(?: to (0x[0-9a-f]+))?")
STORE = re.compile(r"store \S+ at \(.*?\)")
MMA = re.compile(r"mma \S+ (\d+x\d+)x\d+(?: to column (\d+))?")


def named(trace: Trace, plan: Any, roles: RolePlan) -> Trace:
    """Rename the spans with the plan's names; spans without one keep theirs."""
    names = PlanNames(plan, roles)
    return Trace([names.rename(span) for span in trace.spans], trace.time)


class PlanNames:
    """Looks up addresses of a CTA in its plan."""

    def __init__(self, plan: Any, roles: RolePlan) -> None:
        self.roles = {f"warp {warp}": name for warp, name in warps_of(roles).items()}
        self.barriers = _barriers(plan)
        self.buffers = _buffers(plan)
        self.columns = {item.begin: item.name for item in plan.tmem.ranges if not item.over}

    def rename(self, span: Span) -> Span:
        """The span under its short name; its long one stays among the arguments."""
        name = self.roles.get(span.agent, span.name) if span.name == "run" else span.name
        name = BARRIER.sub(lambda m: self.barriers.get(int(m[1], 16), m[1]), name)
        name = LOAD.sub(lambda m: self._buffer_of(int(m[2] or "0", 16)) or f"load {m[1]}", name)
        name = STORE.sub("store", name)
        name = MMA.sub(lambda m: self.columns.get(int(m[2] or -1), f"mma {m[1]}"), name)
        if name == span.name:
            return span
        return replace(span, name=name, args={**span.args, "what": span.name})

    def _buffer_of(self, address: int) -> str | None:
        return next((name for stage, name in self.buffers.items() if address in stage), None)


def _barriers(plan: Any) -> dict[int, str]:
    """Address -> 'k[2]' for a full barrier, 'k[2] free' for an empty one, in allocation order."""
    names = []
    for edge in plan.edges.edges:
        stages = [f"{edge.name}[{i}]" if edge.stages > 1 else edge.name for i in range(edge.stages)]
        names += stages + ([f"{stage} free" for stage in stages] if edge.release else [])
    begin = SMEM_RESERVED + plan.smem.offsets()["barriers"][0]
    return {begin + i * hw.MBARRIER_BYTES: name for i, name in enumerate(names)}


def _buffers(plan: Any) -> dict[range, str]:
    """Addresses -> 'K[2]' for every stage of the buffers that loads fill, such as sQ and sK."""
    names = {}
    for buffer in plan.smem.buffers:
        if buffer.over:
            continue
        begin, _ = plan.smem.offsets()[buffer.name]
        short = re.sub(r"^s(?=[A-Z])", "", buffer.name)
        for stage in range(buffer.stages):
            index = f"[{stage}]" if buffer.stages > 1 else ""
            first = SMEM_RESERVED + begin + stage * buffer.stage_bytes
            names[range(first, first + buffer.stage_bytes)] = short + index
    return names


# Waiting is in the background.
COLOURS = {
    "compute": style.BLUE,
    "tma": style.ORANGE,
    "mma": style.GREEN,
    "copy": style.PURPLE,
    "sync": style.SKY,
    "wait": style.PALE,
}
DARK = ("compute", "mma")  # what has white letters
OTHER = "#B0A080"
LABELS = {"compute": "computing", "tma": "TMA", "mma": "tensor core", "wait": "waiting"}
ROW_HEIGHT = 0.74
CHARACTERS = 108  # of a span's name that fit into the width of the picture


def draw(
    trace: Trace,
    path: str | Path,
    *,
    title: str,
    cta: int | None = None,
    roles: Mapping[str, str] | None = None,
) -> None:
    """Write a PNG of one CTA (the first by default).

    roles: agent -> role, such as {'warp 4': 'mma'}; rows of one role stand together.
    Raises ValueError for a trace without spans of that CTA.
    """
    cta = trace.ctas()[0] if cta is None and trace.spans else cta
    spans = [span for span in trace.spans if span.cta == cta]
    if not spans:
        raise ValueError(f"no spans of CTA {cta}; CTAs with spans: {trace.ctas()}")
    agents = trace.agents(cta)
    how = {"height": 1.35 + 0.215 * len(agents), "title": "Timeline of one CTA", "keys": 1}
    with style.picture(Path(path), caption=title, **how) as (figure, ((axes,),)):
        _draw_rows(axes, spans, agents)
        _label_rows(axes, agents, roles or {})
        _dress(axes, trace.time)
        _keys(figure, {span.category for span in spans})


def _draw_rows(axes: Axes, spans: list[Span], agents: list[str]) -> None:
    start, end = min(s.start for s in spans), max(s.end for s in spans)
    for row, agent in enumerate(agents):
        own = _joined([span for span in spans if span.agent == agent])
        axes.broken_barh(
            [(span.start, span.end - span.start) for span in own],
            (row - ROW_HEIGHT / 2, ROW_HEIGHT),
            facecolors=[COLOURS.get(span.category, OTHER) for span in own],
            edgecolor="white",
            linewidth=0.4,
        )
        for span in own:
            name = span.name.removeprefix("wait ")  # the colour says that it waits
            if len(name) <= CHARACTERS * (span.end - span.start) / (end - start):
                colour = "white" if span.category in DARK else style.BLACK
                how = {"color": colour, "fontsize": 7}
                middle = (span.start + span.end) / 2
                axes.text(middle, row, name, ha="center", va="center", clip_on=True, **how)
    axes.set_xlim(start, end)
    axes.set_ylim(len(agents) - 0.4, -0.6)


def _joined(spans: list[Span]) -> list[Span]:
    """Neighbours without a gap that do the same, such as the MMAs of one product, as one span."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        last = joined[-1] if joined else None
        same = last and (last.name, last.category) == (span.name, span.category)
        if same and span.start <= last.end:
            joined[-1] = replace(last, end=max(last.end, span.end))
        else:
            joined.append(span)
    return joined


def _label_rows(axes: Axes, agents: list[str], roles: Mapping[str, str]) -> None:
    """Agents at the left; the name of a role once, bold, left of its rows; a line between roles."""
    axes.set_yticks(range(len(agents)), agents)
    groups = [roles.get(agent, "") for agent in agents]
    first = 0
    for row in range(1, len(groups) + 1):
        if row < len(groups) and groups[row] == groups[first]:
            continue
        middle = (first + row - 1) / 2
        how = {"ha": "right", "va": "center", "fontsize": 9, "fontweight": "bold"}
        axes.text(-0.095, middle, groups[first], transform=axes.get_yaxis_transform(), **how)
        if row < len(groups):
            axes.axhline(row - 0.5, color="#999999", linewidth=0.6)
        first = row


def _dress(axes: Axes, time: str) -> None:
    axes.set_xlabel(time, fontsize=style.SMALL)
    axes.tick_params(axis="x", length=2)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _keys(figure: Figure, categories: set[str]) -> None:
    known = [name for name in COLOURS if name in categories]
    handles = [Patch(facecolor=COLOURS[name], label=LABELS.get(name, name)) for name in known]
    handles += [Patch(facecolor=OTHER, label=name) for name in sorted(categories - set(known))]
    style.legend(figure, handles)


TOP_OPCODES = 8


def print_counts(launch: LaunchReport, roles: dict[int, str]) -> None:
    """Warp-instructions per role with the commonest opcodes, and bytes per path."""
    speed = launch.warp_instructions / max(launch.seconds, 1e-9)
    print(
        f"grid {launch.grid}, block {launch.block}, {launch.warp_instructions:,} warp-instructions "
        f"in {launch.seconds:.2f} s ({speed:,.0f}/s)"
    )
    by_role: dict[str, Counter] = {}
    for warp in sorted(launch.by_warp):
        by_role.setdefault(roles.get(warp, "all"), Counter()).update(launch.by_warp[warp])
    for role, opcodes in by_role.items():
        common = ", ".join(f"{name} {n:,}" for name, n in opcodes.most_common(TOP_OPCODES))
        print(f"  {role:<8} {opcodes.total():>9,}  {common}")
    for path, count in sorted((+launch.bytes).items()):
        print(f"  {path:<18} {count:>12,} bytes")


def key_of(entry: str) -> KernelKey | None:
    """Key of the kernel with this entry point, among those that this process has compiled or
    found."""
    found = [key for key, kernel in in_memory() if f".entry {entry}" in kernel.ptx]
    return found[-1] if found else None


def perform(options: argparse.Namespace) -> int:
    with watched(trace=True) as report:
        code = RUN[options.name].perform(options)
    launches = report.launches
    if not launches:
        if code == 0:
            print("nothing was launched")
        return code
    number = options.launch
    if number is None:
        number = max(range(len(launches)), key=lambda n: launches[n].warp_instructions)
    if number >= len(launches):
        return refuse(f"--launch {number}: there were {len(launches)} launches, numbered from 0")
    launch, roles = launches[number], {}
    key, timeline = key_of(launch.entry), launch.trace
    found = plan_of(key)
    if found:
        roles, timeline = warps_of(found[1]), named(timeline, *found)
    name = key.title() if key else launch.entry
    print(f"\nlaunch {number} (from 0) of {len(launches)}: {name}")
    print_counts(launch, roles)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    trace, picture = options.out.with_suffix(".json"), options.out.with_suffix(".png")
    timeline.to_perfetto(trace)
    agents = {f"warp {warp}": role for warp, role in roles.items()}
    title = f"{name}, {options.policy}"
    draw(timeline, picture, title=title, cta=options.cta, roles=agents)
    print(f"wrote {trace} (open it at ui.perfetto.dev) and {picture}")
    return code
