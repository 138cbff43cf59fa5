"""`bench.py moe --model`: tables comparing layers of models with peers."""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lab.bench import steps
from lab.bench.gqa import read_bandwidth
from lab.bench.gqa_peers import error_of
from lab.bench.moe_peers import (
    ALL_OURS,
    LAYER,
    MAX_ERROR,
    ORDERED,
    OURS,
    PEERS,
    W2,
    W13,
    Launch,
    activations_of,
    versions_of,
)
from lab.bench.peers.run import Run, values_of
from lab.bench.perform import Bench
from lab.flags.moe import MODEL_TOKENS, OF_MODELS
from lab.measure.timing import capture, reason_of, replay, spreads
from lab.measure.turns import Contestant, figures, flush_buffer, how, meter, take_turns
from lab.problems.moe_models import WEIGHT_BYTES, Model, Tokens, model_of, tokens_of
from lab.report.documents import Document
from lab.report.moe import draw
from lab.tools.common import read_rows
from lab.tools.place import why_not_here
from lab.tools.tables import Table, show, table
from lab.tools.tables import markdown as markdown_of
from moe.mixed.config import ARCHS
from moe.models import of_model

TIMES = (
    ("peer", "{peer}"), ("as", "{how}"), ("us", "{us:.1f}"), ("TFLOP/s", "{tflops:.1f}"),
    ("GB/s of weights", "{weight_gbs:.0f}"), ("of bound", "{of_bound:.2f}"), ("bound", "{bound}"),
    ("of best peer", "{of_best:.2f}"), ("spread", "{spread:.1%}"), ("host us", "{host_us:.1f}"),
    ("SM MHz", "{sm_mhz:.0f}"), ("W", "{watts:.0f}"), ("error", "{error:.1e}"),
)  # fmt: skip
SUBJECT = ("model", "fmt", "part", "routing")


def title_of(row: Mapping[str, Any]) -> str:
    """Title of the problem of a row."""
    name, fmt, part, routing = (row[field] for field in SUBJECT)
    rows = f"{row['experts']} experts have rows, {row['most_rows']} at most"
    return f"{name}, {fmt}, {part}, {routing}, {row['tokens']} tokens: {rows}"


def ranked(rows: list[dict]) -> list[dict]:
    """The rows of one problem, those with a time also with `of_best`: the time of the quickest
    other peer, called in any way, over theirs. Peers have activations of the same dtype, or, where
    there are none, of any."""
    theirs = [row for row in rows if row["peer"] not in ALL_OURS and "us" in row]
    for row in rows:
        if "us" in row and theirs:
            kind = activations_of(row["peer"])
            alike = [other for other in theirs if activations_of(other["peer"]) == kind] or theirs
            row["of_best"] = min(other["us"] for other in alike) / row["us"]
    return rows


def by_subject(rows: Sequence[dict]) -> Iterator[tuple[str, list[dict]]]:
    """(model, format, part and routing in words; its rows) of each."""
    order = {key: number for number, key in enumerate(dict.fromkeys(map(_subject, rows)))}
    for key, group in itertools.groupby(sorted(rows, key=lambda r: order[_subject(r)]), _subject):
        yield ", ".join(key), [*group]


def _subject(row: dict) -> tuple[str, ...]:
    return tuple(row[field] for field in SUBJECT)


def lines_of(rows: Sequence[dict], how: str, mark: str) -> tuple[list[str], list[list[str]]]:
    """Heads, and a line per subject and peer: microseconds by tokens, the quickest marked."""
    counts = sorted({row["tokens"] for row in rows})
    lines = []
    for words, found in by_subject([row for row in rows if row["how"] == how]):
        best = {
            count: min((r["us"] for r in found if r["tokens"] == count and "us" in r), default=None)
            for count in counts
        }
        for peer in dict.fromkeys(row["peer"] for row in found):
            mine = {row["tokens"]: row for row in found if row["peer"] == peer}
            cells = []
            for count in counts:
                us = mine.get(count, {}).get("us")
                text = "-" if us is None else f"{us:.{1 if us < 100 else 0}f}"
                cells.append(mark.format(text) if us is not None and us == best[count] else text)
            reason = next((row["refused"] for row in mine.values() if "refused" in row), "")
            lines.append([words, peer, *cells, reason])
    return ["layer", "peer", *map(str, counts), ""], lines


