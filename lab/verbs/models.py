"""What `run.py models` does: a layer of every model in every form that its products have, with the
model's own router, shared experts, biases and activation at reduced sizes, and its error."""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernelkit.call.launch import emulation
from lab.flags.moe import ONE_OF_EACH
from lab.measure.accuracy import EXTRA
from lab.measure.timing import heading
from lab.tools.common import finish, read_rows, refuse, save_rows, tracked
from lab.tools.tables import markdown, show
from moe import Router, Scales, arrange, fused_moe, pack, reference, unpack, unpack_biases
from moe.models import ModelLayer, of_model
from moe.reference_routing import route
from ptxemu import Options
from ptxemu.host.command_line import checking

HIDDEN, INTERMEDIATE, TOKENS = 192, 128, 6
LEAST_EXPERTS = 2  # times those that a token chooses, and of each group
H_SCALE = 300.0  # of nvfp4: magnitudes of h up to 9
STEERS = 0.1  # standard deviation of what is added to logits or to scores of experts
BF16 = torch.finfo(torch.bfloat16).eps


@dataclass(frozen=True)
class Form:
    """Formats of products.

    arch: architecture of their kernels.
    x: format of x and h, with weights in w."""

    arch: str
    x: str
    w: str

    def __str__(self) -> str:
        return f"{self.x} x {self.w}"


HOPPER, BLACKWELL = "sm_90a", "sm_100a"
FORMS = (
    Form(HOPPER, "bf16", "mxfp4"), Form(HOPPER, "bf16", "nvfp4"), Form(HOPPER, "e4m3", "mxfp4"),
    Form(BLACKWELL, "bf16", "mxfp4"), Form(BLACKWELL, "bf16", "nvfp4"),
    Form(BLACKWELL, "mxfp8", "mxfp8"), Form(BLACKWELL, "mxfp8", "mxfp4"),
    Form(BLACKWELL, "nvfp4", "nvfp4"), Form(BLACKWELL, "mxfp4", "mxfp4"),
)  # fmt: skip
GPUS = {HOPPER: "Hopper", BLACKWELL: "Blackwell"}
NUMBERS = ("bf16", "e4m3")  # of activations that experts are arranged for


@dataclass(frozen=True, eq=False)
class Problem:
    """A layer of reduced sizes.

    weights: weights of the experts, bf16.
    biases: biases of both products, or None.
    router: the router, with its tensors."""

    x: torch.Tensor
    logits: torch.Tensor
    router: Router
    layer: ModelLayer
    weights: tuple[torch.Tensor, torch.Tensor]
    biases: tuple[torch.Tensor, torch.Tensor] | None


def reduced(name: str) -> ModelLayer:
    """The layer of the model but for sizes: fewer experts, of whom a token chooses as many."""
    layer = of_model(name)
    router = layer.router
    experts = min(layer.experts, max(LEAST_EXPERTS * router.top_k, 4 * router.n_group))
    return replace(layer, hidden=HIDDEN, intermediate=INTERMEDIATE, experts=experts)


def problem_of(name: str) -> Problem:
    """Standard normal tokens, weights such that products are, too."""
    layer, generator = reduced(name), torch.Generator().manual_seed(zlib.crc32(name.encode()))
    count, inner = layer.experts + layer.router.shared, layer.intermediate

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    w13 = normal(count, 2 * inner, layer.hidden) * layer.hidden**-0.5
    w2 = normal(count, layer.hidden, inner) * inner**-0.5
    biases = (normal(count, 2 * inner), normal(count, layer.hidden)) if layer.biases else None
    steers = {field: STEERS * normal(layer.experts) for field in layer.router_tensors}
    x, logits = normal(TOKENS, layer.hidden).bfloat16(), normal(TOKENS, layer.experts)
    router = replace(layer.router, **steers)
    return Problem(x, logits, router, layer, (w13.bfloat16(), w2.bfloat16()), biases)


