"""What `run.py moe` does: a layer from router logits to its output, and how exact it is."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console

from kernelkit.tune.choices import forcing
from lab.cases.moe import Layer, errors_of, layer_of
from lab.measure.accuracy import EXTRA
from lab.measure.timing import cold_and_warm, figures, sets_here
from lab.tools import tables
from lab.tools.common import finish, refuse
from lab.tools.place import Place, choose_place, emulated, instructions
from moe import PackedExperts, Quantized, Scales, fused_moe, reference
from moe.choose import TUNED
from moe.formats import FORMATS
from ptxemu.host.command_line import checking
from ptxemu.report import Report
from ptxemu.watch import watched

QUANTISED = "of the format: torch that quantises where the kernels do; limit: 2 % more"
MIXED = "of the format: the definition with these weights; limit: 2^-7 apart from it"
FP8 = "of the format: torch that rounds to e4m3 where the kernels do; limit: 2^-6 apart from it"
SAID = {"quantised": QUANTISED, "bf16": MIXED, "e4m3": FP8}
FIELDS = tuple(field.name for field in dataclasses.fields(Quantized))
ERRORS = (
    ("\nrun as", "{backend}"),
    ("relative\nerror", "{relative:.2e}"),
    ("of the\nformat", "{reference:.2e}"),
    ("apart\nfrom it", "{apart:.2e}"),
    ("max abs\nerror", "{max_error:.2e}"),
    ("", lambda row: "ok" if row["ok"] else "OUT"),
)


class Stage:
    """What is being done, since when, and the launches behind us; drawn anew all the time."""

    def __init__(self, what: str, launches: Report | None = None) -> None:
        self.what, self.launches, self.start = what, launches, time.perf_counter()

    def __rich__(self) -> str:
        words = f"{self.what}, {time.perf_counter() - self.start:.0f} s"
        done = "" if self.launches is None else f", {len(self.launches.launches)} launches done"
        return words + done


def run(
    layer: Layer, experts: PackedExperts, place: Place, options: argparse.Namespace,
    console: Console,
) -> dict[str, Any]:  # fmt: skip
    """The result of the layer, the seconds until it was there, and GPU times where there is one."""
    device = place.device
    x, _, _, logits = (tensor.to(device) for tensor in layer.tensors)
    scales = Scales(**{name: _to(device, value) for name, value in vars(layer.scales).items()})
    given = {"activation": layer.form, "scales": scales, "tile_rows": layer.tile_rows}

    def step() -> Callable[..., torch.Tensor]:
        """Of weights of its own."""
        weights = layer.weights(_experts_to(device, experts))
        call = partial(fused_moe, x, weights, logits, layer.router, **given)
        return call if options.tile_n is None else _forced(call, options.tile_n)

    first, start = step(), time.perf_counter()
    with (
        watched() as seen,
        emulated(options) as launches,
        console.status(Stage("running it", seen)),
    ):
        y = first(**place.given)
    if device == "cuda":
        torch.cuda.synchronize()
    found = {"y": y.cpu(), "seconds": time.perf_counter() - start}
    if scales.h_amax is not None:
        found["h_amax"] = scales.h_amax.item()
    if device == "cuda":
        more = sets_here(experts.nbytes) - 1
        return found | figures(cold_and_warm([first, *(step() for _ in range(more))]))
    return found | {"launches": len(launches), "instructions": instructions(launches)}


def _forced(call: Callable[..., torch.Tensor], tile_n: int) -> Callable[..., torch.Tensor]:
    """With tiles of so many columns, which `fused_moe` leaves to sizes."""

    def inside(**more: Any) -> torch.Tensor:
        with forcing(TUNED.name, {"tile_n": tile_n}):
            return call(**more)

    return inside


def _to(device: str, value: Any) -> Any:
    """Elements and scale factors of quantised tensors as bytes, which every torch can copy."""
    if not isinstance(value, torch.Tensor) or value.element_size() > 1:
        return value.to(device) if isinstance(value, torch.Tensor) else value
    return value.view(torch.uint8).to(device).view(value.dtype)


def _experts_to(device: str, experts: PackedExperts) -> PackedExperts:
    w13, w2 = (
        Quantized(**{name: _to(device, getattr(w, name)) for name in FIELDS})
        for w in (experts.w13, experts.w2)
    )
    bias13, bias2 = (_to(device, bias) for bias in experts.biases)
    return dataclasses.replace(experts, w13=w13, w2=w2, bias13=bias13, bias2=bias2)


def judged(
    layer: Layer, place: Place, options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """Errors relative to the definition, and what `run` found beside the result."""
    with console.status(Stage("packing the weights")):
        experts = layer.packed()
    found = run(layer, experts, place, options, console)
    with console.status(Stage("computing the reference")):
        errors: dict[str, Any] = errors_of(layer, experts, found.pop("y"))
    eps = torch.finfo(layer.tensors[0].dtype).eps
    if layer.mixed:
        # In e4m3 a number of h between two codes may become the other one.
        limit = 2 * eps if layer.activations == "e4m3" else eps
        errors["ok"] = errors["apart"] <= options.tolerance * limit  # which a NaN is not
    else:
        slack = options.tolerance * (EXTRA * errors["reference"] + eps)
        errors["ok"] = errors["relative"] <= slack
    where = {"backend": place.backend, "arch": place.arch}
    return {"case": str(layer), **where, **errors, **found, "packed_bytes": experts.nbytes}


def show(row: dict[str, Any], console: Console) -> None:
    """A line: errors, and beside them the time of a launch or the work of the emulator."""
    console.print(row["case"])
    cost = (("warm\nus", "{warm_us:.1f}"), ("cold\nus", "{cold_us:.1f}"))
    if "warm_us" not in row:
        cost = (("\nlaunches", "{launches}"), ("warp-\ninstr.", "{instructions:,}"),
                ("\nseconds", "{seconds:.1f}"))  # fmt: skip
    tables.show(*tables.table("", (*ERRORS, *cost), [row]), console)


def show_amax(layer: Layer, found: float, console: Console) -> None:
    """What a calibration learns from it."""
    words = f"largest |h|: {found:.4g}"
    if FORMATS[layer.format].has_global:
        scale = reference.encode_scale(torch.tensor([found]), layer.format).item()
        words += f", which --h-scale {scale:.4g} maps to the largest number of {layer.format}"
    console.print(words)


def perform(options: argparse.Namespace) -> int:
    console = Console()
    try:
        layer = layer_of(options)
        place = choose_place(options, layer.archs)
        for name in ("w13", "w2"):  # refused before anything is drawn
            layer.mixed_product(name, place.arch) if layer.mixed else layer.product(name)
        with checking(options) as report:
            row = judged(layer, place, options, console)
    except (ValueError, NotImplementedError) as refused:
        return refuse(refused)
    show(row, console)
    if "h_amax" in row:
        show_amax(layer, row["h_amax"], console)
    console.print(SAID[layer.activations])
    console.print("within tolerance" if row["ok"] else "out of tolerance")
    return finish(options, report, {"row": row}, ok=row["ok"])
