"""TileLang's compiler up to CUDA C++, and the Python host code of its NVRTC back end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Lowered:
    """What TileLang makes of a function.

    source: CUDA C++ of its kernels.
    host: Python source of `call(kernels, *arguments, stream)`, which encodes tensor maps and
        launches the kernels through cuda.bindings.
    names: of the kernels.
    buffers: name, shape and element type of each argument that is a tensor, by position. A side of
        the shape is a number or the name of a symbol.
    include: folders of the headers that the source includes.
    """

    source: str
    host: str
    names: list[str]
    buffers: dict[int, tuple[str, tuple[int | str, ...], str]]
    include: list[Path]


def lowered(function: Any, arch: str, pass_configs: Mapping[str, Any] | None) -> Lowered:
    """Lower a PrimFunc for a target such as "sm_90a".

    Raises ModuleNotFoundError if TileLang is not installed.
    """
    import tilelang
    from tilelang import tvm

    # From its own file: the package offers it only where cuda-python is installed.
    from tilelang.jit.adapter.nvrtc.wrapper import TLNVRTCSourceWrapper

    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    configs = dict(pass_configs or {})
    with target, tvm.transform.PassContext(config=configs):
        artifact = tilelang.lower(function, target=target)
        wrapper = TLNVRTCSourceWrapper(
            scheduled_ir_module=tvm.IRModule({function.attrs["global_symbol"]: function}),
            source=artifact.kernel_source,
            target=target,
            device_mod=artifact.device_mod,
            host_mod=artifact.host_mod,
            pass_configs=configs,
        )
    return Lowered(
        artifact.kernel_source,
        wrapper.host_func,
        list(wrapper.function_names),
        _buffers(function),
        _include(),
    )


def _buffers(function: Any) -> dict[int, tuple[str, tuple[int | str, ...], str]]:
    found = {}
    for number, parameter in enumerate(function.params):
        if parameter in function.buffer_map:
            buffer = function.buffer_map[parameter]
            shape = tuple(
                side.name if hasattr(side, "name") else int(side) for side in buffer.shape
            )
            found[number] = buffer.data.name, shape, str(buffer.dtype)
    return found


def _include() -> list[Path]:
    from tilelang import env

    return [Path(env.TILELANG_TEMPLATE_PATH), Path(env.CUTLASS_INCLUDE_DIR)]
