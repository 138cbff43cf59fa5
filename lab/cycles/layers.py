"""`cycles.py layers`: models MoE layers at their true sizes and compares them with published
times of other implementations.

Weights are zeros, which take no memory before they are read. Tokens go where the reference sends
them; routing kernels run for their time alone, since of large grids some clusters are executed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cycle_model.binding.bound import BoundLaunch
from cycle_model.grid import COLD, LaunchModel, in_stream
from cycle_model.launch import bind
from cycle_model.parameters.parameter import Gpu
from cycle_model.sass.tools import HOW_TO_GET_TOOLS, find_tool
from lab.cycles import subjects
from lab.cycles.headline import RESULTS
from lab.cycles.peers import spread
from lab.cycles.published import reader_of
from lab.problems.moe import blank
from lab.problems.moe_models import logits_of
from lab.report.documents import Document
from lab.report.moe import draw_modelled
from lab.tools.common import refuse, write_json
from lab.tools.tables import show, table
from lab.verbs.emulate import key_of
from moe.arguments import Scales
from moe.formats import FORMATS
from moe.fused import Layer, Routed, run_experts, run_routing
from moe.models import ModelLayer, of_model
from moe.packing import PackedExperts
from moe.reference_routing import permutation, route
from ptxemu.watch import watched

RIVALS = RESULTS / "published_moe_rivals.csv"
ROUTE, QUANTISE, W13, W2, COMBINE = STEPS = ("route", "quantise", "w13", "w2", "combine")
OF_MODULE = {  # of a kernel -> the step; products are told apart by their order
    "moe.routing.topk_kernel": ROUTE,
    "moe.routing.linear_kernel": ROUTE,
    "moe.routing.permutation_kernel": ROUTE,
    "moe.quantiser": QUANTISE,
    "moe.routing.combine_kernel": COMBINE,
}
ARCH, H_SCALE = "sm_100a", 300.0


@dataclass(frozen=True, eq=False)
class Problem:
    """A layer of a model, in formats of activations and weights, with so many tokens."""

    name: str
    layer: ModelLayer
    activations: str
    weights: str
    tokens: int
    routing: str
    tile_rows: int | None = None

    @property
    def formats(self) -> str:
        """Return the formats as the table of rivals names them."""
        return f"{self.activations} x {self.weights}"

    @property
    def count(self) -> int:
        """Experts, shared ones too."""
        return self.layer.experts + self.layer.router.shared

    def made(self) -> tuple[Layer, Routed]:
        """Arguments of `moe.fused_moe`, and where its tokens go."""
        layer, router = self.layer, self.layer.router
        logits = logits_of(self.routing, self.tokens, layer, "cpu")
        ids, weights = route(logits, **vars(router))
        sorted_rows = permutation(ids, self.count)
        x = torch.zeros(self.tokens, layer.hidden, dtype=torch.bfloat16)
        both = {}
        if FORMATS[self.activations].has_global:
            both = {"scales": Scales(x=torch.ones(1), h=torch.full((1,), H_SCALE))}
        given = {
            "activation": layer.activation, "tile_rows": self.tile_rows, "backend": "emulate",
            "arch": ARCH,
        }  # fmt: skip
        if self.activations != self.weights:
            given["activations"] = self.activations
        made = Layer(x, logits, self._experts(), router, **given, **both)
        made.check()
        return made, Routed(weights, *vars(sorted_rows).values())

    def _experts(self) -> PackedExperts:
        layer, biases = self.layer, {}
        if layer.biases:
            biases = {
                "bias13": torch.zeros(self.count, 2 * layer.intermediate),
                "bias2": torch.zeros(self.count, layer.hidden),
            }
        sizes = (2 * layer.intermediate, layer.hidden), (layer.hidden, layer.intermediate)
        count = self.count
        w13, w2 = (blank((count, *size), self.weights, count, count, "cpu") for size in sizes)
        return PackedExperts(w13, w2, **biases)


def recorded(problem: Problem, clusters: int) -> list[tuple[str, BoundLaunch]]:
    """(step, launch) in the order of the layer; behind the routing so many clusters of each are
    executed."""
    layer, routed = problem.made()
    found = _launched(lambda: run_routing(layer), None)
    found += _launched(lambda: run_experts(layer, routed), lambda total: spread(total, clusters))
    return list(_named(found))


def _launched(call: Callable[[], Any], clusters: Any) -> list[tuple[str, BoundLaunch]]:
    """(entry, launch) of what has machine code. clusters: an option of the emulator."""
    with watched(record=True, limit=None, clusters=clusters) as report:
        call()
    recorded = [each for each in report.launches if each.recording and each.recording.cubin]
    return [(each.entry, bind(each.recording)) for each in recorded]


def _named(launches: Sequence[tuple[str, BoundLaunch]]) -> Iterator[tuple[str, BoundLaunch]]:
    """Yield launches with the step's name in place of the entry's name."""
    products = iter((W13, W2))
    for entry, launch in launches:
        key = key_of(entry)
        module = key.title() if key else entry
        step = next((step for name, step in OF_MODULE.items() if module.startswith(name)), None)
        yield step or next(products), launch


def modelled(problem: Problem, clusters: int, sets: Sequence[Gpu]) -> dict[str, Any]:
    """Microseconds of the layer with each set of parameters, and of its steps with the first."""
    began = time.perf_counter()
    launches = recorded(problem, clusters)
    row: dict[str, Any] = {
        "model": problem.name, "formats": problem.formats, "routing": problem.routing,
        "tokens": problem.tokens, "launches": len(launches),
    }  # fmt: skip
    times = []
    for gpu in sets:
        models = [LaunchModel(launch, gpu, memory=COLD) for _, launch in launches]
        found = [each.microseconds for each in in_stream(models)]
        if not times:
            for step in STEPS:
                mine = zip(launches, found, strict=True)
                row[step] = sum(us for (name, _), us in mine if name == step)
        times.append(sum(found))
    row |= {"us": times[0], "low_us": min(times), "high_us": max(times)}
    rival = rivals().get((problem.name, problem.formats, problem.routing, problem.tokens))
    if rival:
        row |= {"rival_us": rival[0], "rival": rival[1]}
    return row | {"seconds": time.perf_counter() - began}


def rivals() -> dict[tuple[str, str, str, int], tuple[float, str]]:
    """(model, formats, routing, tokens) -> microseconds, and whose."""
    return {
        (row["model"], row["formats"], row["routing"], int(row["tokens"])): (
            float(row["us"]),
            row["source"],
        )
        for row in reader_of(RIVALS)
    }


def problems_of(options: argparse.Namespace) -> list[Problem]:
    """Return the problems that the flags describe; raise ValueError for incompatible formats."""
    found = []
    for name in options.model:
        layer = of_model(name)
        weights = options.format or ("nvfp4" if name == "deepseek-v3" else "mxfp4")
        activations = options.activations or ("mxfp8" if weights == "mxfp4" else weights)
        for routing in options.routing:
            for tokens in options.tokens:
                given = activations, weights, tokens, routing, options.tile_rows
                found.append(Problem(name, layer, *given))
    return found


def _ratio(row: Any) -> str:
    if "rival" not in row:
        return "-"
    ratios = (row["rival_us"] / row[name] for name in ("us", "high_us", "low_us"))
    return "{:.2f} ({:.2f} .. {:.2f})".format(*ratios)


COLUMNS = (
    *(("layer", "{model}"), ("activations x\nweights", "{formats}"), ("routing", "{routing}")),
    ("tokens", "{tokens:,}"),
    *((f"{step}\nus", f"{{{step}:.1f}}") for step in STEPS),
    ("layer\nus", "{us:.1f}"),
    ("range", "{low_us:.1f} .. {high_us:.1f}"),
    ("published\nus", lambda row: f"{row['rival_us']:.1f}" if "rival" in row else "-"),
    ("our speed\nover its", _ratio),
)


def perform(options: argparse.Namespace) -> int:
    """The table, the file and the picture."""
    if find_tool("nvdisasm") is None:
        return refuse(HOW_TO_GET_TOOLS)
    rows: list[dict[str, Any]] = []
    try:
        gpu = subjects.gpu_of(options, options.gpu)
        sets = [gpu, *map(gpu.perturbed, range(options.perturbed))]
        setting = {"gpu": gpu.name, "parameters": subjects.origin(options)}
        for problem in problems_of(options):
            rows.append(modelled(problem, options.clusters, sets))
            words = "{model}, {tokens} tokens: {us:.1f} us, in {seconds:.0f} s"
            print(words.format_map(rows[-1]), file=sys.stderr, flush=True)
            if options.json:  # whoever stops here keeps what there is
                write_json(options.json, {**setting, "rows": rows})
    except (ValueError, NotImplementedError, OSError) as refused:
        return refuse(refused)
    show(*table("modelled, not measured", COLUMNS, rows), width=200)
    subjects.told(options)
    for text in dict.fromkeys(row["rival"] for row in rows if "rival" in row):
        print(f"published: {text}")
    if options.plot:
        draw_modelled(options.plot, Document("", data={"gpu": gpu.name, "rows": rows}))
    return 0
