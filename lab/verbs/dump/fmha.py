"""What `dump.py fmha` says beside resources: the softmax loops."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fmha import AttentionConfig
from fmha.launch import compile_attention
from fmha.plan import make_plan
from kernelkit.compile.kernel import CompiledKernel
from lab.cases.attention import case_of, config_of
from lab.sass.softmax import SOFTMAX_KINDS, SoftmaxLoop, Static, static
from lab.verbs.dump.kernel import Subject, dump_all


def subject_of(config: AttentionConfig, arch: str) -> Subject:
    """The kernel of a config."""
    found: list[Static] = []

    def figures(cubin: Path) -> dict[str, Any]:
        found.append(static(cubin))
        return found[0].as_dict()

    def compiled() -> CompiledKernel:
        return compile_attention(config, arch)

    names = {"what": "fmha forward", "stem": "fmha", "config": config, "arch": arch}
    return Subject(**names, compile=compiled, figures=figures, show=lambda _: print_loops(found[0]))


def print_loops(static: Static) -> None:
    """A column per softmax loop."""
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
    def subjects() -> list[Subject]:
        config = config_of(case_of(options), options.arch)
        make_plan(config, options.arch)
        return [subject_of(config, options.arch)]

    return dump_all(options, subjects)