def summary(rows: Sequence[dict], how: str = "graph") -> Table:
    """Microseconds by tokens, in CUDA graphs."""
    heads, lines = lines_of(rows, how, "{} *")
    return f"microseconds by tokens, as {how}", heads, lines


def markdown(rows: Sequence[dict]) -> str:
    """Return the table as Markdown."""
    return markdown_of(*lines_of(rows, "graph", "**{}**"))


INPUTS = "codes, factors and routing drawn; x standard normal, bf16; biases where a model has some"
GRAPH, EAGER = "graph", "eager"
SQUARE = 8192  # of the matrices whose product says how fast the tensor cores are
HOST_SAMPLES, HOST_CALLS = 5, 10
OF_STEPS = ("steps", "hidden", "names")

# -- figures of a problem -------------------------------------------------------------------------


def sizes_of(part: str, tokens: Tokens) -> dict[str, Any]:
    """FLOP and bytes of a part, each weight and activation once; weights of experts with rows, as
    four bits and a share of a scale factor."""
    layer, counts = tokens.model.layer, tokens.counts
    matrices = {W13: 2 * layer.hidden * layer.intermediate, W2: layer.hidden * layer.intermediate}
    product = W13 if part == ORDERED else part
    values = sum(count for name, count in matrices.items() if product in (name, LAYER))
    rows, used = sum(counts), sum(count > 0 for count in counts)
    weights = round(used * values * WEIGHT_BYTES[tokens.model.fmt])
    numbers = {
        LAYER: 2 * len(tokens.x) * layer.hidden,
        W13: len(tokens.x) * layer.hidden + rows * layer.intermediate,
        ORDERED: rows * (layer.hidden + layer.intermediate),
        W2: rows * (layer.intermediate + layer.hidden),
    }
    return {
        "experts": used,
        "most_rows": max(counts),
        "flop": 2 * rows * values,
        "weight_bytes": weights,
        "nbytes": weights + 2 * numbers[part],
    }


def with_rates(row: dict, machine: dict[str, float]) -> dict:
    """The row of a time, beside what memory and tensor cores would take at least."""
    memory, tensor = row["nbytes"] / machine["read_tbs"], row["flop"] / machine["tensor_tflops"]
    row["bound"] = "memory" if memory > tensor else "tensor"
    row["bound_us"] = max(memory, tensor) * 1e-6
    row["tflops"] = row["flop"] / row["us"] * 1e-6
    row["weight_gbs"] = row["weight_bytes"] / row["us"] * 1e-3
    row["of_bound"] = row["bound_us"] / row["us"]
    return row


def rates() -> dict[str, float]:
    """Rates of this GPU, measured: terabytes per second of a large read, TFLOP/s of torch's
    bf16."""
    a, b = (torch.randn(SQUARE, SQUARE, device="cuda").bfloat16() for _ in range(2))
    seconds = spreads([replay([partial(torch.mm, a, b)])])[0].median * 1e-6
    tensor = 2 * SQUARE**3 / seconds * 1e-12
    return {"read_tbs": read_bandwidth() * 1e-12, "tensor_tflops": tensor}


# -- peers ----------------------------------------------------------------------------------------


def made(
    model: Model, names: Sequence[str], counts: Sequence[int] = ()
) -> tuple[dict[str, Any], list[dict]]:
    """Peers with the weights laid out for them, or why there is none; and a row of each, with the
    seconds and the bytes that it took beyond those of the result.

    counts: numbers of tokens, for peers that compile their kernels for several in parallel.
    """
    found: dict[str, Any] = {}
    rows = []
    for name in names:
        before = _settled()
        start = time.perf_counter()
        row = {"kind": "weights", "model": model.name, "fmt": model.fmt, "peer": name}
        try:
            found[name] = PEERS[name](model)
            if warm := getattr(found[name], "warm", None):
                warm(counts)
        except ImportError as error:
            found[name] = row["refused"] = f"not installed: {error}"
        except Exception as refusal:  # noqa: BLE001  foreign libraries raise what they like
            found[name] = row["refused"] = reason_of(refusal)
        else:
            peak = _peak()
            held = _settled() - before
            seconds = time.perf_counter() - start
            row |= {"seconds": seconds, "held_bytes": held, "more_bytes": peak - before - held}
            row |= {"sources": getattr(found[name], "sources", "")}
        rows.append(row)
    return found, rows


