"""Present this process as one with a GPU whose launches are emulated: for a script or a block."""

from __future__ import annotations

import atexit
import faulthandler
import importlib.util
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib import import_module
from io import UnsupportedOperation
from typing import TYPE_CHECKING, Any

from ptxemu.host import gpus
from ptxemu.host.patching import environment, on_arrival, patched
from ptxemu.host.runtime_symbols import Launcher

if TYPE_CHECKING:  # with numpy, and `--help` does without
    from ptxemu.host.libcuda import Driver

KNOWN = "Cache is disabled"  # a warning of the DSL, where it keeps PTX
_HELION_IGNORES = "HELION_IGNORE_WARNINGS"
_PREFIXES = ("CUTE_DSL", "CUTE_EXPERIMENTAL_DSL")


@contextmanager
def machine_with_gpu(launcher: Launcher, gpu: gpus.Gpu | None = None) -> Iterator[None]:
    """Within the block, present this process as one with a GPU; launches go to `launcher`.

    Imports torch and the DSL where they are installed; Triton is changed once it is imported.
    Environment settings for the DSL's dumps are kept. Processes started within the block inherit
    the others.

    Args:
        gpu: What the process seems to have; None: the GPU of CUTE_DSL_ARCH, by default a B200.

    Raises:
        ValueError: gpu and CUTE_DSL_ARCH contradict each other.
    """
    seen = gpus.chosen(gpu, os.environ)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", KNOWN, UserWarning)
        stack.enter_context(gpus.seeming(seen))
        stack.enter_context(environment(_dsl_environment(seen.arch)))
        from ptxemu.host.libcuda import driver_library  # with numpy

        if _is_installed("cutlass"):
            _pretend_for_dsl(stack, launcher)
        if _is_installed("torch"):
            _pretend_for_torch(stack)
        driver = stack.enter_context(driver_library(launcher))
        then = {
            "triton": lambda: _pretend_for_triton(stack, launcher),
            "helion": lambda: _pretend_for_helion(stack),
        }
        if driver is not None:
            then["cupy_backends"] = lambda: _pretend_for_cupy(stack, driver)
        stack.enter_context(on_arrival(then))
        with suppress(UnsupportedOperation):  # where stderr is no file, as in a notebook
            faulthandler.enable()  # the DSL's own handler would hide where Python was
        yield


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@contextmanager
def pretended_as_needed(launcher: Launcher) -> Iterator[None]:
    """Pretend as `machine_with_gpu`, but change torch and the DSL only once they are imported.

    The import may come long before the block or within it. Kernels compiled within the block have
    lines of Python.
    """
    with ExitStack() as stack:
        stack.enter_context(gpus.seeming(gpus.chosen(None, os.environ)))
        then = {
            "torch": lambda: _pretend_for_torch(stack),
            "cutlass": lambda: _pretend_for_dsl(stack, launcher, lines=True),
            "triton": lambda: _pretend_for_triton(stack, launcher),
        }
        stack.enter_context(on_arrival(then))
        yield


def _pretend_for_torch(stack: ExitStack) -> None:
    from ptxemu.host.torch_shim import torch_without_gpu

    stack.enter_context(torch_without_gpu())


def _pretend_for_triton(stack: ExitStack, launcher: Launcher) -> None:
    from ptxemu.host.triton_driver import triton_without_gpu

    stack.enter_context(triton_without_gpu(launcher))


def _pretend_for_helion(stack: ExitStack) -> None:
    """Silence Helion's warning about tensors that are not on the GPU.

    It traces with fake tensors, whose device torch itself keeps, and that is the CPU here.
    """
    if hasattr(import_module("helion.exc"), "WrongDevice"):
        names = [*filter(None, os.environ.get(_HELION_IGNORES, "").split(",")), "WrongDevice"]
        stack.enter_context(environment({_HELION_IGNORES: ",".join(names)}))


def _pretend_for_cupy(stack: ExitStack, driver: Driver) -> None:
    from ptxemu.host.cupy_runtime import cupy_without_runtime

    stack.enter_context(cupy_without_runtime(driver))


def _pretend_for_dsl(stack: ExitStack, launcher: Launcher, *, lines: bool = False) -> None:
    from ptxemu.host.cuda_stubs import stubbed_cuda
    from ptxemu.host.device_view import cpu_as_device
    from ptxemu.host.interception import intercepted

    stack.enter_context(_dsl_settings(lines))
    for pretence in (stubbed_cuda(), cpu_as_device(), intercepted(launcher)):
        stack.enter_context(pretence)


@cache
def dump_folder() -> str:
    """Return the folder for the DSL's PTX, which exists as long as this process.

    One test may launch a kernel that another test compiled.
    """
    folder = tempfile.mkdtemp(prefix="ptxemu-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _dsl_environment(arch: str) -> dict[str, str]:
    """Return variables that make the DSL target `arch` and keep its PTX.

    Values that the user has set are kept.
    """
    values = {}
    for prefix in _PREFIXES:
        kept = {*filter(None, os.environ.get(f"{prefix}_KEEP", "").split(",")), "ptx"}
        values[f"{prefix}_KEEP"] = ",".join(sorted(kept))
        for name, default in (("ARCH", arch), ("DUMP_DIR", dump_folder())):
            values[f"{prefix}_{name}"] = os.environ.get(f"{prefix}_{name}", default)
    return values


@contextmanager
def _dsl_settings(lines: bool) -> Iterator[None]:
    """Apply the settings to a DSL that read its environment when it was imported."""
    from cutlass import cutlass_dsl

    with ExitStack() as stack:
        for prefix, name in zip(_PREFIXES, ("CuTeDSL", "CuteExperimentalDSL"), strict=True):
            dsl = getattr(cutlass_dsl, name, None)
            if dsl is None:  # the second one is missing in older versions
                continue
            settings: dict[str, Any] = {
                "keep_ptx": True,
                "_arch": os.environ.get(f"{prefix}_ARCH", gpus.current().arch),
                "dump_dir": os.environ.get(f"{prefix}_DUMP_DIR", dump_folder()),
            }
            if lines and f"{prefix}_LINEINFO" not in os.environ:
                settings["lineinfo"] = True
            stack.enter_context(patched(dsl._get_dsl().envar, settings))
        yield
