"""TileLang kernels without a GPU: lowered by TileLang, compiled by NVRTC, launched on arrays."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ptxemu import nvrtc
from ptxemu.arguments.array import Array, array_of, as_bytes
from ptxemu.host import python_launcher
from ptxemu.host.tilelang_lowering import Lowered, lowered
from ptxemu.module import Module
from ptxemu.options import Options
from ptxemu.report import Report

_HEADERS = ("tl_templates/cuda/nvrtc_std.h",)
_DEPENDENT_LAUNCH = ("cudaGridDependencySynchronize", "cudaTriggerProgrammaticLaunchCompletion")
_NEEDS_BYTES_ONLY = ("float8", "float4", "float6", "int4", "uint4", "bool")


@dataclass(frozen=True)
class Kernel:
    """A compiled function of TileLang.

    module: its CUDA kernels.
    code: CUDA C++, host code, and the arguments.
    """

    module: Module
    code: Lowered

    @property
    def source(self) -> str:
        """The CUDA C++ that TileLang has generated."""
        return self.code.source

    def launch(self, *args: Any, options: Options | None = None) -> Report:
        """Run TileLang's host code: encode tensor maps, launch each kernel.

        Args:
            args: Arguments of the function in order, results included: arrays of any library in CPU
                memory, and numbers. Sizes that the function leaves open follow from the arrays.

        Raises ValueError or TypeError for an argument of another shape or type, and the errors of
        `ptxemu.Module.launch`.
        """
        call = python_launcher.loaded(self.code.host)["call"]
        names = list(inspect.signature(call).parameters)[1:-1]  # without kernels and the stream
        arrays = {number: self._array(number, args) for number in self.code.buffers}
        symbols = self._symbols(arrays)
        given = [_Tensor(arrays[at]) if at in arrays else arg for at, arg in enumerate(args)]
        try:
            given += [symbols[name] for name in names[len(given) :]]
        except KeyError as error:
            raise TypeError(
                f"{len(args)} arguments; the function takes {', '.join(names)}"
            ) from error
        if len(given) > len(names):
            raise TypeError(f"{len(args)} arguments; the function takes {', '.join(names)}")
        memory = [
            as_bytes(*a.extent, writable=a.writable) for a in arrays.values() if any(a.extent)
        ]
        report = Report()
        kernels = {
            name: python_launcher.Kernel(self.module, name, memory, options, report)
            for name in self.code.names
        }
        call(kernels, *given)
        return report

    def _array(self, number: int, args: Sequence[Any]) -> Array:
        """The array of an argument, with the shape and type that the function declares."""
        name, shape, dtype = self.code.buffers[number]
        where = f"argument {number} ({name})"
        if number >= len(args):
            raise TypeError(f"{where} of {dtype} {shape} is missing; {len(args)} arguments given")
        found = array_of(args[number])
        if found is None:
            raise TypeError(f"{where} wants an array; given a {type(args[number]).__name__}")
        sides = zip(shape, found.shape, strict=False)
        right = len(shape) == len(found.shape) and all(
            isinstance(side, str) or side == given for side, given in sides
        )
        if not right or not _alike(dtype, found.dtype):
            raise ValueError(f"{where} wants {dtype} {shape}; given {found}")
        return found

    def _symbols(self, arrays: Mapping[int, Array]) -> dict[str, int]:
        """The sizes that the function leaves open."""
        return {
            side: arrays[number].shape[dim]
            for number, (_, shape, _) in self.code.buffers.items()
            for dim, side in enumerate(shape)
            if isinstance(side, str)
        }


class _Tensor:
    """What host code asks a tensor for."""

    device = SimpleNamespace(index=0)

    def __init__(self, array: Array) -> None:
        self._array = array

    def data_ptr(self) -> int:
        """Address of the first element."""
        return self._array.address


def compile(
    function: Any,
    arch: str = "sm_90a",
    options: Sequence[str] = (),
    *,
    pass_configs: Mapping[str, Any] | None = None,
) -> Kernel:
    """Compile a PrimFunc, as `T.prim_func` returns it, or `get_tir` of a `tilelang.jit` function.

    Args:
        arch: Target, such as "sm_80", "sm_90a" or "sm_100a".
        options: More options of NVRTC.
        pass_configs: As `tilelang.compile` takes them.

    Raises ModuleNotFoundError where TileLang or NVRTC is not installed, the errors of TileLang's
    compiler, and `ptxemu.nvrtc.CompilationError`.
    """
    code = lowered(function, arch, pass_configs)
    flags = [f"-D__CUDACC_VER_MAJOR__={nvrtc.version()[0]}"]
    flags += [f"--pre-include={name}" for name in _headers(code.source)]
    module = nvrtc.compile(
        code.source, arch, [*flags, *options], include=code.include, name="tilelang.cu"
    )
    return Kernel(module, code)


def _headers(source: str) -> list[str]:
    """Headers that TileLang's NVRTC back end puts in front of a source."""
    dependent = any(name in source for name in _DEPENDENT_LAUNCH)
    return [*_HEADERS, *["cuda_device_runtime_api.h"] * dependent]


def _alike(wanted: str, given: str) -> bool:
    """Whether names of element types mean the same; narrow types may be passed as bytes."""
    return wanted == given or wanted.startswith(_NEEDS_BYTES_ONLY)
