"""Implementation of bringup.py: runs the selected steps, then writes the file and the page."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.bringup import gpu, where
from lab.bringup.page import pack, save
from lab.bringup.planted import KINDS
from lab.bringup.runner import BringUp, is_unexpected
from lab.bringup.session import BAD, Session
from lab.bringup.steps import ANY, ARCHS, Step, steps_of
from lab.tools.bringup_words import GROUPS, NOT_RUN, SKIPPED
from lab.tools.common import environment, refuse
from lab.tools.tables import show, table

OUT = Path("out/bringup")
COLUMNS = (
    ("step", "{name}"), ("", "{verdict}"), ("seconds", "{seconds:.1f}"),
    ("", lambda row: row["about"][row["about"].rfind("\n") + 1 :][:90] * (row["verdict"] in TOLD)),
)  # fmt: skip
TOLD = (*BAD, SKIPPED, "refused")  # whose reason stands in the table


def perform(options: argparse.Namespace) -> int:
    """Do what the flags request; return the exit code."""
    if options.table:
        text = where.README.read_text(encoding="utf-8")
        where.README.write_text(where.with_table(text, where.documents()), encoding="utf-8")
        return 0
    try:
        first = first_of(options.gpus, options.emulate)
    except ValueError as error:
        return refuse(error)
    arch = options.arch or (ARCHS[0] if options.emulate else _arch_here(first))
    if arch not in ARCHS:
        return refuse(f"no GPU of {', '.join(ARCHS)} here ({arch or 'none'}): --emulate rehearses")
    if options.emulate and arch == "sm_103a":
        return refuse("--emulate: its kernels are those of sm_100a, which is what can be emulated")
    try:
        steps = chosen(steps_of(arch), options.only)
        plants = plants_of(options.plant, steps)
    except ValueError as error:
        return refuse(error)
    if options.list:
        rows = [{"name": step.name, "words": step.words, "quick": "quick" * step.quick,
                 "seconds": step.seconds} for step in steps]  # fmt: skip
        columns = (("step", "{name}"), ("", "{quick}"), ("limit", "{seconds} s"), ("", "{words}"))
        show(*table(f"bring-up of {arch}", columns, rows))
        return 0
    session = Session(options.folder or OUT / (arch + "-emulated" * options.emulate))
    bring_up = BringUp(session, arch, options, plants)
    code = 0
    if not options.bundle:
        code = bring_up.run(steps)
    everything = steps_of(arch)
    document = session.document(everything, bring_up.head())
    rows = [row for row in document["steps"] if row["verdict"] != NOT_RUN or row["about"]]
    named = {step.name for step in steps}
    mine = [row for row in rows if row["name"] in named]
    show(*table(f"bring-up of {arch}", COLUMNS, mine))
    paths = save(document, session.folder)
    if options.bundle:
        paths.append(pack(session, document))
    print("\n".join(f"wrote {path}" for path in paths))
    return code or int(any(map(is_unexpected, mine)))


def chosen(steps: Sequence[Step], names: Sequence[str]) -> list[Step]:
    """Steps of groups and names, or all. ValueError for a name that is none."""
    known = {step.name for step in steps} | {*GROUPS}
    for name in names:
        if name not in known:
            raise ValueError(f"--only {name}: a group ({', '.join(GROUPS)}) or a step (--list)")
    return [step for step in steps if not names or {step.name, step.group} & {*names}]


def plants_of(words: Sequence[str], steps: Sequence[Step]) -> dict[str, str]:
    """Step -> the fault. ValueError for another kind, or a step that is not run."""
    found = {}
    for word in words:
        kind, _, name = word.partition("=")
        if kind not in KINDS or name not in {step.name for step in steps}:
            raise ValueError(f"--plant {word}: one of {', '.join(KINDS)}, =, and a step (--list)")
        found[name] = kind
    return found


def first_of(gpus: Sequence[str], emulate: bool) -> str:
    """The GPU that measures. ValueError for what nvidia-smi does not have, and for one twice."""
    if gpus and emulate:
        raise ValueError(f"--gpus {gpus[0]} with --emulate, which needs none")
    for place, each in enumerate(gpus):
        if each in gpus[:place]:
            raise ValueError(f"--gpus {each}, twice: measurements need a GPU of their own")
        if not gpu.state(each):
            raise ValueError(f"--gpus {each}: nvidia-smi does not list it")
    return gpus[0] if gpus else ANY


def _arch_here(which: str) -> str:
    """Architecture of the GPU that torch sees; '' without one. Another process asks: a context that
    this one had would keep a GPU that hangs from being reset."""
    asked = "from lab.tools.place import native_arch; print(native_arch() or '')"
    said = subprocess.run(
        [sys.executable, "-c", asked], env=environment() | gpu.seen(which), text=True,
        stdout=subprocess.PIPE, timeout=gpu.PROBE_SECONDS, check=False,
    )  # fmt: skip
    return said.stdout.strip()
