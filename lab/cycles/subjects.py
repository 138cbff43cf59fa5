"""Subjects and parameters of the model, and the plot of modelled times against others."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from cycle_model import gpus
from cycle_model.parameters.parameter import Gpu, Table, read
from lab.silicon.units.rules import gpu_of as gpu_of_device
from lab.tools import style
from lab.tools.place import Place


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
    """Origin of the file, for documents: what was measured, where and when; None without one."""
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


Call = Callable[[], Any]


def of_family(options: argparse.Namespace) -> Call:
    """The problems that the flags spell, one after the other, on a GPU with as many SMs as those of
    its architecture have. Without --arch that is the architecture of --gpu."""
    from kernelkit.call.launch import emulation
    from lab.problems.family import family_of

    family = family_of(options)
    if not options.arch and options.gpu:
        options.arch = gpus.named(options.gpu).arch
    place = Place("emulate", options.arch or family.archs(options)[0], "it is modelled")
    problems = family.problems(options, place)

    def call() -> None:
        for problem in problems:
            drawn = problem.draw(0, "cpu")
            with emulation(arch=options.arch):
                for each in problem.calls(drawn, place).values():
                    each()

    return call


def of_file(name: str, options: argparse.Namespace) -> Call:
    """name: FILE.py:function, without arguments, on a machine that seems to have a GPU. ValueError
    for what is none."""
    path, _, function = name.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: not a Python file")
    loader, module = spec.loader, importlib.util.module_from_spec(spec)

    def call() -> None:
        sys.path.insert(0, str(Path(path).parent))
        try:
            loader.exec_module(module)
        finally:
            sys.path.pop(0)
        found = getattr(module, function, None)
        if not callable(found):
            raise ValueError(f"{name}: {path} has no function {function!r}")
        found()

    return call


BAND = 0.10  # of the real time, shaded
COLUMNS = 4  # of keys


def draw(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """rows: group, real_us, modelled_us, low_us, high_us. A colour and shape per group; the bars
    are what comes out with parameters anywhere within their ranges."""
    groups = list(dict.fromkeys(row["group"] for row in rows))
    lines = -(-(len(groups) + 1) // COLUMNS)
    how = {"height": 6.6 + 0.2 * lines, "title": title[:1].upper() + title[1:], "keys": lines}
    with style.picture(path, **how) as (figure, ((axis,),)):
        keys: list[Any] = []
        for number, group in enumerate(groups):
            mine = [row for row in rows if row["group"] == group]
            real, modelled = ([row[key] for row in mine] for key in ("real_us", "modelled_us"))
            below = [row["modelled_us"] - row["low_us"] for row in mine]
            above = [row["high_us"] - row["modelled_us"] for row in mine]
            marks = {**style.OTHERS[number % len(style.OTHERS)].marks(4.5), "linestyle": ""}
            keys.append(axis.errorbar(real, modelled, yerr=[below, above], elinewidth=0.8,
                                      label=group, **marks))  # fmt: skip
        real = [row["real_us"] for row in rows]
        ends = [min(real) / 1.5, max(real) * 1.5]
        axis.plot(ends, ends, color=style.BLACK, linewidth=1)
        low, high = ([end * (1 + sign * BAND) for end in ends] for sign in (-1, 1))
        shade = {"color": style.BLACK, "alpha": 0.1, "linewidth": 0}
        keys.append(axis.fill_between(ends, low, high, label=f"within {BAND:.0%}", **shade))
        axis.set(xscale="log", yscale="log", xlim=ends)
        axis.set(xlabel="measured or published, us", ylabel="modelled, us")
        style.grid(axis)
        style.legend(figure, keys, columns=COLUMNS)