def errors_of(problem: Problem, form: Form) -> dict[str, Any]:
    """Return relative errors in the norm.

    error: error of the kernels against the definition with the same weights in fp64.
    rounding: error of torch with the same roundings.
    weights: error of the format of the weights against weights in bf16."""
    given = {"biases": problem.biases} if problem.biases else {}
    packed = pack(*problem.weights, form.w, **given)
    numbers, has_global = form.x in NUMBERS, form.x == "nvfp4"
    scales = Scales(h=torch.tensor([H_SCALE])) if has_global else Scales()
    experts = arrange(packed, form.x) if numbers else packed
    more = {} if numbers else {"activations": form.x}
    y = fused_moe(
        problem.x, experts, problem.logits, problem.router, activation=problem.layer.activation,
        scales=scales, arch=form.arch, **more,
    ).double()  # fmt: skip
    routed = route(problem.logits, **vars(problem.router))
    given = {"biases": unpack_biases(packed), **vars(problem.layer.activation)}
    exact = reference.layer(problem.x, *unpack(packed), routed, **given)
    rounding: dict[str, Any] = {} if form.x == "bf16" else {"fmt": form.x, "h_scale": scales.h}
    if form.x == "e4m3":
        rounding["h_scale"] = torch.ones(1)
    alike = reference.layer(problem.x, *unpack(packed), routed, **given, **rounding)
    given["biases"] = problem.biases or (None, None)
    plain = reference.layer(problem.x, *problem.weights, routed, **given)
    found = {"error": apart(y, exact), "rounding": apart(alike, exact)}
    ok = found["error"] <= EXTRA * found["rounding"] + BF16
    return found | {"weights": apart(exact, plain), "ok": ok}


def apart(mine: torch.Tensor, other: torch.Tensor) -> float:
    """Relative, in the norm."""
    return ((mine.double() - other.double()).norm() / other.double().norm()).item()


def rows_of(names: Iterable[str]) -> list[dict[str, Any]]:
    """A row for every model and form."""
    both = [(name, form) for name in names for form in FORMS]
    return [
        {"kind": "layer", "model": name, **vars(form), **errors_of(problem_of(name), form)}
        for name, form in tracked(both, "layers")
    ]


def lines_of(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Heads, and a line for each form: percent, with OUT where that is more than rounding gives; at
    the end what weights lose in their format, the most of all models."""
    rows = [row for row in rows if row["kind"] == "layer"]
    names = [*dict.fromkeys(row["model"] for row in rows)]
    lines = []
    for form in dict.fromkeys(Form(row["arch"], row["x"], row["w"]) for row in rows):
        own = [
            row for row in rows if (row["arch"], row["x"], row["w"]) == tuple(vars(form).values())
        ]
        cells = [f"{row['error']:.2%}" + " OUT" * (not row["ok"]) for row in own]
        lines.append([GPUS[form.arch], str(form), *cells, f"{max(r['weights'] for r in own):.0%}"])
    return ["on", "x, h x weights", *names, "weights alone"], lines


def perform(options: argparse.Namespace) -> int:
    if options.show:
        heads, lines = lines_of(read_rows(options.show))
        print(markdown(heads, lines))
        return 0
    try:
        with checking(options) as report, emulation(Options(limit=None)):
            rows = rows_of(options.model or ONE_OF_EACH)
    except (ValueError, NotImplementedError) as refused:
        return refuse(refused)
    heads, lines = lines_of(rows)
    title = (
        f"{TOKENS} tokens, H {HIDDEN}, I {INTERMEDIATE}: error relative to the same weights in fp64"
    )
    if options.markdown:
        print(markdown(heads, lines))
    else:
        show(title, heads, lines)
    if options.json:
        save_rows(options.json, [heading(tokens=TOKENS, hidden=HIDDEN, intermediate=INTERMEDIATE),
                                 *rows])  # fmt: skip
    options.json = None
    return finish(options, report, {}, ok=all(row["ok"] for row in rows))
