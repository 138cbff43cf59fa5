"""Triton on a machine without a GPU: its driver, and the last stage of its compiler, replaced.

Triton compiles to PTX as ever; PTX takes the place of machine code, so no `ptxas` is needed. A
launch becomes a `LaunchRequest` for the launcher of the pretence. Nothing is measured: an autotuned
kernel takes the first configuration that the GPU can run, or the one that PTXEMU_TRITON_CONFIG
names by its number, and benchmarks answer a nominal time without a launch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

from ptxemu.errors import HardwareRefusal
from ptxemu.host import gpus
from ptxemu.host.cuda_stubs import MEANINGLESS_TIME, constantly, nominal_time
from ptxemu.host.launch_config import LaunchAttributes, LaunchRequest, parameter_sizes
from ptxemu.host.patching import patched
from ptxemu.host.runtime_symbols import Launcher
from ptxemu.host.triton_arguments import Value, flat_values, packed
from ptxemu.host.triton_blas import CublasLt

CONFIG_VARIABLE = "PTXEMU_TRITON_CONFIG"
_PTX_VERSION = 90  # what Triton's LLVM knows at most; newer instructions are written as they are
_PORTABLE = 8  # CTAs of a cluster
_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)")


@contextmanager
def triton_without_gpu(launcher: Launcher) -> Iterator[None]:
    """While active, Triton's kernels are launched by `launcher`. Imports Triton."""
    autotuner: Any = import_module("triton.runtime.autotuner")
    testing: Any = import_module("triton.testing")
    config: Any = import_module("triton.runtime").driver
    backends: Any = import_module("triton.backends").backends
    compiled: Any = import_module("triton._C.libtriton")
    driver = Driver(launcher)
    before = backends["nvidia"]
    with ExitStack() as stack:
        stack.callback(backends.__setitem__, "nvidia", before)
        backends["nvidia"] = type(before)(compiler=_compiler(before.compiler), driver=Driver)
        stack.enter_context(patched(config, {"_default": driver, "_active": driver}))
        stack.enter_context(patched(testing, _TESTING))
        stack.enter_context(patched(testing.Mark, {"run": _skipped}))
        stack.enter_context(patched(autotuner.Autotuner, {"_bench": _choose}))
        stack.enter_context(patched(compiled.nvidia.cublas, {"CublasLt": CublasLt}))
        yield


# -- the compiler ---------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _compiler(base: Any) -> Any:
    """A compiler of Triton's whose machine code is the PTX."""

    class Compiler(base):  # type: ignore[misc]
        def parse_options(self, opts: dict[str, Any]) -> Any:
            own = dict(opts)
            if own.get("ptx_version") is None:
                own["ptx_version"] = _PTX_VERSION
            return super().parse_options(own)

        def make_cubin(self, src: str, metadata: Any, opt: Any, capability: int) -> bytes:
            return src.encode()

        def hash(self) -> str:
            return f"ptxemu-{_PTX_VERSION}-{self.target.arch}"

    return Compiler


# -- the driver -----------------------------------------------------------------------------------


