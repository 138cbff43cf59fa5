"""What emulate.py does: one case in the emulator, its timeline as a trace and as a picture."""

from __future__ import annotations

import argparse
from collections import Counter

from ptxemu.host.command_line import checking
from ptxemu.options import Options
from ptxemu.report import LaunchReport
from workbench.cases.attention import (
    Case,
    attend,
    case_of,
    check,
    instructions_by_role,
    plan_of,
    role_of_warp,
)
from workbench.common import refuse
from workbench.emulate.names import named
from workbench.emulate.timeline import draw

TOP_OPCODES = 8


def print_counts(case: Case, launch: LaunchReport) -> None:
    """Warp-instructions per role with the commonest opcodes, and bytes per path."""
    speed = launch.warp_instructions / max(launch.seconds, 1e-9)
    print(
        f"grid {launch.grid}, block {launch.block}, {launch.warp_instructions:,} warp-instructions "
        f"in {launch.seconds:.2f} s ({speed:,.0f}/s)"
    )
    roles = role_of_warp(case)
    for role, count in instructions_by_role(case, [launch]).items():
        opcodes = sum((launch.by_warp[w] for w in launch.by_warp if roles[w] == role), Counter())
        common = ", ".join(f"{name} {n:,}" for name, n in opcodes.most_common(TOP_OPCODES))
        print(f"  {role:<8} {count:>9,}  {common}")
    for path, count in sorted((+launch.bytes).items()):
        print(f"  {path:<18} {count:>12,} bytes")


def perform(arguments: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    case = case_of(arguments)
    try:
        check(case)
    except (ValueError, NotImplementedError) as refusal:
        return refuse(refusal)
    options = Options(policy=arguments.policy, seed=arguments.seed, limit=None, trace=True)
    with checking(arguments) as report:
        _, launches = attend(case, "emulate", options)
    if not launches:
        print(f"{case}: nothing to launch")
        return 0
    print(case)
    print_counts(case, launches[0])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    trace, picture = arguments.out.with_suffix(".json"), arguments.out.with_suffix(".png")
    timeline = named(launches[0].trace, plan_of(case))
    timeline.to_perfetto(trace)
    roles = {f"warp {warp}": role for warp, role in role_of_warp(case).items()}
    title = f"fmha forward, {case}, {arguments.policy}"
    draw(timeline, picture, title=title, cta=arguments.cta, roles=roles)
    print(f"wrote {trace} (ui.perfetto.dev opens it) and {picture}")
    return 1 if report.errors else 0
