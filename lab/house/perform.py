"""Implementation of house.py: prints the graph of imports, files by duty, hops of calls,
lengths."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lab.house import prose
from lab.house.dsl import OWNERS
from lab.house.graph import house, layers
from lab.house.size import FUNCTION_LINES
from lab.house.source import ROOT, sources

# family -> folders that have the files of a family
FAMILIES = {
    "fmha": ("fmha",),
    "gqa_lowlatency": ("gqa_lowlatency",),
    "mla": ("mla", "mla/attention", "mla/compressor", "mla/glue", "mla/indexer"),
    "moe": ("moe", "moe/routing", "moe/quantiser"),
    "kvcache": ("kvcache/movement",),
    "q8_0": ("q8_0",),
}
DUTIES = {
    "api.py": "public functions",
    "arguments.py": "dataclasses of arguments, every check without a config",
    "config.py": "what a kernel is compiled for",
    "plan.py": "roles, edges, memory maps, as data",
    "choose.py": "sizes to configs: heuristics and tables",
    "tuning.py": "shapes that a user names, to be measured",
    "launch.py": "the operator: run(arguments) -> results",
    "reference.py": "the definition, in torch",
    "warm.py": "every kernel that sizes can choose, compiled ahead",
    "params.py": "words of a kernel's parameter table, by name",
}
ARCHITECTURES = ("sm100", "sm90", "portable")


def perform(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    found, code = SHOWN[options.what](options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return code


def _graph(options: argparse.Namespace) -> tuple[Any, int]:
    found = house()
    for height, row in enumerate(layers(found.packages)):
        for package in row:
            targets = ", ".join(sorted(found.packages[package])) or "nothing of ours"
            print(f"{height}  {package} imports {targets}")
    circles, upwards = found.circles(), found.upwards()
    for ring in circles:
        print("circle: " + " <-> ".join(ring))
    for package, target in upwards:
        print(f"upwards: {package} -> {target}")
    print(f"{len(found.files)} files, {len(circles)} circles, {len(upwards)} arrows upwards")
    if options.png:
        from lab.house.map import draw

        draw(options.png, found)
    packages = {name: sorted(targets) for name, targets in found.packages.items()}
    return {"packages": packages, "circles": circles, "upwards": upwards}, bool(circles or upwards)


def table_of_files() -> str:
    """Duties down, families across, in Markdown."""
    lines = [
        f"| file | duty | {' | '.join(f'`{name}`' for name in FAMILIES)} |",
        f"|---|---|{'---|' * len(FAMILIES)}",
    ]
    for file, duty in DUTIES.items():
        cells = (_places(folders, file) for folders in FAMILIES.values())
        lines.append(f"| `{file}` | {duty} | {' | '.join(cells)} |")
    for arch in ARCHITECTURES:
        cells = (_places(folders, arch) for folders in FAMILIES.values())
        lines.append(f"| `{arch}/` | kernel, roles, their plan | {' | '.join(cells)} |")
    return "\n".join(lines)


def _places(folders: tuple[str, ...], name: str) -> str:
    """List a family's files of that name, per architecture too, or with that ending
    (`select_launch.py`)."""
    patterns = (name, f"*_{name}", *(f"{arch}/{name}" for arch in ARCHITECTURES))
    found = []
    for folder in folders:
        root = ROOT / folder.partition("/")[0]
        paths = sorted(path for pattern in patterns for path in (ROOT / folder).glob(pattern))
        found += [path.relative_to(root).as_posix() for path in paths]
    return ", ".join(found) or "-"


def _files(_: argparse.Namespace) -> tuple[Any, int]:
    print(table_of_files())
    return {
        family: {file: _places(folders, file) for file in (*DUTIES, *ARCHITECTURES)}
        for family, folders in FAMILIES.items()
    }, 0


def _hops(_: argparse.Namespace) -> tuple[Any, int]:
    from lab.house.hops import LIMITS, hops

    found = hops()
    for name, files in found.items():
        print(f"{name:12} {len(files):2} of {LIMITS[name]:2}  {' '.join(files)}")
    return found, any(len(files) > LIMITS[name] for name, files in found.items())


def _trips(_: argparse.Namespace) -> tuple[Any, int]:
    from lab.house.hops import GOALS, trips

    found = trips()
    for name, trip in found.items():
        files, moves = GOALS[name]
        print(
            f"{name:12} {len(trip.files):3} files of {files}, {trip.moves:4} moves of {moves}, "
            f"{trip.calls:5} calls  {' '.join(trip.files)}"
        )
    above = any(
        len(trip.files) > GOALS[name][0] or trip.moves > GOALS[name][1]
        for name, trip in found.items()
    )
    return {name: asdict(trip) for name, trip in found.items()}, above


def _lines(_: argparse.Namespace) -> tuple[Any, int]:
    everything = sources()
    counts: Counter[str] = Counter()
    for source in everything:
        counts[source.package] += source.lines
    for package, count in sorted(counts.items()):
        print(f"{package or '.':16} {count:7,}")
    print(f"{'all':16} {counts.total():7,}")
    for source in sorted(everything, key=lambda source: -source.lines)[:5]:
        print(f"{source.lines:5} {source.path}")
    long = [
        (function.lines, f"{source.path}::{function.qualname}")
        for source in everything
        for function in source.functions
        if function.lines > FUNCTION_LINES
    ]
    found = sorted(long, reverse=True)
    print(f"functions above {FUNCTION_LINES} lines:")
    for count, name in found:
        print(f"{count:5} {name}: {_reason(name)}")
    return {"lines": counts, "functions": found}, 0


def _links(_: argparse.Namespace) -> tuple[Any, int]:
    from lab.house.links import Site

    site = Site(ROOT / "out/site")
    broken = [*site.broken()]
    print(*broken, sep="\n", end="\n" * bool(broken))
    print(f"{len(site.pages)} pages, {site.links} links, {len(broken)} broken")
    return broken, int(bool(broken) or not site.pages)


def _prose(options: argparse.Namespace) -> tuple[Any, int]:
    found = [*prose.offences(sources())]
    for rule, finding in found:
        if finding.subject.startswith(options.folder):
            print(f"{rule}: {finding}")
    counts, allowed = prose.counted(found), prose.allowed()
    risen = False
    for rule, folders in counts.items():
        print(f"{rule:20} {sum(folders.values()):5}  {folders}")
        risen |= any(n > allowed[rule].get(folder, 0) for folder, n in folders.items())
    if options.write and not risen:
        prose.COUNTS.write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    return counts, int(risen)


def _reason(name: str) -> str:
    reason = EXCEPTIONS.get(("function_length", name))
    if reason:
        return reason
    short = name.rpartition(".")[2].rpartition("::")[2]
    return "owns all state of its loop" if short in OWNERS else "no reason"


SHOWN: dict[str, Callable[[argparse.Namespace], tuple[Any, int]]] = {
    "graph": _graph,
    "files": _files,
    "hops": _hops,
    "trips": _trips,
    "lines": _lines,
    "links": _links,
    "prose": _prose,
}


# Where a rule is broken on purpose: (rule, subject) -> the reason. A stale entry fails.
#
# A subject is a file, or `file::Class.function`, as a finding prints it.


EXCEPTIONS: dict[tuple[str, str], str] = {
    ("function_length", "fmha/api.py::attention"): (
        "the docstring is the contract of all its arguments, and help() shows it in one place"
    ),
    ("function_length", "ptxemu/module.py::Module.launch"): (
        "the docstring is the contract of all its arguments, one line or more for each"
    ),
    ("function_length", "gqa_lowlatency/api.py::decode"): (
        "the docstring is the contract of all its arguments, and help() shows it in one place"
    ),
    **{
        ("parameter_count", f"blackwell_engines/vllm/backend.py::BlackwellKernels{name}"): (
            "the signature is vLLM's, which gives these by position"
        )
        for name in ("Backend.supports_combination", "Impl.__init__", "Impl.forward")
    },
    **{
        (
            rule,
            f"mla/flash_mla.py::{name}",
        ): "the signature is FlashMLA's, and callers give it by position"
        for rule, name in (
            ("parameter_count", "flash_mla_with_kvcache"),
            ("parameter_count", "flash_mla_sparse_fwd"),
            ("function_length", "flash_mla_with_kvcache"),
        )
    },
    ("package_readme_length", "kernelkit/README.md"): (
        "the handbook of all packages: glossary, anatomy, rules of the DSL and how to add things"
    ),
}
