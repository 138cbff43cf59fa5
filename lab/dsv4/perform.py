"""`run.py dsv4`: runs a layer over the cache step by step and compares it with its judge."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from kernelkit.compile.arch import written_for
from kvcache.books.slot_pool import Sizes
from kvcache.layouts.layout import Layout
from kvcache.layouts.models import Options as CacheOptions
from kvcache.memory.cache import Cache
from kvcache.planner.capacity import usage
from kvcache.planner.traffic import step_traffic
from lab.dsv4.judge import Finding, Judge, Verdict
from lab.dsv4.layer import Layer, layout_of
from lab.dsv4.model import Recompute
from lab.dsv4.weights import Weights
from lab.flags.dsv4 import ARCHS, ARCHS_OF_EXPERTS, MUTATIONS, Definition, Shape
from lab.tools import tables
from lab.tools.common import finish, refuse
from lab.tools.place import Place, choose_place, emulated
from lab.tools.style import picture
from ptxemu.host.command_line import checking

VOCABULARY = 997
COMPONENTS = (
    *("window", "entries", "keys", "scores", "selected", "attention", "end to end", "experts"),
)
HEADS = {
    "window": "win-\ndow", "entries": "en-\ntries", "keys": "\nkeys", "scores": "sco-\nres",
    "attention": "at-\ntn", "end to end": "end\nto e.", "experts": "\nmoe",
}  # fmt: skip
SWAPPED = "scores"  # what of it differs are entries, not numbers
B200 = 8e12  # bytes a second, of its data sheet
SHORTER, LATER = 37, 2  # a prompt than the one before it, steps until the next request arrives


@dataclass
class Row:
    """A step.

    differ: stored numbers that differ from the model's.
    swapped: selected entries that the model would not have selected.
    live: bytes of the cache that the requests need.
    gpu_seconds: time of its kernels up to attention, on a GPU."""

    step: int
    tokens: int
    lengths: list[int]
    verdict: Verdict
    read: int
    written: int
    live: int
    seconds: float
    gpu_seconds: float

    def document(self) -> dict[str, Any]:
        """Return the row for JSON."""
        found = {name: vars(finding) for name, finding in self.verdict.findings.items()}
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "verdict"}
        return {**plain, "components": found, "ok": self.verdict.ok}


class Run:
    """The layer, its judge and the tokens."""

    def __init__(self, options: argparse.Namespace, place: Place) -> None:
        self.options = options
        spelt = {field.name for field in fields(Shape)} & vars(options).keys()
        shape = Shape(**{name: getattr(options, name) for name in spelt})
        weights = Weights(shape, options.seed)
        layout = layout_of(
            shape.ratio, CacheOptions(record=options.record, draft=options.draft,
                                      online_hca=options.online_hca),
        )  # fmt: skip
        longest = options.prefix + options.steps * max(1, options.draft) + 1
        blocks = options.requests * layout.blocks(longest)
        where = {"backend": place.backend, "arch": place.arch}
        self.cache = Cache(layout, Sizes(blocks, options.requests), device=place.device, **where)
        self.layer = Layer(self.cache, weights, where, longest)
        definition = MUTATIONS[options.mutate] if options.mutate else Definition()
        records = {array.name: array.record for array in (*layout.rings, *layout.streams)}
        stored = {"window": records["swa"], "keys": records.get("index")}
        model = Recompute(weights, stored, definition)
        self.judge = Judge(self.layer, model)
        random = np.random.default_rng(options.seed)
        names = [f"request {number}" for number in range(options.requests)]
        self.prompts = {
            name: max(1, options.prefix - SHORTER * number) for number, name in enumerate(names)
        }
        self.tokens = {name: random.integers(0, VOCABULARY, longest) for name in names}
        self.random, self.requests = random, {}
        table = torch.Generator().manual_seed(options.seed + 1)
        self.embedding = torch.randn(VOCABULARY, shape.hidden, generator=table).bfloat16()

    @property
    def steps(self) -> int:
        """At least, for the progress bar."""
        chunks = -(-self.options.prefix // self.options.chunk)
        return self.options.steps + max(chunks, LATER * (self.options.requests - 1))

    def rows(self) -> Iterator[Row]:
        """Step after step until every request has been decoded as often as was asked."""
        decoded = dict.fromkeys(self.prompts, 0)
        number = 0
        while min(decoded.values()) < self.options.steps:
            arriving = list(self.prompts)[: number // LATER + 1]
            for name in arriving:
                if name not in self.requests:
                    prompt = self.tokens[name][: self.prompts[name]]
                    self.requests[name] = self.cache.admit(name, prompt).request
            batch: dict[str, int] = {}
            for name in arriving:
                left = self.prompts[name] - self.requests[name].length
                if left > 0:
                    batch[name] = min(left, self.options.chunk)
                elif decoded[name] < self.options.steps:
                    decoded[name] += 1
                    batch[name] = max(1, self.options.draft)
            yield self._step(number, batch)
            self._take_back(batch)
            number += 1

    def _step(self, number: int, batch: Mapping[str, int]) -> Row:
        """The next tokens of some requests."""
        start = time.perf_counter()
        given = {}
        for name, count in batch.items():
            request = self.requests[name]
            given[request] = self.tokens[name][request.length : request.length + count]
        with self.cache.step(given) as step:
            ids = np.concatenate([*given.values()])
            taps = self.layer.run(step, self.embedding[torch.from_numpy(ids)])
            seconds = time.perf_counter() - start
            inputs = {
                self.requests[name]: self.embedding[torch.from_numpy(self.tokens[name])]
                for name in batch
            }
            verdict = self.judge.step(step, taps, inputs)
            spans = list(zip(step.starts.tolist(), step.lengths.tolist(), strict=True))
        layout = self.cache.layout
        live = sum(usage(layout, length).live for _, length in spans)
        return Row(
            number, len(ids), [length for _, length in spans], verdict,
            *self._bytes(spans), live, seconds, taps.gpu_seconds,
        )  # fmt: skip

    def _bytes(self, spans: list[tuple[int, int]]) -> tuple[int, int]:
        """Bytes of the cache, that this layer reads and writes in a step."""
        layout, shape = self.cache.layout, self.layer.shape
        selected = {"csa": shape.select} if shape.kind == "csa" else {}
        read = written = 0
        for part in step_traffic(layout, spans, selected):
            if shape.ratio or part.name == "swa":
                copies = layout.find(part.name).copies
                read, written = read + part.read // copies, written + part.written // copies
        return read, written

    def _take_back(self, batch: Mapping[str, int]) -> None:
        """Some draft tokens were wrong."""
        for name, count in batch.items():
            request = self.requests[name]
            if self.options.draft > 1 and request.length > self.prompts[name]:
                self.cache.rollback(request, int(self.random.integers(0, count)))


def merged(rows: list[Row]) -> dict[str, Finding]:
    """Return by component the worst finding of these steps and the total count of differing
    numbers."""
    found = {}
    for name in COMPONENTS:
        each = [row.verdict.findings[name] for row in rows if name in row.verdict.findings]
        if each:
            worst = max(finding.error for finding in each), max(finding.share for finding in each)
            differ, of = (sum(getattr(f, field) for f in each) for field in ("differ", "of"))
            found[name] = Finding(*worst, differ, of)
    return found


def show(rows: list[Row], every: int, console: Console) -> None:
    """A line for each `every` steps, with the worst of them; shares are of limits. else: numbers
    that the model rounds to something else; swap: entries that it would not have selected."""
    columns = [("\nstep", "{step}"), ("to-\nkens", "{tokens}")]
    columns += [(HEADS[name], f"{{{name}:.0%}}") for name in merged(rows) if name in HEADS]
    columns += [("\nelse", "{differ}"), ("\nswap", "{swapped}"), ("KB\nread", "{read:,.0f}"),
                ("KB\nwrit", "{written:,.1f}"), ("\ns", "{seconds:.1f}")]  # fmt: skip
    lines = (_line(rows[first : first + every]) for first in range(0, len(rows), every))
    tables.show(*tables.table("", columns, lines), console)


def _line(rows: list[Row]) -> dict[str, Any]:
    """Steps that stand together."""
    found = merged(rows)
    swapped = found[SWAPPED].differ if SWAPPED in found else 0
    return {name: finding.share for name, finding in found.items()} | {
        "step": rows[-1].step,
        "tokens": max(max(row.lengths) for row in rows),
        "differ": sum(finding.differ for finding in found.values()) - swapped,
        "swapped": swapped,
        "read": sum(row.read for row in rows) / 1e3,
        "written": sum(row.written for row in rows) / 1e3,
        "seconds": sum(row.seconds for row in rows),
    }


def summary(rows: list[Row], layout: Layout, console: Console) -> dict[str, Any]:
    """The worst of every component, and what the last step needs of the cache."""
    found, last = merged(rows), rows[-1]
    held = [usage(layout, length) for length in last.lengths]
    cache = {
        "blocks": sum(use.blocks for use in held),
        "block_bytes": sum(use.block_bytes for use in held),
        "state_bytes": sum(use.state_bytes for use in held),
        "live_bytes": sum(use.live for use in held),
        "read": last.read,
        "written": last.written,
        "seconds_at_8TBps": (last.read + last.written) / B200,
        "seconds_here": last.seconds,
    }
    for name, finding in found.items():
        words = f"{name}: error {finding.error:.1e}, {finding.share:.0%} of the limit"
        if finding.of:
            words += f"; {finding.differ} of {finding.of:,} are not the model's"
        console.print(words)
    times = [row.gpu_seconds for row in rows if row.tokens == last.tokens]
    if any(times):
        cache["gpu_seconds"] = seconds = statistics.median(times)
        console.print(
            f"compressing, selecting and attending took {seconds * 1e6:.1f} us a step, "
            f"median of {len(times)} steps of {last.tokens} tokens"
        )
    console.print(
        f"the last step's requests hold {cache['blocks']} blocks of {layout.block_bytes:,} bytes "
        f"and states of {cache['state_bytes']:,}, of which {cache['live_bytes']:,} are needed; it "
        f"read {cache['read']:,} and wrote {cache['written']:,} bytes of the cache, "
        f"{cache['seconds_at_8TBps'] * 1e6:.2f} us at 8 TB/s, and took {last.seconds:.1f} s here"
    )
    return {"components": {name: vars(finding) for name, finding in found.items()}, "cache": cache}


def track(run: Run, console: Console) -> list[Row]:
    """All steps, with a bar on a terminal."""
    rows: list[Row] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("steps", total=run.steps)
        for row in run.rows():
            rows.append(row)
            bar.advance(task)
            shares = ", ".join(
                f"{name} {finding.share:.0%}" for name, finding in row.verdict.findings.items()
            )
            bar.update(task, description=f"{max(row.lengths)} tokens: {shares}")
    return rows


def check(options: argparse.Namespace) -> None:
    """ValueError for numbers that are none."""
    for name in ("requests", "prefix", "chunk", "steps", "every"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: at least 1")
    if options.draft < 0:
        raise ValueError(f"--draft {options.draft}: at least 0")


def plot(rows: list[Row], path: Path) -> None:
    """Shares of the limits over steps."""
    with picture(path) as (_, ((axis,),)):
        for name in COMPONENTS:
            found = [(row.step, row.verdict.findings.get(name)) for row in rows]
            points = [(step, finding.share) for step, finding in found if finding]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, linewidth=1)
        axis.axhline(1.0, color="red", linewidth=1)
        axis.set(xlabel="step", ylabel="error / limit")
        axis.legend(fontsize=8)


def perform(options: argparse.Namespace) -> int:
    console = Console()
    try:
        place = choose_place(options, ARCHS)
        check(options)
        if options.experts and written_for(place.arch) not in ARCHS_OF_EXPERTS:
            raise ValueError(f"experts run on {ARCHS_OF_EXPERTS[0]}, not {place.arch}: --experts 0")
        with checking(options) as report, emulated(options):
            run = Run(options, place)
            rows = track(run, Console(stderr=True))
    except (ValueError, NotImplementedError) as refused:
        return refuse(refused)
    layout = run.cache.layout
    console.print(f"{options.kind}, entries {options.record}, {place}")
    show(rows, options.every, console)
    found = summary(rows, layout, console)
    ok = all(row.verdict.ok for row in rows)
    if options.plot:
        plot(rows, options.plot)
    console.print("every component is within its limit" if ok else "[red]OUT OF LIMIT[/]")
    plain = (bool, int, str)
    words = {name: value for name, value in vars(options).items() if isinstance(value, plain)}
    steps = [row.document() for row in rows]
    return finish(options, report, {"flags": words, "ok": ok, **found, "steps": steps}, ok=ok)