def _settled() -> int:
    """Bytes that are in use once everything is done; peaks count from here."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def launches_of(part: str, tokens: Tokens, peers: dict[str, Any], rows: Sequence[dict]) -> Iterator:
    """(row, launch) of the peers that computed the part and agree with the first that did, ours
    unless it is refused: as a call, and as a graph of it. Rows say how far each is off, or why it
    is `refused`."""
    first: tuple[str, torch.Tensor] | None = None
    for row in rows:
        try:
            peer = peers[row["peer"]]
            if isinstance(peer, str):
                row["refused"] = peer
                continue
            launch = peer.launch(part, tokens)
            if row["how"] == GRAPH:
                launch = graph_of(getattr(peer, "planned", peer.launch)(part, tokens))
            y = values_of(launch)
            first = first or (row["peer"], y.float())
            row |= compared(y, first[1], first[0], getattr(peer, "max_error", MAX_ERROR["bf16"]))
        except Exception as refusal:  # noqa: BLE001  foreign libraries raise what they like
            row["refused"] = reason_of(refusal)
        else:
            yield row, launch


def compared(actual: torch.Tensor, expected: torch.Tensor, of: str, limit: float) -> dict[str, Any]:
    """Return how far a result differs from that of the peer `of`; raise ValueError beyond the
    limit."""
    error = error_of(actual, expected)
    if not error <= limit:
        raise ValueError(f"wrong: a row is {error:.1%} off {of}'s, limit {limit:.1%}")
    return {"compared_with": of, "error": error}


def graph_of(launch: Launch) -> Launch:
    """Capture the launch in a CUDA graph; the returned call replays it and returns its results."""
    stream, written = torch.cuda.Stream(), []
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            launch()
        graph = capture(lambda: written.append(launch()), 1)
    torch.cuda.current_stream().wait_stream(stream)

    def replayed(_held: Launch = launch) -> torch.Tensor:
        graph.replay()
        return written[-1]

    return Run(replayed, launch.finish, (launch,)) if isinstance(launch, Run) else replayed


# -- times ----------------------------------------------------------------------------------------


def time_part(
    part: str, tokens: Tokens, peers: dict[str, Any], options: argparse.Namespace
) -> list[dict]:
    """A row per peer, as a graph and as a call, with its times or why it has none."""
    model = tokens.model
    same = {"kind": "layer", "model": model.name, "fmt": model.fmt, "part": part}
    same |= {"routing": tokens.routing, "tokens": len(tokens.x), **sizes_of(part, tokens)}
    hows = (GRAPH, EAGER) if getattr(options, "eager", True) else (GRAPH,)
    rows = [{**same, "peer": name, "how": how} for name in peers for how in hows]
    buffer, contestants = flush_buffer() if options.flush else None, {}
    for row, launch in launches_of(part, tokens, peers, rows):
        try:
            if row["how"] == EAGER:
                row["host_us"] = host_us(launch)
            contestants[row["peer"], row["how"]] = Contestant(launch, buffer)
        except RuntimeError as refusal:
            row["refused"] = reason_of(refusal)
    gc.collect()
    by_name = {(row["peer"], row["how"]): row for row in rows}
    for name, turns in take_turns(contestants, options.rounds).items():
        by_name[name] |= figures(turns)
        with_rates(by_name[name], options.machine)
    return ranked(rows)


def host_us(launch: Launch) -> float:
    """Microseconds of the host for a call: of so few that the GPU's queue never fills."""
    samples = []
    for _ in range(HOST_SAMPLES):
        _settled()
        begin = time.perf_counter()
        for _ in range(HOST_CALLS):
            launch()
        samples.append((time.perf_counter() - begin) / HOST_CALLS * 1e6)
    return statistics.median(samples)


# -- told -----------------------------------------------------------------------------------------

WEIGHTS = (
    ("model", "{model}"), ("peer", "{peer}"), ("seconds", "{seconds:.2f}"),
    ("GB held", lambda row: f"{row['held_bytes'] * 1e-9:.2f}"),
    ("GB more for a while", lambda row: f"{row['more_bytes'] * 1e-9:.2f}"),
)  # fmt: skip
PROBLEMS = (
    ("model", "{model}"), ("part", "{part}"), ("routing", "{routing}"), ("tokens", "{tokens}"),
    ("experts", "{experts}"), ("FLOP", "{flop:.3g}"), ("bytes of weights", "{weight_bytes:,}"),
)  # fmt: skip


