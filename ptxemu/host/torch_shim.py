"""torch as if it had a CUDA device whose memory is the host's.

Devices named 'cuda' become 'cpu' wherever a torch function accepts one, and `torch.cuda` describes
one idle B200. New tensors lie in blocks as those of torch's CUDA allocator, multiples of 512 bytes:
on a GPU, a kernel that reads past a tensor but inside its block reads no other tensor. The storage
of a tensor has the requested size, as with that allocator; `allocations` knows the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

from ptxemu.host.allocations import LIVE
from ptxemu.host.cuda_stubs import CAPABILITY, L2_BYTES, NAME, SMS, constantly, nominal_time
from ptxemu.host.patching import patched, threads_within
from ptxemu.host.runtime_symbols import device_attribute
from ptxemu.host.scaled_mm import substitute

BLOCK_BYTES = 512  # of torch's CUDA allocator; CPU memory comes in multiples of nothing

# Functions whose results share memory with something that is not a tensor argument.
_SHARING = set("from_numpy frombuffer from_dlpack from_file as_tensor asarray __get__".split())


@contextmanager
def torch_without_gpu() -> Iterator[None]:
    """While active, torch code written for a CUDA device runs on CPU tensors."""
    import torch

    with ExitStack() as stack:
        stack.enter_context(patched(torch.cuda, _CUDA))
        stack.enter_context(patched(torch.Tensor, _TENSOR))
        stack.enter_context(patched(torch.profiler, {"profile": _Profile}))
        stack.enter_context(
            patched(torch.library, {"custom_op": _for_any_device(torch.library.custom_op)})
        )
        stack.enter_context(_mode())
        stack.enter_context(threads_within(_mode))
        yield


class _Idle:
    """A context manager, made of anything, that does nothing."""

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        pass

    __init__ = __exit__ = _do_nothing

    def __enter__(self) -> Any:
        return self


class _Stream(_Idle):
    """A stream or event on which all work is done as soon as it is issued."""

    cuda_stream = 0  # the default stream
    cuda_event = 1
    device_index = 0
    synchronize = wait = wait_stream = wait_event = record = replay = reset = _Idle._do_nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return nominal_time()


class _Profile(_Idle):
    """Replacement for torch.profiler.profile, which records nothing."""

    step = _Idle._do_nothing

    def key_averages(self, *_: Any, **__: Any) -> Any:
        util: Any = import_module("torch.autograd.profiler_util")
        return util.EventList()


def _for_any_device(custom_op: Any) -> Any:
    """torch.library.custom_op: the tensors of an operator for CUDA devices are on the CPU here."""

    def for_any_device(*args: Any, device_types: Any = None, **kwargs: Any) -> Any:
        return custom_op(*args, device_types=None, **kwargs)

    return for_any_device


_PROPERTIES = SimpleNamespace(
    name=NAME,
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=SMS,
    L2_cache_size=L2_BYTES,
    total_memory=180 * 2**30,
    warp_size=device_attribute(10),
    max_threads_per_multi_processor=device_attribute(39),
    regs_per_multiprocessor=device_attribute(82),
    shared_memory_per_block=device_attribute(8),
    shared_memory_per_block_optin=device_attribute(97),
    shared_memory_per_multiprocessor=device_attribute(81),
)

_NOTHING = "_lazy_init init set_device synchronize empty_cache reset_peak_memory_stats".split()
# Captured work, too, runs at once, and replaying a graph does nothing.
_STREAMS = "Stream ExternalStream Event CUDAGraph stream graph".split()
_CUDA = {
    **{name: constantly(None) for name in _NOTHING},  # each its own, as torch._dynamo asks
    "is_available": constantly(True),
    "is_initialized": constantly(True),
    "is_bf16_supported": constantly(True),
    "device_count": constantly(1),
    "current_device": constantly(0),
    "device": constantly(nullcontext()),
    "can_device_access_peer": constantly(False),
    "get_device_capability": constantly(CAPABILITY),
    "get_device_name": constantly(NAME),
    "get_device_properties": constantly(_PROPERTIES),
    "max_memory_allocated": constantly(0),
    "memory_allocated": constantly(0),
    "mem_get_info": constantly((_PROPERTIES.total_memory, _PROPERTIES.total_memory)),
    **dict.fromkeys(_STREAMS, _Stream),
    "current_stream": constantly(_Stream()),
    "default_stream": constantly(_Stream()),
}

_TENSOR = {
    "is_cuda": property(lambda self: True),
    "get_device": lambda self: 0,
    "pin_memory": lambda self, *_: self,
    "record_stream": lambda self, *_: None,
}


def _mode() -> Any:
    """A torch function mode: it sees every call of torch's Python interface."""
    from torch.overrides import TorchFunctionMode

    class CudaOnCpu(TorchFunctionMode):
        def __torch_function__(
            self,
            function: Any,
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            return _call(function, args, kwargs or {})

    return CudaOnCpu()


def _call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call torch with devices rewritten, transfers as copies, and new tensors in blocks."""
    import torch

    rewritten = tuple("cpu" if _is_cuda(argument) else argument for argument in args)
    keywords = {k: "cpu" if k == "device" and _is_cuda(v, True) else v for k, v in kwargs.items()}
    keywords.pop("pin_memory", None)
    if function is torch.Tensor.cuda:
        return _in_a_block(args[0].clone())
    instead = substitute(function)
    result = instead(*rewritten, **keywords) if instead else NotImplemented
    if result is NotImplemented:
        result = function(*rewritten, **keywords)
    moved = function is torch.Tensor.cpu or (
        function is torch.Tensor.to and (rewritten, keywords) != (args, kwargs)
    )
    if moved and result.data_ptr() == args[0].data_ptr():
        result = result.clone()
    if getattr(function, "__name__", "") not in _SHARING:
        _move_new(result, _storages([*args, *kwargs.values()]))
    return result


def _is_cuda(device: Any, or_index: bool = False) -> bool:
    import torch

    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return or_index and isinstance(device, int)


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _storages(values: list[Any]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in _tensors(values) if _has_storage(t)}


def _has_storage(tensor: Any) -> bool:
    import torch

    return tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _move_new(result: Any, existing: set[int]) -> None:
    """Give blocks to the tensors of a result that share no memory with the arguments."""
    for tensor in _tensors(result):
        if not _has_storage(tensor) or tensor.grad_fn is not None:
            continue
        if tensor.untyped_storage().data_ptr() not in existing:
            _in_a_block(tensor)


def _in_a_block(tensor: Any) -> Any:
    """Move the storage of a tensor to a separate block, in place."""
    import torch

    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if not nbytes:
        return tensor
    if (storage.data_ptr() | nbytes) % BLOCK_BYTES == 0:
        LIVE.note_storage(storage)
        return tensor
    size = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
    memory = np.empty(size + BLOCK_BYTES, np.uint8)
    start = -memory.ctypes.data % BLOCK_BYTES
    block = torch.frombuffer(memory[start : start + nbytes], dtype=torch.uint8)
    held: Any = torch.empty(0, dtype=torch.uint8)
    block.copy_(held.set_(storage, 0, (nbytes,)))
    LIVE.note_storage(block.untyped_storage(), size)
    moved: Any = torch.empty(0, dtype=tensor.dtype)
    tensor.data = moved.set_(
        block.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    return tensor
