"""`cycles.py published`: compares modelled times of FlashAttention-4 with published ones."""

from __future__ import annotations

import argparse
import csv
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cycle_model import gpus
from cycle_model.edits import Edit, edited
from cycle_model.parameters.parameter import Gpu
from cycle_model.sass.tools import HOW_TO_GET_TOOLS, find_tool
from lab.cycles import peers, sample, subjects
from lab.cycles.beside import SUMMARY, summary
from lab.cycles.peers import Shape
from lab.cycles.sample import Clusters, Timed
from lab.cycles.subjects import draw
from lab.tools.common import refuse, write_json
from lab.tools.tables import show, table
from ptxemu.errors import PtxEmuError
from ptxemu.record.recording import Recording

NEEDED = ("hd", "causal", "batch", "seqlen", "fa4_tflops")
WIDTH = 2048  # of a model, heads times their dimension, where a row names no heads
MOST_FITTED = 3  # scalars: more would fit anything
TRAINED = 128  # the head dimension on which scalars are fitted
COLUMNS = (
    ("rows", "{group}"),
    ("batch", "{batch}"),
    ("tokens", "{seqlen}"),
    ("published\nTFLOP/s", "{real:.0f}"),
    ("modelled\nTFLOP/s", "{modelled:.0f}"),
    ("range", lambda row: f"{row['low']:.0f} .. {row['high']:.0f}"),
    ("us", "{modelled_us:.0f}"),
    ("error of time", "{error:+.1%}"),
)
FITS = (
    ("fitted on hd128", "{what}"),
    ("rows", "{rows}"),
    ("hd128", "{trained:.1%}"),
    ("all others", "{tested:.1%}"),
)


@dataclass(frozen=True)
class Published:
    """A row of a file. tflops: of FlashAttention-4."""

    table: str
    gpu: str
    shape: Shape
    tflops: float

    @property
    def group(self) -> str:
        kind = "causal" if self.shape.causal else "full"
        return f"{self.table} hd{self.shape.head_dim} {kind}".strip()

    @property
    def us(self) -> float:
        return self.shape.flops / self.tflops * 1e-6


