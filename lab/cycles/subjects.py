"""What is launched so that it can be modelled: a call per family, without references."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lab.tools.groups import ARCHS

Call = Callable[[], Any]


def fmha(options: argparse.Namespace) -> Call:
    """Of the case that the flags spell, on a GPU with as many SMs as those of its arch have."""
    from fmha import attention
    from kernelkit.call.launch import emulation
    from lab.cases.attention import case_of, check, moved

    case = case_of(options)
    check(case, options.arch or ARCHS[0])
    inputs, arguments = case.inputs("cpu"), moved(case.arguments(), "cpu") | _place(options)

    def call() -> None:
        with emulation(arch=options.arch):
            attention(*inputs, **arguments)

    return call


def gqa(options: argparse.Namespace) -> Call:
    """Of the case that the flags spell."""
    from gqa_lowlatency import DecodeConfig, decode
    from lab.cases.decode import case_of

    case = case_of(options)
    config = DecodeConfig(**({"cluster": 0} | case.tuning)) if case.tuning else None
    given = {**case.tables, **case.options, **_place(options), "config": config}
    return partial(decode, *case.tensors, return_lse=True, **given)


def moe(options: argparse.Namespace) -> Call:
    """Of the layer that the flags spell, from router logits to its output."""
    from lab.cases.moe import layer_of
    from moe import fused_moe

    layer = layer_of(options)
    (x, _, _, logits), experts = layer.tensors, layer.weights(layer.packed())
    given = {"activation": layer.form, "scales": layer.scales, "tile_rows": layer.tile_rows}
    return partial(fused_moe, x, experts, logits, layer.router, **given, **_place(options))


def steps(options: argparse.Namespace) -> Call:
    """The problems of a step, one after the other."""
    from kernelkit.call.launch import emulation
    from lab.cases.steps import problems_of

    problems = problems_of(
        options.family, options.steps, options.rows, options.hidden, options.names
    )

    def call() -> None:
        for problem in problems:
            arguments = problem.draw(0, "cpu")
            with emulation():
                problem.peers[problem.ours](*arguments)

    return call


def of_file(name: str, options: argparse.Namespace) -> Call:
    """name: FILE.py:function, without arguments, on a machine that seems to have a GPU. ValueError
    for what is none."""
    path, _, function = name.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: no file of Python")
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


def _place(options: argparse.Namespace) -> dict[str, Any]:
    return {"backend": "emulate", "arch": options.arch}
