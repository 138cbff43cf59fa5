"""What dump.py does with an attention config: PTX, registers, spills and SASS."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from fmha import AttentionConfig
from fmha.compile import compile_attention
from workbench.cases.attention import case_of, config_of
from workbench.common import describe, refuse, write_json
from workbench.dump.files import print_ptx, print_sass, write_to
from workbench.sass.listing import HOW_TO_GET_TOOLS, tools_found
from workbench.sass.softmax import SOFTMAX_KINDS, SoftmaxLoop, Static, static


def compile_to(folder: Path, config: AttentionConfig, arch: str) -> tuple[Path, Path]:
    """Compile and write (PTX, cubin), named after the config."""
    return write_to(folder, f"fmha_{arch}_{describe(config)}", compile_attention(config, arch))


def print_static(static: Static) -> None:
    """Resources, and a column per softmax loop."""
    print(f"\n{static.registers} registers, {static.stack} bytes of stack, {static.spills} spills")
    if static.parked:
        print(f"{static.parked} moves that keep uniform registers in others")
    if static.outside:
        print(f"{static.outside} exponentials in straight code: ptxas sees one such tile at most")
    for address, words in static.others.items():
        print(f"other loop at {address:#x}: {words}")
    if not static.loops:
        return
    rows = loop_rows(static.loops)
    width = max(len(row[0]) for row in rows)
    print("\nSoftmax loops, per warp and tile")
    for name, *cells in rows:
        print(f"  {name:<{width}}" + "".join(f"{cell:>14}" for cell in cells))


def loop_rows(loops: tuple[SoftmaxLoop, ...]) -> list[tuple[str, ...]]:
    """A name and a cell per loop: instructions by kind, the correction, positions in the body."""
    kinds = [loop.kinds() for loop in loops]
    places = [loop.publishes() for loop in loops]
    used = [kind for kind in SOFTMAX_KINDS if any(counts[kind] for counts in kinds)]
    return [
        ("loop at", *(f"{loop.address:#x}" for loop in loops)),
        ("", *("masked" if loop.masked else "unmasked" for loop in loops)),
        ("instructions", *(f"{loop.total:g}" for loop in loops)),
        *((f"  {kind}", *(f"{counts[kind]:g}" for counts in kinds)) for kind in used),
        ("correction, beside", *(str(len(loop.correction)) for loop in loops)),
        ("loops inside", *(str(len(loop.nested)) for loop in loops)),
        ("S loaded at", *(span(place.load) for place in places)),
        ("statistics stored at", *(span(place.statistics) for place in places)),
        ("P stored at", *(span(place.p) for place in places)),
        ("P ready at", *(span(place.ready) for place in places)),
        ("row sum behind it", *(f"{place.adds_after} FADD2" for place in places)),
    ]


def span(place: float | tuple[float, float] | None) -> str:
    """One position or two in percent of the body."""
    if place is None:
        return "-"
    shares = place if isinstance(place, tuple) else (place,)
    return "-".join(f"{share:.0%}".rstrip("%") for share in shares) + " %"


def perform(options: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    config = config_of(case_of(options))
    try:
        config.check()
    except (ValueError, NotImplementedError) as refusal:
        return refuse(refusal)
    print(f"fmha forward for {options.arch}: {describe(config)}")
    ptx, cubin = compile_to(options.out, config, options.arch)
    figures = {"config": dataclasses.asdict(config), "arch": options.arch}
    figures["ptx"] = print_ptx(ptx)
    if tools_found():
        figures["sass"] = print_sass(cubin)
        of_cubin = static(cubin)
        print_static(of_cubin)
        figures |= of_cubin.as_dict()
    else:
        print(f"\n{HOW_TO_GET_TOOLS}")
    if options.json:
        write_json(options.json, figures)
    return 0
