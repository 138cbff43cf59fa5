"""`torch.cuda` of a machine with one GPU, idle because every launch ends before it returns.

Questions are answered for `gpus.current()`. Streams and events have nothing to wait for, a measured
time is nominal, and captured work is recorded by `graphs`.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

from ptxemu.host import gpus
from ptxemu.host.cuda_stubs import VERSION, constantly, nominal_time
from ptxemu.host.graphs import Graph, capturing, graph


class _Idle:
    """An object, made of anything, whose methods do nothing."""

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        pass

    __init__ = __exit__ = _do_nothing

    def __enter__(self) -> Any:
        return self


class Stream(_Idle):
    """A stream on which all work is done as soon as it is issued."""

    cuda_stream = 0  # the default stream
    stream_id = device_index = device_type = priority = 0
    synchronize = wait_stream = wait_event = _Idle._do_nothing

    @property
    def device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


class Event(_Idle):
    """An event that has happened."""

    cuda_event = 1
    synchronize = wait = record = _Idle._do_nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        """Return the nominal time; the first call of a process says that it is nominal."""
        return nominal_time()


class _Within(_Idle):
    """Replacement for `torch.cuda.stream` and `torch.cuda.device`: a context without effect."""


@cache
def _properties(gpu: gpus.Gpu) -> SimpleNamespace:
    numbers = {
        "warp_size": 10,
        "max_threads_per_block": 1,
        "max_threads_per_multi_processor": 39,
        "regs_per_multiprocessor": 82,
        "shared_memory_per_block": 8,
        "shared_memory_per_block_optin": 97,
        "shared_memory_per_multiprocessor": 81,
        "clock_rate": 13,
        "memory_clock_rate": 36,
        "memory_bus_width": 37,
        "is_integrated": 18,
        "is_multi_gpu_board": 84,
        "pci_bus_id": 33,
        "pci_device_id": 34,
        "pci_domain_id": 50,
    }
    return SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=gpu.sms,
        L2_cache_size=gpu.l2_bytes,
        total_memory=gpu.memory_bytes,
        gcnArchName=gpu.name,
        uuid="00000000-0000-0000-0000-000000000000",
        **{name: gpu.attribute(number) for name, number in numbers.items()},
    )


def _memory() -> int:
    return gpus.current().memory_bytes


def _statistics(*_: Any) -> OrderedDict[str, Any]:
    """Statistics of an allocator that has given nothing: memory is the host's."""
    names = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes",
             "allocation", "segment", "active", "inactive_split", "requested_bytes")  # fmt: skip
    pools = ("all", "small_pool", "large_pool")
    moments = ("current", "peak", "allocated", "freed")
    keys = [".".join(words) for words in product(names, pools, moments)]
    counters = ["num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc",
                "num_device_free", "max_split_size"]  # fmt: skip
    return OrderedDict((key, 0) for key in sorted([*keys, *counters]))


def _get_rng_state(*_: Any, **__: Any) -> Any:
    import torch

    return torch.get_rng_state()


def _set_rng_state(state: Any, *_: Any, **__: Any) -> None:
    import torch

    torch.set_rng_state(state.cpu())


def _seed(number: int, *_: Any) -> None:
    """Seed the generator that draws here: the CPU's."""
    import torch

    torch.default_generator.manual_seed(int(number))


_NOTHING = """
    _lazy_init init set_device synchronize empty_cache ipc_collect set_stream
    reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached
    reset_accumulated_memory_stats set_per_process_memory_fraction set_sync_debug_mode
""".split()  # each gets its own function, as torch._dynamo asks
_ZERO = """
    current_device memory_allocated max_memory_allocated memory_reserved max_memory_reserved
    memory_cached max_memory_cached get_sync_debug_mode utilization memory_usage
    host_memory_stats current_blas_handle
""".split()
_TRUE = "is_available is_initialized is_bf16_supported is_tf32_supported _is_compiled".split()


def cuda_module() -> dict[str, Any]:
    """Attributes of `torch.cuda`."""
    return {
        **{name: constantly(None) for name in _NOTHING},
        **{name: constantly(0) for name in _ZERO},
        **{name: constantly(True) for name in _TRUE},
        "device_count": constantly(1),
        "device": _Within,
        "device_of": _Within,
        "_DeviceGuard": _Within,
        "can_device_access_peer": constantly(False),
        "get_device_capability": lambda *_, **__: gpus.current().capability,
        "get_device_name": lambda *_, **__: gpus.current().name,
        "get_device_properties": lambda *_, **__: _properties(gpus.current()),
        "get_arch_list": lambda: [gpus.current().arch],
        "get_gencode_flags": lambda: f"-gencode arch={gpus.current().arch}",
        "memory_stats": _statistics,
        "memory_stats_as_nested_dict": constantly({}),
        "memory_summary": lambda *_, **__: "ptxemu: device memory is the host's",
        "memory_snapshot": constantly([]),
        "mem_get_info": lambda *_, **__: (_memory(), _memory()),
        "get_rng_state": _get_rng_state,
        "get_rng_state_all": lambda: [_get_rng_state()],
        "set_rng_state": _set_rng_state,
        "set_rng_state_all": lambda states: _set_rng_state(states[0]),
        "manual_seed": _seed,
        "manual_seed_all": _seed,
        "seed": constantly(None),
        "seed_all": constantly(None),
        "initial_seed": constantly(0),
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "stream": _Within,
        "StreamContext": _Within,
        "current_stream": lambda *_, **__: Stream(),
        "default_stream": lambda *_, **__: Stream(),
        "get_stream_from_external": lambda *_, **__: Stream(),
        "CUDAGraph": Graph,
        "graph": graph,
        "graph_pool_handle": constantly((0, 0)),
        "is_current_stream_capturing": lambda: capturing() is not None,
        "nvtx": SimpleNamespace(
            range_push=constantly(0),
            range_pop=constantly(0),
            range_start=constantly(0),
            range_end=constantly(None),
            mark=constantly(None),
            range=lambda *_, **__: nullcontext(),
        ),
    }


def runtime_module() -> dict[str, Any]:
    """Attributes of `torch._C` that libraries take from there without `torch.cuda`."""
    return {
        "_cuda_getCurrentRawStream": constantly(0),
        "_cuda_getDevice": constantly(0),
        "_cuda_getDeviceCount": constantly(1),
        "_cuda_setDevice": constantly(None),
        "_cuda_isCurrentStreamCapturing": lambda: capturing() is not None,
        "_cuda_synchronize": constantly(None),
        "_cuda_getCompiledVersion": constantly(VERSION),
    }
