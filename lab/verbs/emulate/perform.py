"""What emulate.py does: a run in the emulator, one launch of it as a trace and as a picture."""

from __future__ import annotations

import argparse
from collections import Counter

from kernelkit.compile.compiler import in_memory
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.plan_names import plan_of, warps_of
from lab.commands import RUN
from lab.tools.common import refuse
from lab.verbs.emulate.names import named
from lab.verbs.emulate.timeline import draw
from ptxemu.report import LaunchReport
from ptxemu.watch import watched

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
    """Of the kernel with this entry point, among those that this process has compiled or found."""
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
        return refuse(f"--launch {number}: there were {len(launches)}, the first is 0")
    launch, roles = launches[number], {}
    key, timeline = key_of(launch.entry), launch.trace
    found = plan_of(key)
    if found:
        roles, timeline = warps_of(found[1]), named(timeline, *found)
    name = key.title() if key else launch.entry
    print(f"\nlaunch {number}, the first being 0, of {len(launches)}: {name}")
    print_counts(launch, roles)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    trace, picture = options.out.with_suffix(".json"), options.out.with_suffix(".png")
    timeline.to_perfetto(trace)
    agents = {f"warp {warp}": role for warp, role in roles.items()}
    title = f"{name}, {options.policy}"
    draw(timeline, picture, title=title, cta=options.cta, roles=agents)
    print(f"wrote {trace} (ui.perfetto.dev opens it) and {picture}")
    return code
