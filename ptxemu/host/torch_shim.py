"""torch as if it had a CUDA device whose memory is the host's.

Tensors made for 'cuda' are CPU tensors with a mark on their storage (`marks`). They say that they
are on cuda:0, and so do views of them and results of operations on them. Requests for a CUDA device
become requests for the CPU before torch sees them, so code of torch itself, and DLPack, see the
truth. New tensors lie in blocks as those of torch's CUDA allocator, multiples of 512 bytes: on a
GPU, a kernel that reads past a tensor but inside its block reads no other tensor. The storage of a
tensor has the requested size, as with that allocator; `allocations` knows the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from ptxemu.host import graphs
from ptxemu.host.allocations import LIVE
from ptxemu.host.marks import Marks, keys_of, storage_of, tensors_in
from ptxemu.host.patching import patched, threads_within
from ptxemu.host.scaled_mm import substitute
from ptxemu.host.torch_cuda import cuda_module, runtime_module
from ptxemu.host.torch_operators import operators_within

BLOCK_BYTES = 512  # of torch's CUDA allocator; CPU memory comes in multiples of nothing
MARKS = Marks()  # of this process

# Functions whose results share memory with something that is not a tensor argument.
_SHARING = set("from_numpy frombuffer from_dlpack from_file as_tensor asarray __get__".split())
_MOVES = {"to", "cuda", "cpu"}
# Before what follows the device in the text of a tensor.
_SUFFIX = re.compile(r",\s+(?=(?:size|dtype|layout|requires_grad|grad_fn|names|tangent)=)")


@contextmanager
def torch_without_gpu() -> Iterator[None]:
    """While active, torch code written for a CUDA device runs on CPU tensors."""
    import torch

    with ExitStack() as stack:
        stack.enter_context(patched(torch.cuda, cuda_module()))
        stack.enter_context(patched(torch._C, runtime_module()))
        stack.enter_context(patched(torch.Tensor, _TENSOR))
        stack.enter_context(operators_within(_mode, MARKS))
        stack.enter_context(_mode())
        stack.enter_context(threads_within(_mode))
        yield


def is_on_gpu(tensor: Any) -> bool:
    """Whether a tensor is in the memory of the pretended GPU."""
    import torch

    with torch._C.DisableTorchFunction():
        return MARKS.holds(tensor)


_TENSOR = {
    "is_cuda": property(is_on_gpu),
    "pin_memory": lambda self, *_: self,
    "record_stream": lambda self, *_: None,
}


def _mode() -> Any:
    """A torch function mode: it sees every call of torch's Python interface."""
    from torch.overrides import TorchFunctionMode

    class CudaOnCpu(TorchFunctionMode):
        pretends = True  # a mark for `torch_operators`

        def __torch_function__(
            self,
            function: Any,
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            name = getattr(function, "__name__", "")
            if name == "__get__":
                return _got(function, args[0])
            if name in _ANSWERS:
                return _ANSWERS[name](function, args, kwargs or {})
            capture = graphs.capturing()
            if capture is not None:
                return capture.call(_call, function, args, kwargs or {})
            return _call(function, args, kwargs or {})

    return CudaOnCpu()


# -- questions to a tensor ------------------------------------------------------------------------


def _got(getter: Any, tensor: Any) -> Any:
    """The value of an attribute: a device as the mark has it, a tensor marked as its owner is."""
    import torch

    kind: Any = torch.Tensor
    if getter == kind.device.__get__:
        return torch.device("cuda", 0) if MARKS.holds(tensor) else tensor.device
    if getter == kind.is_cpu.__get__:
        return tensor.is_cpu and not MARKS.holds(tensor)
    found = getter(tensor)
    if isinstance(found, torch.Tensor) and MARKS.holds(tensor):
        MARKS.add_tensors(found)
    return found


def _get_device(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return 0 if args and MARKS.holds(args[0]) else function(*args, **kwargs)


def _type(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensor.type(): its name, or a conversion."""
    if len(args) + len(kwargs) > 1:
        words = [word.replace("torch.cuda.", "torch.") if isinstance(word, str) else word
                 for word in args[1:]]  # fmt: skip
        return _call(function, (args[0], *words), kwargs)
    name = function(*args)
    return name.replace("torch.", "torch.cuda.", 1) if MARKS.holds(args[0]) else name


def _repr(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Text of a tensor, with its device in the place where torch names it."""
    text: str = function(*args, **kwargs)
    is_number = function.__name__ == "__format__" and args[0].dim() == 0
    if is_number or not MARKS.holds(args[0]):
        return text
    strings: Any = import_module("torch._tensor_str")
    values, *suffixes = _SUFFIX.split(text[:-1])
    indent = len(values.partition("(")[0].rpartition("\n")[2]) + 1
    return strings._add_suffixes(values, ["device='cuda:0'", *suffixes], indent, False)


def _device(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.device(): a number is a CUDA device."""
    if args and isinstance(args[0], int):
        return function("cuda", *args)
    return function(*args, **kwargs)


def _unchanged(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


_ANSWERS = {
    "get_device": _get_device,
    "type": _type,
    "__repr__": _repr,
    "__format__": _repr,
    "device": _device,
    **dict.fromkeys(
        "_parse_to untyped_storage data_ptr size dim stride __len__ is_contiguous".split(),
        _unchanged,
    ),
}


# -- calls ----------------------------------------------------------------------------------------


def _call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call torch with devices rewritten, transfers as copies, and new tensors in blocks."""
    name = getattr(function, "__name__", "")
    wanted, rewritten, keywords = _on_cpu(name, function, args, kwargs)
    if name == "cuda":
        for device in args[1:2]:
            _is_cuda(device)  # refuses a second one
        return _moved(args[0], args[0], True)
    given = [*tensors_in([*args, *kwargs.values()])]
    own = keys_of(given)
    marked = MARKS.any_of(own) if wanted is None else wanted
    addresses = _addresses(given)
    instead = substitute(function)
    result = instead(*rewritten, **keywords) if instead else NotImplemented
    if result is NotImplemented:
        result = function(*rewritten, **keywords)
    if name in _MOVES:
        return _moved(args[0], result, wanted)
    if name not in _SHARING:
        _move_new(result, addresses)
    elif wanted and not any(map(MARKS.holds, tensors_in(result))):  # a transfer to the device
        result = _in_a_block(result.clone())
    if marked:
        MARKS.add_tensors([each for each in tensors_in(result) if _is_new(each, own)])
    return result


def _on_cpu(
    name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool | None, tuple[Any, ...], dict[str, Any]]:
    """Return (whether the result is wanted on the GPU, arguments that name the CPU instead).

    The first is None if the call names no device.
    """
    import torch

    rewritten, keywords, wanted = args, kwargs, None
    kinds = (str, torch.device)
    if any(isinstance(each, kinds) and _is_device(each) for each in args):
        wanted = any(isinstance(each, kinds) and _is_cuda(each) for each in args)
        rewritten = tuple("cpu" if isinstance(each, kinds) and _is_cuda(each) else each
                          for each in args)  # fmt: skip
    if kwargs:
        keywords = dict(kwargs)
        keywords.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is not None:
            wanted = _is_cuda(device)
            keywords["device"] = "cpu" if wanted else device
    if name == "cpu":
        wanted = False
    elif name == "cuda":
        wanted = True
    elif name == "to" and wanted is None:
        other = args[1] if len(args) > 1 else kwargs.get("other")
        wanted = MARKS.holds(other) if isinstance(other, torch.Tensor) else None
    elif wanted is None and _default_is_cuda() and function in _factories():
        wanted = True
    return wanted, rewritten, keywords


def _moved(tensor: Any, result: Any, wanted: bool | None) -> Any:
    """The result of a transfer or conversion: a copy if it changes the device."""
    here = MARKS.holds(tensor)
    there = here if wanted is None else wanted
    storage, own = storage_of(result), storage_of(tensor)
    if storage is None or own is None:
        return result
    if there != here and storage._cdata == own._cdata:
        result = result.clone()
    if storage_of(result)._cdata != own._cdata:
        _move_new(result, set())
        if there:
            MARKS.add_tensors(result)
    return result


def _is_device(value: Any) -> bool:
    """Whether a text or device names a device: one of torch, 'cuda:0', or 'cpu'."""
    return not isinstance(value, str) or value.partition(":")[0] in ("cuda", "cpu", "meta")


def _is_cuda(device: Any) -> bool:
    """Whether a device is the pretended GPU; RuntimeError for a second one."""
    import torch

    if isinstance(device, torch.device):
        kind, index = device.type, device.index
    elif isinstance(device, str):
        kind, _, number = device.partition(":")
        index = int(number) if number.isdigit() else 0
    elif isinstance(device, int):
        kind, index = "cuda", device
    else:
        return False
    if kind == "cuda" and index:
        raise RuntimeError(f"CUDA error: invalid device ordinal {index}: ptxemu shows one GPU, 0")
    return kind == "cuda"


def _default_is_cuda() -> bool:
    """Whether `torch.set_default_device` or `with torch.device` chose the GPU."""
    from torch.utils import _device

    default = _device.CURRENT_DEVICE
    return default is not None and default.type == "cuda"


def _factories() -> Any:
    from torch.utils import _device

    return _device._device_constructors()


# -- blocks ---------------------------------------------------------------------------------------


def _addresses(tensors: list[Any]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if _has_storage(t)}


def _is_new(tensor: Any, known: set[int]) -> bool:
    storage = storage_of(tensor)
    return storage is not None and storage._cdata not in known


def _has_storage(tensor: Any) -> bool:
    """Whether a tensor has memory here: it is plain, and not fake."""
    import torch

    plain = tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and tensor.untyped_storage().device.type == "cpu"


def _move_new(result: Any, existing: set[int]) -> None:
    """Give blocks to the tensors of a result that share no memory with the arguments."""
    for tensor in tensors_in(result):
        if not _has_storage(tensor) or tensor.grad_fn is not None:
            continue
        if tensor.untyped_storage().data_ptr() not in existing:
            _in_a_block(tensor)


def _in_a_block(tensor: Any) -> Any:
    """Move the storage of a tensor to a separate block, in place."""
    import torch

    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if not nbytes or storage.device.type != "cpu":
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
