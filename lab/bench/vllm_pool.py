"""vLLM's BlockPool for a comparison: the installed one, or the source of a checkout.

Of a checkout its two modules about blocks are imported as they are; whatever else they import is
replaced by names that can be asked for anything, since the loops here need none of it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REAL = ("vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_metrics")
MODULE = REAL[0]


class _Stub(types.ModuleType):
    """A module or package in which every name is a class that nobody has to make an object of."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "init_logger":
            return logging.getLogger
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of `checkout` that are REAL, stubs for the rest of the package."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name.partition(".")[0] != "vllm":
            return None
        if name in REAL:
            file = self.checkout.joinpath(*name.split(".")).with_suffix(".py")
            if file.exists():
                return importlib.util.spec_from_file_location(name, file)
            if name == MODULE:
                return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in a stub."""


def block_pool(checkout: Path | None) -> tuple[Callable[[int], Any] | None, str]:
    """(what makes a pool of so many blocks, where it comes from), or (None, why not)."""
    if checkout is None:
        try:
            version = importlib.import_module("vllm").__version__
            made = importlib.import_module(MODULE).BlockPool
        except (ImportError, AttributeError) as error:
            return None, f"vllm is not importable: {error}"
        return _maker(made), f"vllm {version}"
    finder = _Finder(checkout)
    sys.meta_path.insert(0, finder)
    try:
        made = importlib.import_module(MODULE).BlockPool
    except (ImportError, AttributeError, TypeError) as error:
        return None, f"no BlockPool in {checkout.name}: {error}"
    finally:
        sys.meta_path.remove(finder)
    return _maker(made), f"vllm {_version(checkout)}, its imports replaced"


def _maker(pool: Callable[..., Any]) -> Callable[[int], Any]:
    """hash_block_size is what newer ones want to know."""

    def make(blocks: int) -> Any:
        try:
            return pool(num_gpu_blocks=blocks, enable_caching=True)
        except TypeError:
            return pool(num_gpu_blocks=blocks, enable_caching=True, hash_block_size=16)

    return make


def _version(checkout: Path) -> str:
    facts = checkout / "PKG-INFO"
    if facts.exists():
        for line in facts.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Version: "):
                return line.removeprefix("Version: ")
    return "of a checkout"
