"""What is launched so that it can be modelled: problems of a family, without references."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.tools.place import Place

Call = Callable[[], Any]


def of_family(options: argparse.Namespace) -> Call:
    """The problems that the flags spell, one after the other, on a GPU with as many SMs as those of
    its architecture have."""
    from kernelkit.call.launch import emulation
    from lab.problems.family import family_of

    family = family_of(options)
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