def reader_of(path: Path) -> csv.DictReader:
    """The rows of a published table; lines that begin with # are none."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return csv.DictReader(line for line in lines if line[:1] != "#")


def published_in(path: Path) -> Iterator[Published]:
    """The rows of a file that have a time of FlashAttention-4. ValueError for a file that lacks a
    column, or says something else than a number."""
    rows = reader_of(path)
    missing = [name for name in NEEDED if name not in (rows.fieldnames or ())]
    if missing:
        raise ValueError(f"{path}: no column {missing[0]!r}; it needs {', '.join(NEEDED)}")
    for row in rows:
        if row["fa4_tflops"]:
            try:
                yield _published(row)
            except ValueError as error:
                raise ValueError(f"{path}: {row}: {error}") from None


def _published(row: dict[str, str]) -> Published:
    head_dim = int(row["hd"])
    heads = int(row.get("heads") or max(WIDTH // head_dim, 1))
    kv_heads = int(row.get("kv_heads") or heads)
    given = int(row["batch"]), int(row["seqlen"])
    shape = Shape(head_dim, bool(int(row["causal"])), *given, heads, kv_heads)
    gpu = row.get("gpu") or row.get("device_inferred") or "B200"
    return Published(row.get("table") or "", gpu, shape, float(row["fa4_tflops"]))


def perform(options: argparse.Namespace) -> int:
    if find_tool("nvdisasm") is None:
        return refuse(HOW_TO_GET_TOOLS)
    try:
        subjects.check(options)
        found = [each for path in options.files for each in published_in(path)]
        problems = [each for each in found if not options.only or each.group in options.only]
        if len(options.fit) > MOST_FITTED:
            raise ValueError(f"--fit is given {len(options.fit)} times; at most {MOST_FITTED}")
        if options.fit and options.parameters:
            raise ValueError(
                "--fit conflicts with --parameters: one fits values, the other has measured ones"
            )
        grid = [_values(text) for text in options.fit]
        if options.source:
            peers.from_source(options.source)
        with peers.flash_attention(_gpu_of(problems)) as function:
            rows, timed = modelled(problems[:: options.every], function, options)
    except (ValueError, OSError) as refused:
        return refuse(refused)
    done = [row for row in rows if "refused" not in row]
    if not done:
        return refuse("no row could be modelled")
    show(*table("modelled and published", COLUMNS, rows))
    sums = summary(done)
    show(*table("in all", SUMMARY, sums))
    document = {"parameters": subjects.origin(options), "rows": rows, "summary": sums}
    subjects.told(options)
    if grid:
        document["fit"] = fitted(timed, grid)
        show(*table("", FITS, [document["fit"]]))
    if options.json:
        write_json(options.json, document)
    if options.plot:
        draw(options.plot, done, "FlashAttention-4, modelled and published")
    return 0


def _gpu_of(problems: Sequence[Published]) -> Gpu:
    """GPU of all rows. ValueError where they have more than one, or none."""
    names = sorted({problem.gpu for problem in problems})
    if len(names) != 1:
        found = f"rows of {len(names)} GPUs, {', '.join(names)}"
        raise ValueError(f"{found}: name those of one, --only")
    return gpus.named(names[0])


def modelled(
    problems: Sequence[Published], function: Callable[..., Any], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[tuple[Published, Timed]]]:
    """A line per problem, and what models those again that could be; rows of the same shape share
    a recording."""
    known: dict[Shape, Timed] = {}
    rows, timed = [], []
    for problem in problems:
        began = time.perf_counter()
        row = {"group": problem.group, "gpu": problem.gpu, "memory": "cold",
               "batch": problem.shape.batch, "seqlen": problem.shape.seqlen,
               "real": problem.tflops, "real_us": problem.us}  # fmt: skip
        try:
            gpu = subjects.gpu_of(options, problem.gpu)
            if problem.shape not in known:
                known[problem.shape] = timed_of(function, problem.shape, gpu, options.clusters)
            model = known[problem.shape]
            others = [gpu.perturbed(seed) for seed in range(options.perturbed)]
            us, *rest = (model.microseconds(each) for each in (gpu, *others))
        except (ValueError, NotImplementedError, PtxEmuError) as error:
            rows.append({**row, "refused": f"{type(error).__name__}: {error}"})
        else:
            low, high = min([us, *rest]), max([us, *rest])
            rates = (problem.shape.flops / each * 1e-6 for each in (us, high, low))
            row |= dict(zip(("modelled", "low", "high"), rates, strict=True))
            row |= {"modelled_us": us, "low_us": low, "high_us": high}
            row |= {"error": us / problem.us - 1, "seconds": time.perf_counter() - began}
            rows.append(row)
            timed.append((problem, model))
        show(*table("", COLUMNS, rows[-1:]))
    return rows, timed


def timed_of(function: Callable[..., Any], shape: Shape, gpu: Gpu, clusters: int) -> Timed:
    """Recorded with so many clusters of the grid, or as a persistent kernel with fewer heads."""
    group = shape.heads // shape.kv_heads

    def record(batch: int, kv_heads: int, queries: int, numbers: Clusters) -> Sequence[Recording]:
        given = replace(shape, batch=batch, heads=kv_heads * group, kv_heads=kv_heads)
        return peers.recorded(peers.call_of(function, given, queries), numbers)

    size = shape.batch, shape.kv_heads, shape.seqlen
    return sample.timed_of(record, size, gpu, clusters, even=not shape.causal)


def fitted(
    timed: Sequence[tuple[Published, Timed]], grid: Sequence[Sequence[Edit]]
) -> dict[str, Any]:
    """Best of all choices of values that one with the least mean error on `TRAINED`, and what it
    gives on the other rows. ValueError without rows of both kinds."""
    parts = [
        [each for each in timed if (each[0].shape.head_dim == TRAINED) == wanted]
        for wanted in (True, False)
    ]
    if not all(parts):
        raise ValueError(f"--fit takes rows of head dimension {TRAINED} and others")

    def error(part: Sequence[tuple[Published, Timed]], edits: Sequence[Edit]) -> float:
        errors = [
            abs(model.microseconds(edited(gpus.named(problem.gpu), edits)) / problem.us - 1)
            for problem, model in part
        ]
        return float(np.mean(errors))

    trained, best = min(
        ((error(parts[0], edits), edits) for edits in itertools.product(*grid)),
        key=lambda pair: pair[0],
    )
    return {
        "what": ", ".join(edit.text for edit in best),
        "rows": f"{len(parts[0])} and {len(parts[1])}",
        "trained": trained,
        "tested": error(parts[1], best),
    }


def _values(text: str) -> list[Edit]:
    """NAME=V1,V2,...: an edit of each value. ValueError for what is no parameter of the B200."""
    name, _, values = text.partition("=")
    edits = [Edit.parsed(f"{name}={value}") for value in values.split(",")]
    edited(gpus.named("B200"), edits)
    return edits
