"""`cycles.py mainloops`: compares published main loops of GEMMs with the model."""

from __future__ import annotations

import argparse
import csv
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cycle_model.binding.bound import BoundLaunch
from cycle_model.engine import layout as L
from cycle_model.grid import COLD, WARM, LaunchModel
from cycle_model.launch import bind
from cycle_model.parameters.parameter import Gpu
from cycle_model.sass.tools import HOW_TO_GET_TOOLS, find_tool
from kernelkit.call.launch import choose_target, emulation, launch
from kernelkit.compile.compiler import compile_once
from kernelkit.compile.kernel import CompiledKernel
from kernelkit.plan.dtypes import ITEM_BYTES
from lab.cycles import subjects
from lab.cycles.beside import SUMMARY, summary
from lab.cycles.mainloop_plan import MainloopConfig
from lab.cycles.subjects import draw
from lab.tools.common import refuse, tracked, write_json
from lab.tools.tables import show, table
from ptxemu.options import Options

ARCH = "sm_100a"
DTYPES = {"BF16": ("bf16", torch.bfloat16), "FP8_E4M3": ("e4m3", torch.float8_e4m3fn)}
FILLING = 32  # steps that are modelled before the ring is in its rhythm, beyond two rounds of it
ROUNDS = 4  # of the ring, of which the cycles of a step are the mean
COMMIT = "UTCBAR"
COLUMNS = (
    ("main loop", "{group}: {name}"),
    ("L2", "{memory}"),
    ("published\ncycles a step", "{real_step:.1f}"),
    ("modelled", "{modelled_step:.1f}"),
    ("published\nus", "{real_us:.1f}"),
    ("modelled\nus", "{modelled_us:.1f}"),
    ("range", lambda row: f"{row['low_us']:.1f} .. {row['high_us']:.1f}"),
    ("error", "{error:+.1%}"),
)


@dataclass(frozen=True)
class Published:
    """A published row.

    stages: 0 for as many as shared memory holds.
    length: K of the whole product."""

    config: MainloopConfig
    group: str
    stages: int
    length: int
    us: float

    @property
    def name(self) -> str:
        stages = f"{self.stages} stages" if self.stages else "all stages"
        return f"{self.config.m} x {self.config.n} x {self.config.k}, {stages}"

    @property
    def nbytes(self) -> int:
        """Bytes that it reads."""
        rows = self.config.m + self.config.n
        return rows * self.length * ITEM_BYTES[self.config.dtype]


def published_in(path: Path) -> Iterator[Published]:
    """Rows of a table with the columns K, TILE_M, TILE_N, TILE_K, STAGES, dtype and time_ms; lines
    with a # are its source, and what did not run. ValueError for another table."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    for row in csv.DictReader(lines):
        try:
            sizes = (int(row[f"TILE_{axis}"]) for axis in "MNK")
            config = MainloopConfig(*sizes, dtype=DTYPES[row["dtype"]][0])
            us = float(row["time_ms"]) * 1e3
            yield Published(config, row["dtype"], int(row["STAGES"]), int(row["K"]), us)
        except KeyError as missing:
            raise ValueError(f"{path}: {missing} is missing in {row}") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {row}: {error}") from None


def perform(options: argparse.Namespace) -> int:
    if find_tool("nvdisasm") is None:
        return refuse(HOW_TO_GET_TOOLS)
    try:
        published = [*published_in(options.file)][:: options.every]
        gpu = subjects.gpu_of(options, options.gpu).changed(clock=options.clock)
        if not published:
            return refuse(f"{options.file}: no rows")
        each_of = tracked(published, "modelling")
        rows = [row_of(each, gpu, options.perturbed) for each in each_of]
    except (ValueError, OSError) as refused:
        return refuse(refused)
    sums = summary(rows)
    show(*table("modelled and published", COLUMNS, rows))
    show(*table("in all", SUMMARY, sums))
    subjects.told(options)
    if options.json:
        setting = {"gpu": gpu.name, "clock": options.clock, "file": options.file.name,
                   "parameters": subjects.origin(options)}  # fmt: skip
        write_json(options.json, {"setting": setting, "rows": rows, "summary": sums})
    if options.plot:
        draw(options.plot, rows, "main loops of GEMMs in one CTA, modelled and published")
    return 0


def row_of(each: Published, gpu: Gpu, perturbed: int) -> dict[str, Any]:
    """A published main loop, modelled. What one SM reads fits into the half of L2 that is near it,
    and is then there from the launch before; else it comes from memory, each time."""
    memory = WARM if each.nbytes <= gpu.l2_bytes // 2 else COLD
    steps = each.length // each.config.k
    stages = min(each.stages or each.config.stages, each.config.stages)
    rounds = ROUNDS * stages
    short = bind(recorded(each.config, stages, 2 * stages + FILLING + rounds))
    us, *others = (
        _cycles(short, rounds, steps, one, memory) / gpu.value("clock") / 1e3
        for one in (gpu, *map(gpu.perturbed, range(perturbed)))
    )
    per_us = gpu.value("clock") * 1e3 / steps
    return {
        "group": each.group,
        "name": each.name,
        "memory": memory,
        "real_us": each.us,
        "modelled_us": us,
        "low_us": min([us, *others]),
        "high_us": max([us, *others]),
        "real_step": each.us * per_us,
        "modelled_step": us * per_us,
        "error": us / each.us - 1,
    }


def _cycles(short: BoundLaunch, rounds: int, steps: int, gpu: Gpu, memory: str) -> float:
    """Cycles of so many steps: of those that were recorded, and for each of the others what one
    took in the last of these. rounds: steps that `ROUNDS` rounds of the ring have."""
    model = LaunchModel(short, gpu, memory=memory)
    (cluster,) = short.clusters
    result = model.simulated(cluster, log=True)
    log = result.log[: result.issued]
    items = short.function.instructions
    commits = np.array([item.word == COMMIT for item in items])[result.tables.path]
    *times, _ = np.sort(log[commits[log[:, L.L_POSITION]], L.L_TIME]).tolist()  # but of the last D
    step = (times[-1] - times[-1 - rounds]) / rounds
    return result.cycles + step * (steps - len(times))


def recorded(config: MainloopConfig, stages: int, steps: int) -> Any:
    """The kernel run with zeros, as those who published it did."""
    compiled(config)
    gc.freeze()  # the emulator looks for tensors among all objects: spare it the compiler's
    dtype = next(torch_dtype for name, torch_dtype in DTYPES.values() if name == config.dtype)
    a, b = (torch.zeros(rows, config.k * steps, dtype=dtype) for rows in (config.m, config.n))
    d = torch.empty(config.m, config.n)
    with emulation(Options(record=True, limit=None)) as run:
        run_mainloop(config, a, b, d, stages)
    (report,) = run.reports
    return report.launches[0].recording


def run_mainloop(
    config: MainloopConfig, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, stages: int
) -> None:
    """d = a b^T in the emulator, with so many stages of the ring."""
    if not 2 <= stages <= config.stages:
        raise ValueError(f"stages={stages}: from 2 to {config.stages}")
    target = choose_target(a.device, "emulate", ARCH, (ARCH,))
    launch(compiled(config), (a, b, d, stages), target, a.device)


@cache
def compiled(config: MainloopConfig) -> CompiledKernel | None:
    def traced() -> tuple:
        from lab.cycles.mainloop_kernel import host_function

        return host_function(config, ARCH)

    return compile_once(config, ARCH, traced)
