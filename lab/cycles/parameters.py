"""The parameters that kernels are modelled with: a GPU's own, or those of `--parameters FILE`."""

from __future__ import annotations

import argparse
from functools import lru_cache
from pathlib import Path
from typing import Any

from cycle_model import gpus
from cycle_model.parameters.parameter import Gpu, Table, read
from lab.silicon.units.rules.parameters import gpu_of as gpu_of_device


@lru_cache
def _read(path: Path) -> tuple[Table, Gpu]:
    """A table, and its GPU with the table's parameters."""
    found = read(path)
    try:
        return found, found.over(gpu_of_device(found.gpu))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check(options: argparse.Namespace) -> None:
    """ValueError or OSError for a file that is no table, before anything is run."""
    if options.parameters:
        _read(options.parameters)


def gpu_of(options: argparse.Namespace, name: str = "", arch: str = "") -> Gpu:
    """The GPU of that name, else of `--parameters`, else the first that runs kernels for `arch`.
    ValueError where the file is of another GPU, or of one that does not run them."""
    if not options.parameters:
        return gpus.named(name) if name else gpus.for_arch(arch)
    table, gpu = _read(options.parameters)
    if name and gpu.name != name:
        raise ValueError(f"{options.parameters} is of {table.gpu}, not of {name}")
    if arch and gpu.arch != arch:
        raise ValueError(f"{options.parameters} is of {table.gpu}; the kernel is for {arch}")
    return gpu


def origin(options: argparse.Namespace) -> dict[str, Any] | None:
    """Of the file, for documents: what was measured, where and when; None without one."""
    if not options.parameters:
        return None
    table, gpu = _read(options.parameters)
    return {"file": str(options.parameters), "gpu": table.gpu, "date": table.date,
            "rows": table.rows, "measured": len(table.parameters),
            "of": len(gpu.parameters)}  # fmt: skip


def told(options: argparse.Namespace) -> None:
    """A line that says where parameters are from, if they are not the GPU's own."""
    if found := origin(options):
        print("{measured} of {of} parameters were measured on {gpu}, {date}: {file}"
              .format_map(found))  # fmt: skip
