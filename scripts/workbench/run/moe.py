"""What run_moe.py does: a layer from router logits to its output, and how exact it is."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kernelkit.launch import Emulation, emulation, written_for
from moe import PackedExperts, Quantized, Scales, fused_moe, pack, reference, unpack
from moe.formats import FORMATS
from moe.forward import ARCHS
from moe.reference_routing import route
from ptxemu.check import text
from ptxemu.host.command_line import checking, wanted
from ptxemu.options import Options
from workbench.cases.decode import native_arch
from workbench.cases.moe import Layer, layer_of
from workbench.common import refuse, write_json
from workbench.timing import measure, setting

# Of the reference's own error: ties that fall otherwise, and a sigmoid that is approximated.
EXTRA = 1.02


class Stage:
    """What is being done, since when, and the launches behind us; drawn anew all the time."""

    def __init__(self, what: str, emulated: Emulation | None = None) -> None:
        self.what, self.emulated, self.start = what, emulated, time.perf_counter()

    def __rich__(self) -> str:
        words = f"{self.what}, {time.perf_counter() - self.start:.0f} s"
        if self.emulated is None:
            return words
        return f"{words}, {len(self.emulated.reports)} launches done"


@contextmanager
def stage(console: Console, what: str, emulated: Emulation | None = None) -> Iterator[None]:
    """On a terminal, a line that says what takes so long."""
    with console.status(Stage(what, emulated)):
        yield


def run(layer: Layer, experts: PackedExperts, arguments: Any, console: Console) -> dict[str, Any]:
    """The result of the layer, the seconds until it was there, and GPU times where there is one."""
    device = "cuda" if arguments.backend == "cuda" else "cpu"
    x, _, _, logits = (tensor.to(device) for tensor in layer.tensors)
    scales = layer.scales
    moved = {name: _to(device, value) for name, value in vars(scales).items()}
    scales = Scales(**moved)
    given = {"activation": layer.form, "scales": scales, "tile_rows": layer.tile_rows}
    options = Options(policy=arguments.policy, seed=arguments.seed, limit=None)
    step = partial(fused_moe, x, _experts_to(device, experts), logits, layer.router, **given)
    start = time.perf_counter()
    with emulation(options) as emulated, stage(console, "running the layer", emulated):
        y = step(backend=arguments.backend)
    if device == "cuda":
        torch.cuda.synchronize()
    found = {"y": y.cpu(), "seconds": time.perf_counter() - start}
    if scales.h_amax is not None:
        found["h_amax"] = scales.h_amax.item()
    if device == "cuda":
        times = measure(step)
        return found | {"warm_us": times.warm * 1e6, "cold_us": times.cold * 1e6}
    launches = [launch for report in emulated.reports for launch in report.launches]
    counts = [count.total() for launch in launches for count in launch.by_warp.values()]
    return found | {"launches": len(launches), "instructions": sum(counts)}


def _to(device: str, value: Any) -> Any:
    """Elements and scale factors of quantised tensors as bytes, which every torch can copy."""
    if not isinstance(value, torch.Tensor) or value.element_size() > 1:
        return value.to(device) if isinstance(value, torch.Tensor) else value
    return value.view(torch.uint8).to(device).view(value.dtype)


def _experts_to(device: str, experts: PackedExperts) -> PackedExperts:
    w13, w2 = (
        Quantized(**{name: _to(device, value) for name, value in vars(w).items()})
        for w in (experts.w13, experts.w2)
    )
    return PackedExperts(w13, w2, experts.granularity)


def judged(layer: Layer, arguments: Any, console: Console) -> dict[str, Any]:
    """Errors relative to the definition, and what `run` found beside the result."""
    x, w13, w2, logits = layer.tensors
    with stage(console, "packing the weights"):
        experts = pack(w13, w2, layer.format, granularity=layer.granularity)
    found = run(layer, experts, arguments, console)
    y = found.pop("y").double()
    scales, form = layer.scales, vars(layer.form)
    with stage(console, "computing the reference"):
        routed = route(logits, **vars(layer.router))
        exact = reference.layer(x, w13, w2, routed, **form)
        given = {"fmt": layer.format, "x_scale": scales.x, "h_scale": scales.h}
        rounded = reference.layer(x, *unpack(experts), routed, **given, **form).double()
    norm = exact.norm().clamp_min(torch.finfo(torch.float64).tiny)
    errors = {
        "relative": ((y - exact).norm() / norm).item(),
        "reference": ((rounded - exact).norm() / norm).item(),
        "apart": ((y - rounded).norm() / norm).item(),
        "max_error": max((y - exact).abs().flatten().tolist(), default=0.0),
    }
    slack = arguments.tolerance * (EXTRA * errors["reference"] + torch.finfo(x.dtype).eps)
    errors["ok"] = errors["relative"] <= slack  # which a NaN is not
    where = {"backend": arguments.backend, "arch": ARCHS[0]}
    if arguments.backend == "cuda":
        where["arch"] = native_arch()
    return {"case": str(layer), **where, **errors, **found, "packed_bytes": experts.nbytes}


def show(row: dict[str, Any], console: Console) -> None:
    """A line: errors, and beside them the time of a launch or the work of the emulator."""
    console.print(row["case"])
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    heads = [
        "\nrun as",
        "relative\nerror",
        "of the\nformat",
        "apart\nfrom it",
        "max abs\nerror",
        "",
    ]
    numbers = [f"{row[name]:.2e}" for name in ("relative", "reference", "apart", "max_error")]
    numbers.append("[green]ok[/]" if row["ok"] else "[red]OUT[/]")
    if "warm_us" in row:
        heads += ["warm\nus", "cold\nus"]
        numbers += [f"{row[name]:.1f}" for name in ("warm_us", "cold_us")]
    else:
        heads += ["\nlaunches", "warp-\ninstr.", "\nseconds"]
        numbers += [str(row["launches"]), f"{row['instructions']:,}", f"{row['seconds']:.1f}"]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_row(row["backend"], *numbers)
    console.print(table)


def show_amax(layer: Layer, found: float, console: Console) -> None:
    """What a calibration learns from it."""
    words = f"largest |h|: {found:.4g}"
    if FORMATS[layer.format].has_global:
        scale = reference.encode_scale(torch.tensor([found]), layer.format).item()
        words += f", which --h-scale {scale:.4g} maps to the largest number of {layer.format}"
    console.print(words)


def choose_backend(arguments: argparse.Namespace) -> None:
    """For 'auto': the GPU where it runs all kernels and nobody asks for a check, else emulation."""
    runs = written_for(native_arch()) in ARCHS
    if arguments.backend == "auto":
        arguments.backend = "cuda" if runs and not wanted(arguments) else "emulate"
    if arguments.backend == "cuda":
        if not runs:
            raise ValueError("backend 'cuda': no GPU of compute capability 10.x here")
        if wanted(arguments):
            raise ValueError("backend 'cuda': the checker is the emulator's")


def perform(arguments: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    console = Console()
    try:
        choose_backend(arguments)
        layer = layer_of(arguments)
        for name in ("w13", "w2"):
            layer.product(name)  # refused before anything is drawn
        with checking(arguments) as report:
            row = judged(layer, arguments, console)
    except (ValueError, NotImplementedError) as refused:
        return refuse(refused)
    show(row, console)
    if "h_amax" in row:
        show_amax(layer, row["h_amax"], console)
    if arguments.json:
        checks = {"checks": text.document(report, counts=False)} if wanted(arguments) else {}
        write_json(arguments.json, {"setting": setting(), "row": row, **checks})
    console.print("of the format: torch that quantises where the kernels do; limit: 2 % more")
    console.print("within tolerance" if row["ok"] else "out of tolerance")
    return 0 if row["ok"] and not report.errors else 1