class Driver:
    """Triton's driver of the GPU that this process seems to have.

    It has the methods of `triton.backends.driver.GPUDriver`, without torch.
    """

    def __init__(self, launcher: Launcher | None = None) -> None:
        self.utils = _Utils()
        self.launch = launcher

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return what launches a compiled kernel."""
        return _KernelLauncher(source, metadata, self.launch)

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    get_current_device = staticmethod(constantly(0))
    set_current_device = staticmethod(constantly(None))
    get_current_stream = staticmethod(constantly(0))
    clear_cache = staticmethod(constantly(None))

    def get_device_capability(self, _device: int = 0) -> tuple[int, int]:
        return gpus.current().capability

    def get_current_target(self) -> Any:
        compiler: Any = import_module("triton.backends.compiler")
        major, minor = gpus.current().capability
        return compiler.GPUTarget("cuda", 10 * major + minor, 32)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda

    def get_benchmarker(self) -> Callable[..., Any]:
        return _benchmark

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(0, dtype=torch.int, device="cuda")

    def assemble_tensormap_to_arg(self, _: Any, args: Any) -> Any:
        return args

    def allocate_default_profile_scratch(self, size: int, alignment: int, stream: Any) -> Any:
        return _scratch(size, alignment)


class _Utils:
    """The driver's functions about devices and binaries."""

    get_current_device = staticmethod(constantly(0))
    set_current_device = staticmethod(constantly(None))
    get_default_stream = staticmethod(constantly(0))
    is_stream_capturing = staticmethod(constantly(False))
    unload_module = staticmethod(constantly(None))
    set_printf_fifo_size = staticmethod(constantly(None))

    def get_device_properties(self, _device: int = 0) -> dict[str, int | None]:
        numbers = {
            "max_shared_mem": 97,
            "max_num_regs": 82,
            "multiprocessor_count": 16,
            "warpSize": 10,
            "sm_clock_rate": 13,
            "mem_clock_rate": 36,
            "mem_bus_width": 37,
        }
        gpu = gpus.current()
        return {name: gpu.attribute(number) for name, number in numbers.items()}

    def get_device_capability(self, _device: int = 0) -> tuple[int, int]:
        return gpus.current().capability

    def load_binary(
        self, name: str, kernel: bytes, shared: int, _device: int
    ) -> tuple[None, Any, int, int, int]:
        """Return (module, function, registers of a thread, bytes spilled, most threads).

        The module is None, since there is nothing to unload: Triton would ask for its driver when
        the kernel is collected, perhaps after that of ptxemu has left.
        The registers are those that `.maxnreg` or the number of threads allows, since only `ptxas`
        would know them.
        """
        text = kernel.decode()
        function = Function(text, name)
        return None, function, function.registers, 0, 1024

    def cuOccupancyMaxActiveClusters(self, *_: Any) -> int:
        return gpus.current().sms


@dataclass(frozen=True)
class Function:
    """A loaded kernel: the PTX of its module, and its name there."""

    ptx: str
    name: str

    @property
    def registers(self) -> int:
        found = re.search(r"\.maxnreg\s+(\d+)", self.ptx)
        return int(found[1]) if found else 64


# -- launches -------------------------------------------------------------------------------------


class _KernelLauncher:
    """What `CompiledKernel.run` is: it packs the arguments and launches.

    Triton calls it with the grid, the stream, the function, its packed metadata (warps, CTAs of a
    cluster, bytes of shared memory), data for the hooks, both hooks, and the kernel's arguments.
    """

    def __init__(self, source: Any, metadata: Any, launcher: Launcher | None) -> None:
        self._types = list(source.signature.values())
        self._maps = getattr(metadata, "tensordesc_meta", None)
        self._metadata = metadata
        self._launcher = launcher

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Function, *rest: Any) -> None:
        (_, launch_metadata, enter, leave), args = rest[:4], rest[4:]
        if enter is not None:
            enter(launch_metadata)
        self._launch((x, y, z), stream, function, args)
        if leave is not None:
            leave(launch_metadata)

    def _launch(
        self, grid: tuple[int, int, int], stream: Any, function: Function, args: Sequence[Any]
    ) -> None:
        if 0 in grid:
            return
        metadata, ctas = self._metadata, getattr(self._metadata, "num_ctas", 1)
        blocks = grid[0] * grid[1] * grid[2] * ctas
        scratches = [
            self._scratch(name, blocks, stream) for name in ("global_scratch", "profile_scratch")
        ]
        values = [*flat_values(self._types, args, self._maps),
                  *(Value("*i8", scratch) for scratch in scratches)]  # fmt: skip
        sizes = parameter_sizes(function.ptx)[function.name]
        _require_number(function, len(values), len(sizes))
        if self._launcher is None:
            raise RuntimeError("ptxemu: Triton launches outside of the pretended GPU")
        self._launcher(
            LaunchRequest(
                ptx=function.ptx,
                entry=function.name,
                grid=(grid[0] * ctas, grid[1], grid[2]),
                block=(32 * metadata.num_warps, 1, 1),
                cluster=(ctas, 1, 1) if ctas > 1 else None,
                smem_bytes=metadata.shared,
                params=tuple(
                    packed(value, size) for value, size in zip(values, sizes, strict=True)
                ),
                attributes=LaunchAttributes(
                    cooperative=bool(getattr(metadata, "launch_cooperative_grid", False)),
                    pdl=bool(getattr(metadata, "launch_pdl", False)),
                ),
                non_portable=ctas > _PORTABLE,
            )
        )

    def _scratch(self, name: str, blocks: int, stream: Any) -> Any:
        """Memory that Triton's allocator gives for all blocks, or None."""
        size = getattr(self._metadata, f"{name}_size", 0) or 0
        if not size:
            return None
        alignment = getattr(self._metadata, f"{name}_align", 1)
        allocation: Any = import_module("triton.runtime._allocation")
        if name == "profile_scratch":
            return _scratch(size * blocks, alignment)
        return allocation._allocator.get()(size * blocks, alignment, stream)