def without_gpu(options: argparse.Namespace) -> list[dict]:
    """Return figures that follow from sizes alone, for routing with equally many rows per
    expert."""
    rows = []
    for name, count, part in itertools.product(options.model, options.rows, options.parts):
        layer = of_model(name)
        router, slots = layer.router, count * layer.router.top_k
        used = min(layer.experts, slots) + router.shared
        each = slots // layer.experts if slots >= layer.experts else 1
        shown = {"kind": "static", "model": name, "part": part, "routing": "balanced"}
        matrices = {LAYER: 3, W13: 2, ORDERED: 2, W2: 1}[part]
        values = layer.hidden * layer.intermediate * matrices
        flop = 2 * values * (slots + count * router.shared)
        weights = round(used * values * WEIGHT_BYTES[options.format])
        shown |= {"tokens": count, "experts": used, "rows": each, "flop": flop}
        rows.append(shown | {"weight_bytes": weights})
    show(*table("would be timed", PROBLEMS, rows))
    return rows


class Layers(Bench):
    """Layers of models beside peers, which have weights of one model at a time."""

    kind = "layer"
    more = ("weights",)
    selects = ("peers", "model")

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.model: Model | None = None

    def problems(self) -> list[tuple[str, str, int, str]]:
        """(model, routing, tokens, part) of each problem."""
        if wrong := sorted(self.options.given & {*OF_STEPS}):
            raise ValueError(f"--{wrong[0]}: not with --model")
        if "rows" not in self.options.given:
            self.options.rows = MODEL_TOKENS
        asked = self.options
        return [*itertools.product(asked.model, asked.routing, asked.rows, asked.parts)]

    def setting(self) -> dict[str, Any]:
        return {"inputs": INPUTS, **how(self.options.rounds, flush=self.options.flush)}

    def machine(self) -> dict[str, Any]:
        self.options.machine = rates()
        found = {**self.options.machine, "clock_and_power": meter() or "unknown"}
        return {**found, "peers": versions_of(self.options.peers or [*PEERS])}

    def rows(self, problem: tuple[str, str, int, str]) -> list[dict]:
        name, routing, count, part = problem
        weights = []
        if self.model is None or self.model.name != name:
            self.model = self.peers = None
            _settled()
            self.model = model_of(name, self.options.format, "cuda")
            names = self.options.peers or [*PEERS]
            self.peers, weights = made(self.model, names, self.options.rows)
        tokens = tokens_of(self.model, count, routing)
        return [*weights, *time_part(part, tokens, self.peers, self.options)]

    def untimed(self, problems: Sequence[tuple[str, str, int, str]]) -> None:
        print(f"{OURS} is not timed: {why_not_here(ARCHS)}")

    def static(self, problems: Sequence[tuple[str, str, int, str]]) -> list[dict]:
        return without_gpu(self.options)

    def show(self, rows: Sequence[dict]) -> None:
        show(*table(title_of(rows[0]), TIMES, rows))

    def tell(self, rows: Sequence[dict]) -> None:
        weights = [row for row in rows if row["kind"] == "weights"]
        if weights:
            show(*table("weights laid out for their peer", WEIGHTS, weights))
        show(*summary([row for row in rows if row["kind"] == self.kind]))

    def subject(self, row: Mapping[str, Any]) -> str:
        return title_of(row)

    def has(self, row: Mapping[str, Any]) -> bool:
        wanted = {"peer": self.options.peers, "model": self.options.model}
        return all(not names or row[field] in names for field, names in wanted.items())

    def markdown(self, rows: Sequence[dict]) -> str:
        return markdown(rows)

    def draw(self, path: Path, document: Document) -> None:
        draw(path, document)


class Steps(steps.Steps):
    """Steps of a layer of experts."""

    def problems(self) -> Sequence[steps.Problem]:
        if wrong := sorted(self.options.given & {*OF_MODELS}):
            raise ValueError(f"--{wrong[0]}: only with --model")
        return super().problems()


def chosen(options: argparse.Namespace) -> Bench:
    """Layers with --model and for a file of layers, otherwise steps."""
    if options.show:
        layers = any(row["kind"] == Layers.kind for row in read_rows(options.show))
        return (Layers if layers else Steps)(options)
    return (Layers if options.model else Steps)(options)


BENCH = chosen
