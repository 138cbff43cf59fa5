"""Host code in Python that launches through cuda.bindings.driver: run here, with a module instead.

A front end generates such code (TileLang's NVRTC back end does). It gets a driver that encodes
tensor maps, and hands each launch to `ptxemu.module.Module.launch`.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ptxemu.errors import UnsupportedPtx
from ptxemu.host.tensor_map_encode import DTYPES, SWIZZLES
from ptxemu.machine.im2col import PixelBox
from ptxemu.machine.tensor_map import encode, encode_im2col
from ptxemu.module import Module
from ptxemu.options import Options
from ptxemu.report import Report

_DRIVER = "cuda.bindings.driver"
_SUCCESS = 0
_SERIALIZATION = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"


def loaded(source: str) -> dict[str, Any]:
    """Execute generated host code; return its globals. Its imports of the driver get `Driver`."""

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        return Driver() if name == _DRIVER else builtins.__import__(name, *args, **kwargs)

    scope: dict[str, Any] = {"__builtins__": {**vars(builtins), "__import__": importing}}
    exec(compile(source, "<generated host code>", "exec"), scope)
    return scope


@dataclass
class Kernel:
    """A kernel as host code holds it.

    memory: what launches may access.
    """

    module: Module
    name: str
    memory: Sequence[Any]
    options: Options | None
    report: Report = field(default_factory=Report)

    def launch(self, config: Any, values: Sequence[Any], types: Sequence[Any]) -> None:
        """Launch with the values of the parameters and their types of ctypes, None for maps."""
        args = [v if kind is None else kind(v) for v, kind in zip(values, types, strict=True)]
        attributes = config.attrs[: config.numAttrs]
        launched = self.module.launch(
            self.name,
            grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
            block=(config.blockDimX, config.blockDimY, config.blockDimZ),
            smem_bytes=config.sharedMemBytes,
            args=args,
            memory=list(self.memory),
            options=self.options,
            dependent=any(each.id == _SERIALIZATION for each in attributes),
        )
        self.report.launches.append(launched)


class _Names:
    """An enumeration whose members are their own names."""

    CUDA_SUCCESS = _SUCCESS

    def __getattr__(self, name: str) -> str:
        return name


class Driver:
    """Names of cuda.bindings.driver that generated host code imports.

    Raises UnsupportedPtx for others.
    """

    CUresult = CUfunction_attribute = CUlaunchAttributeID = _Names()
    CUtensorMapDataType = CUtensorMapInterleave = CUtensorMapSwizzle = int
    CUtensorMapL2promotion = CUtensorMapFloatOOBfill = cuuint64_t = cuuint32_t = int
    CUdevice = CUkernel = staticmethod(lambda value: value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedPtx(f"generated host code needs {name} of the CUDA driver")

    @staticmethod
    def CUlaunchConfig() -> Any:
        return SimpleNamespace(numAttrs=0, attrs=[])

    @staticmethod
    def CUlaunchAttribute() -> Any:
        return SimpleNamespace(id="", value=SimpleNamespace())

    @staticmethod
    def cuKernelSetAttribute(*_: Any) -> tuple[int]:
        return (_SUCCESS,)

    @staticmethod
    def cuLaunchKernelEx(config: Any, kernel: Kernel, given: Any, _: Any) -> tuple[int]:
        values, types = given
        kernel.launch(config, values, types)
        return (_SUCCESS,)

    @staticmethod
    def cuTensorMapEncodeTiled(
        dtype: int, rank: int, address: int, dims: Any, strides: Any, box: Any, *more: Any
    ) -> tuple[int, bytes]:
        """more: element strides, interleave, swizzle, L2 promotion, fill."""
        steps, interleave, swizzle, _, fill = more
        if set(steps) != {1}:
            raise UnsupportedPtx(f"cuTensorMapEncodeTiled with element strides {steps}")
        common = _common(dtype, interleave, swizzle, fill)
        return _SUCCESS, encode(address, tuple(dims), tuple(strides), tuple(box), *common)

    @staticmethod
    def cuTensorMapEncodeIm2col(
        dtype: int, rank: int, address: int, dims: Any, strides: Any, *more: Any
    ) -> tuple[int, bytes]:
        """more: corners, channels, pixels, element strides, and as for tiled maps."""
        lower, upper, channels, pixels, steps, interleave, swizzle, _, fill = more
        _, *inner, images = steps
        if images != 1:
            raise UnsupportedPtx(f"cuTensorMapEncodeIm2col with element stride {images} of N")
        box = PixelBox(tuple(lower), tuple(upper), tuple(inner))
        common = _common(dtype, interleave, swizzle, fill)
        sides = channels, pixels
        return _SUCCESS, encode_im2col(address, tuple(dims), tuple(strides), sides, box, *common)


def _common(dtype: int, interleave: int, swizzle: int, fill: int) -> tuple[str, str, bool]:
    """Element type, swizzle, and whether NaN is filled in."""
    if dtype not in DTYPES or swizzle not in SWIZZLES or interleave or fill > 1:
        raise UnsupportedPtx(
            f"a tensor map of type {dtype} with interleave {interleave}, swizzle {swizzle},"
            f" fill {fill}"
        )
    return DTYPES[dtype], SWIZZLES[swizzle], bool(fill)