def _require_number(function: Function, given: int, declared: int) -> None:
    if given != declared:
        raise HardwareRefusal(
            f"{given} arguments for {function.name}, which declares {declared} parameters: this "
            "version of Triton passes others than ptxemu knows"
        )


def _scratch(size: int, alignment: int) -> Any:
    """Zeroed memory that is known as the GPU's."""
    import torch

    return torch.zeros(size, dtype=torch.int8, device="cuda")


# -- measurements ---------------------------------------------------------------------------------


def _benchmark(_function: Any, *_: Any, quantiles: Any = None, return_mode: str = "mean", **__: Any
               ) -> Any:  # fmt: skip
    """Return nominal times in the shape of `triton.testing.do_bench`, without a call."""
    time = nominal_time()
    if quantiles is not None:
        return [time] * len(quantiles) if len(quantiles) > 1 else time
    return [time] if return_mode == "all" else time


def _skipped(self: Any, *_: Any, **__: Any) -> None:
    """triton.testing.Mark.run: nothing to plot."""
    names = [benchmark.plot_name for benchmark in _benchmarks_of(self)]
    print(f"ptxemu: no benchmark runs here, times are nominal: {', '.join(names)}", file=sys.stderr)


def _benchmarks_of(mark: Any) -> Sequence[Any]:
    found = mark.benchmarks
    return found if isinstance(found, list | tuple) else [found]


_TESTING = {"do_bench": _benchmark, "do_bench_cudagraph": _benchmark}


def _choose(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
    """Autotuner._bench: 1 for the configuration to take, more for those behind it, and infinity for
    those that the GPU cannot run. It compiles, and launches nothing."""
    errors: Any = import_module("triton.runtime.errors")
    compile_errors: Any = import_module("triton.compiler.errors")
    failures = (errors.OutOfResources, compile_errors.CompileTimeAssertionFailure)
    wanted = os.environ.get(CONFIG_VARIABLE, "")
    if wanted:
        return [MEANINGLESS_TIME + (self.configs.index(config) != _number(self, wanted))] * 3
    nargs = self.nargs
    if getattr(self, "_ptxemu_chosen", None) is nargs:  # of this call: it is a new dict each time
        return [2 * MEANINGLESS_TIME] * 3
    current = {**meta, **config.all_kwargs()}
    if config.pre_hook:
        config.pre_hook({**nargs, **current})
    try:
        kernel = self.fn.run(*args, **{**current, "warmup": True})
        kernel._init_handles()
    except failures:
        return [float("inf")] * 3
    self._ptxemu_chosen = nargs
    return [MEANINGLESS_TIME] * 3


def _number(autotuner: Any, wanted: str) -> int:
    """The number of a configuration; ValueError with all of them for another word."""
    count = len(autotuner.configs)
    if not wanted.isdigit() or int(wanted) >= count:
        listed = "\n".join(f"  {n}: {config}" for n, config in enumerate(autotuner.configs))
        raise ValueError(f"{CONFIG_VARIABLE}={wanted}: must be 0 to {count - 1}\n{listed}")
    return int(wanted)
