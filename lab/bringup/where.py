"""The README's table of bring-ups in results/ by GPU, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelkit.compile.outside import json_file, require_fields
from lab.house.source import ROOT
from lab.tools.bringup_words import NOT_RUN, SKIPPED

RESULTS = ROOT / "results"
README = ROOT / "README.md"
BEGIN = "<!-- from results/bringup-*.json by `python scripts/bringup.py --table` -->"
END = "<!-- the end of that table -->"
# Operators -> beginnings of the names of their steps.
ROWS = {
    "`fmha.attention`": ("kernels.fmha", "random.fmha"),
    "`gqa_lowlatency.decode`": ("kernels.gqa",),
    "`mla.decode` and `sparse_decode`": ("kernels.mla", "random.mla"),
    "`moe.fused_moe`": ("kernels.moe", "random.moe"),
    "routing and quantising": ("kernels.route", "kernels.permutation", "kernels.combine",
                               "kernels.quantise"),
    "`kvcache`": ("kernels.append", "kernels.gather", "kernels.copy", "kernels.checksum",
                  "kernels.kvcache", "random.kvcache"),
    "DeepSeek-V4's sparse attention": ("kernels.compress", "kernels.query", "kernels.score",
                                       "kernels.topk", "kernels.dsv4"),
    "`q8_0`": ("kernels.q8_0",),
    "`fmha.merge`": ("kernels.merge",),
    "instructions": ("instructions", "assumptions"),
}  # fmt: skip
NOBODY = "B200"  # whose column says so while it has no file


def documents(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Bring-ups that are kept, real GPUs first. Those of one GPU are joined: a step that a later
    one ran replaces the earlier one's.
    """
    found: dict[tuple, dict[str, Any]] = {}
    every = (_document(path) for path in folder.glob("bringup-*.json"))
    for each in sorted(every, key=lambda document: document["date"]):
        kind = (each["emulated"], each["gpu"]["name"], each["arch"])
        found[kind] = _joined(found[kind], each) if kind in found else each
    return [found[kind] for kind in sorted(found)]


def _joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the newer document with the steps that only the older one ran."""
    ran = {row["name"]: row for each in (old, new) for row in each["steps"] if _ran(row)}
    since, until = old["date"].partition(" to ")[0], new["date"]
    same_month = until[:7] == since[:7]
    dates = f"{since} to {until[8:] if same_month else until}"
    return {**new, "date": dates, "steps": [*ran.values()]}


def _ran(row: Mapping[str, Any]) -> bool:
    return row["verdict"] not in (SKIPPED, NOT_RUN, "refused")


def _document(path: Path) -> dict[str, Any]:
    """FileError that names the field where a file is not what `Session.document` makes."""
    content, name = json_file(path), str(path)
    require_fields(name, content, {"date": str, "arch": str, "emulated": bool, "steps": list})
    require_fields(name, content.get("gpu"), {"name": str})
    for row in content["steps"]:
        require_fields(f"{name}: a step", row, {"name": str, "verdict": str})
    return content


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """A row per operator, a column per bring-up, and one for the GPU that nobody has run."""
    heads = ["", *map(_head, found)]
    nobody = not any(NOBODY in each["gpu"]["name"] for each in found)
    lines = [heads + [f"{NOBODY}, native"] * nobody]
    lines.append(["---"] * len(lines[0]))
    for name, beginnings in ROWS.items():
        cells = [_cell(each["steps"], beginnings) for each in found]
        lines.append([name, *cells, *["not run by anybody yet"] * nobody])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _head(document: Mapping[str, Any]) -> str:
    name = document["gpu"]["name"].removeprefix("NVIDIA ")
    place = f"{name}, {document['arch']}" if document["emulated"] else f"{name}, native"
    return f"{place}, {document['date']}"


def _cell(steps: Iterable[Mapping[str, Any]], beginnings: Sequence[str]) -> str:
    """5 of 6 right."""
    mine = [row for row in steps
            if row["name"].startswith(tuple(beginnings)) and _ran(row)]  # fmt: skip
    right = sum(row["verdict"] == "passed" for row in mine)
    return f"{right} of {len(mine)} right" if mine else "-"


def with_table(text: str, found: Sequence[Mapping[str, Any]]) -> str:
    """A page with the table of now between its marks. ValueError where they are not there."""
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (mark and end):
        raise ValueError(f"{README.name} has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table(found)}\n{END}{after}"
