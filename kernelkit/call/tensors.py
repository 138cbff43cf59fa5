"""Checks of a kernel's assumptions about torch tensors, with value and limit, before compiling.

TMA reads any tensor whose last dimension is contiguous and whose base address and other strides are
multiples of 16 bytes. Views and slices need no copy; broadcasts (stride 0) are refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from kernelkit.plan import hw

MAPS = "/proc/self/maps"
MOST_WORK: Any = 100_000  # steps of numpy's search for a byte that two tensors share
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
INPUT_NAMES = DTYPE_NAMES | {torch.float8_e4m3fn: "e4m3"}
DTYPES = {name: dtype for dtype, name in INPUT_NAMES.items()}

# A bool is no number, an int is a float; numbers of numpy are numbers.
ACCEPTED = {int: (int, Integral, torch.SymInt), float: (float, int, Real, torch.SymFloat)}


def require_type(name: str, value: object, kind: type, *, optional: bool = False) -> None:
    """TypeError for a value that is not of `kind`, nor None where it is optional."""
    if type(value) is kind or (value is None and optional):
        return
    is_truth = isinstance(value, bool) and kind is not bool
    if isinstance(value, ACCEPTED.get(kind, (kind,))) and not is_truth:
        if kind is float and isinstance(value, int | Fraction):
            _require_float_range(name, int(value))
        return
    if kind is torch.Tensor or isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is {type(value).__name__}, expected {_named(kind)}")
    raise TypeError(f"{name} is {value!r}, expected {_named(kind)}{' | None' * optional}")


def _named(kind: type) -> str:
    """The name of a type, with the module for those of torch."""
    return f"torch.{kind.__name__}" if kind in (torch.Tensor, torch.dtype) else kind.__name__


def _require_float_range(name: str, value: int) -> None:
    if abs(value) > sys.float_info.max:
        raise ValueError(f"{name} is an int of {value.bit_length()} bits, beyond any float")


def as_number(name: str, value: Any, kind: type, *, optional: bool = False) -> Any:
    """Return a number of any library as Python's own int or float.

    The result for `kind` float may be an int. None and symbolic sizes stay as they are.

    Raises:
        TypeError, ValueError: as `require_type` does.
    """
    require_type(name, value, kind, optional=optional)
    if type(value) in (int, float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def require_int64(**values: object) -> None:
    """ValueError for an int that no operator of torch takes."""
    for name, value in values.items():
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"{name} {value}: not an int64")


def require_dtypes(dtypes: object, supported: Collection[torch.dtype]) -> None:
    """TypeError for what is no collection of dtypes, NotImplementedError for one that is not
    supported."""
    if not isinstance(dtypes, tuple | list | set | frozenset):
        raise TypeError(f"dtypes is {type(dtypes).__name__}, expected a sequence of torch.dtype")
    for dtype in dtypes:
        if not isinstance(dtype, torch.dtype) or dtype not in supported:
            raise NotImplementedError(f"dtypes has {dtype!r}: supported are {tuple(supported)}")


def require_types(**tensors: object) -> None:
    """TypeError for what is no tensor."""
    for name, tensor in tensors.items():
        require_type(name, tensor, torch.Tensor)


def require_tensors(**tensors: Any) -> None:
    """TypeError for what is no tensor, ValueError for tensors that live on different devices."""
    require_types(**tensors)
    if len({tensor.device for tensor in tensors.values()}) > 1:
        devices = {name: str(tensor.device) for name, tensor in tensors.items()}
        raise ValueError(f"tensors are on different devices: {devices}")


def require_strided(**tensors: torch.Tensor) -> None:
    """TypeError for a tensor that is not its elements by strides: sparse, quantised, nested,
    lazily negated, or a tracer's. `torch.compile` cannot look at that, and operators do again."""
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        kind = _kind_without_strides(tensor)
        if kind:
            raise TypeError(f"{name} is a {kind} tensor, expected a plain strided one")


def require_memory(**tensors: torch.Tensor) -> None:
    """TypeError or ValueError for a tensor that is not its elements by strides in memory of its
    own: what `require_strided` refuses, a wrapper of others, or freed."""
    require_strided(**tensors)
    for name, tensor in tensors.items():
        if tensor.device.type == "meta" or not tensor.numel():
            continue
        needed = tensor.storage_offset() * tensor.itemsize + reach(tensor)
        there = tensor.untyped_storage().nbytes()
        if there < needed:
            raise ValueError(
                f"{name} reaches to byte {needed} of its storage, which has {there}: it was freed"
            )
        if isinstance(tensor, FakeTensor) or not tensor.data_ptr():
            raise TypeError(f"{name} is {type(tensor).__name__} without memory of its own")


def _kind_without_strides(tensor: torch.Tensor) -> str:
    """Name the kind of a tensor that is not plain strided memory; '' for one that is."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.").strip("_")
    if tensor.is_quantized:
        return "quantised"
    if tensor._is_zerotensor():
        return "zero"
    if torch._is_functional_tensor(tensor):
        return "functional"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "torch.func"
    return "lazily negated or conjugated" if tensor.is_neg() or tensor.is_conj() else ""


def require_no_grad(**tensors: torch.Tensor) -> None:
    """NotImplementedError where autograd expects gradients through what has no backward."""
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise NotImplementedError(f"{name} requires grad: there is no backward; use no_grad()")


def require_no_tangents(given: Mapping[str, object]) -> None:
    """NotImplementedError for a tensor of forward-mode AD: its tangent would be lost."""
    for name, tensor in given.items():
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{name} has a tangent: there is no forward-mode derivative")


def require_rank(name: str, tensor: torch.Tensor, layout: str) -> None:
    """ValueError unless `tensor` has as many dimensions as `layout` names, e.g. '[B, S, H, D]'."""
    if tensor.is_nested:  # which has no shape
        require_strided(**{name: tensor})
    rank = layout.count(",") + 1
    if tensor.ndim != rank:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, rank {tensor.ndim}; expected {layout}"
        )


def require_table(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> None:
    """ValueError unless `tensor` has this dtype and shape, None for any size, with rows in one
    piece: what threads read themselves, element by element."""
    if tensor.is_nested:  # which has no shape
        require_strided(**{name: tensor})
    fits = tensor.ndim == len(shape) and all(
        wanted in (None, size) for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if tensor.dtype != dtype or not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        is_long = tensor.dtype == torch.int64 and dtype == torch.int32
        advice = f". Give {name}.int()" if is_long else ""
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} ({sizes}){advice}"
        )
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has last stride {tensor.stride(-1)}, expected 1 (contiguous)")


def require_pages(entry: int, pages: list[int], size: int) -> None:
    """ValueError for an entry of the batch whose pages are not all in a pool of `size`."""
    if any(not 0 <= page < size for page in pages):
        raise ValueError(f"page_table {pages} of entry {entry}: the pool has pages 0 to {size - 1}")


def require_grid(**sizes: int) -> None:
    """ValueError for a size that is no dimension of a grid, behind the first."""
    for name, size in sizes.items():
        if size > hw.MAX_GRID_YZ:
            raise ValueError(f"{name} {size}, limit {hw.MAX_GRID_YZ} (grid dimension)")


def require_tma(name: str, tensor: torch.Tensor) -> None:
    """ValueError for a layout that a TMA descriptor cannot describe."""
    if tensor.numel() == 0:
        return
    if tensor.data_ptr() % hw.TMA_ALIGN_BYTES:
        raise ValueError(
            f"{name} starts at address {tensor.data_ptr():#x}, "
            f"not a multiple of {hw.TMA_ALIGN_BYTES} bytes"
        )
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} has last stride {tensor.stride(-1)}, expected 1 (contiguous)")
    for dim in range(tensor.ndim - 1):
        stride_bytes = tensor.stride(dim) * tensor.element_size()
        if tensor.shape[dim] > 1 and (
            stride_bytes % hw.TMA_ALIGN_BYTES or not 0 < stride_bytes < hw.TMA_MAX_STRIDE_BYTES
        ):
            raise ValueError(
                f"{name} has a stride of {stride_bytes} bytes in dimension {dim}, expected a "
                f"positive multiple of {hw.TMA_ALIGN_BYTES} below {hw.TMA_MAX_STRIDE_BYTES}"
            )


def with_plain_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with harmless strides for dimensions of size 1, over the same memory."""
    shape, strides = tensor.shape, tensor.stride()
    plain = [
        shape[-1] if size == 1 else stride
        for size, stride in zip(shape[:-1], strides[:-1], strict=True)
    ]
    return tensor if strides == (*plain, 1) else tensor.as_strided(shape, (*plain, 1))


def has_whole_rows(tensor: torch.Tensor) -> bool:
    """Whether what lies behind each place of the first dimension, of some elements, is in one
    piece; no view is made to ask."""
    reach = 1
    for size, stride in zip(tensor.shape[:0:-1], tensor.stride()[:0:-1], strict=True):
        if size > 1 and stride != reach:
            return False
        reach *= size
    return True


def is_broadcast(tensor: torch.Tensor) -> bool:
    """Whether elements share memory by a stride of 0."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def without_broadcast(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor that has a dimension of stride 0, since the DSL treats that stride as a
    constant. Use this for tables; large tensors are read in place or refused (`require_tma`)."""
    return tensor.contiguous() if is_broadcast(tensor) else tensor


def plain_table(table: Any) -> Any:
    """A table, or None, as the DSL takes it; the rows of a broadcast are written out."""
    return None if table is None else with_plain_strides(without_broadcast(table))


def in_sequence(table: torch.Tensor) -> torch.Tensor:
    """Return the elements of a table in one dimension of stride 1; a copy where they lie apart.

    `reshape(-1)` of a column of a wider table is a view with that table's stride."""
    return table.contiguous().view(-1)


def device_of(device: object) -> torch.device:
    """torch.device(device); TypeError or ValueError for what names none."""
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device is {device!r}, expected str or torch.device")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device {device!r}: expected 'cpu', 'cuda' or 'cuda:1', for example"
        ) from error


def reach(tensor: torch.Tensor) -> int:
    """Bytes from the address of a tensor to the end of its last element."""
    if not tensor.numel():
        return 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in sizes)) * tensor.itemsize


def same_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same view of the same memory; no address is read."""
    views = [(t.dtype, t.storage_offset(), t.shape, t.stride()) for t in (one, other)]
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata and views[0] == views[1]


def share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a byte of an element of one is a byte of one of the other, whatever the strides. For
    strides among which that takes long to find out: whether one begins before the other ends."""
    if one.device != other.device or "meta" in (one.device.type, other.device.type):
        return False
    here, there = one.untyped_storage(), other.untyped_storage()
    begins = here.data_ptr(), there.data_ptr()
    if begins[0] + here.nbytes() <= begins[1] or begins[1] + there.nbytes() <= begins[0]:
        return False
    first, second = np.asarray(_Elements(one)), np.asarray(_Elements(other))
    try:
        return np.shares_memory(first, second, MOST_WORK)
    except np.exceptions.TooHardError:
        return np.may_share_memory(first, second)


class _Elements:
    """Positions of a tensor's elements as a numpy array, which is never read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{tensor.itemsize}",
            "data": (tensor.data_ptr() or 1, False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
        }


def require_apart(name: str, written: torch.Tensor, other: str, read: torch.Tensor) -> None:
    """ValueError for a tensor that is written and has a byte in common with another argument.

    It may be q itself, all of it: whoever writes an element of O has read that of q.
    """
    if other == "q" and is_same(written, read):
        return
    if share_elements(written, read):
        raise ValueError(
            f"{name} shares memory with {other}: an output may not overlap another argument"
        )


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same elements in the same memory."""
    return (one.data_ptr(), one.itemsize, one.shape, one.stride()) == (
        other.data_ptr(), other.itemsize, other.shape, other.stride()
    )  # fmt: skip


def require_own_elements(name: str, tensor: torch.Tensor) -> None:
    """ValueError for a tensor that is written to, unless its elements lie apart: of the dimensions
    in the order of their strides, each steps over those before it."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} has strides {tensor.stride()}: an output may not "
                "have elements that share memory"
            )
        reach += (size - 1) * stride if size > 1 else 0


def require_writable(**tensors: torch.Tensor) -> None:
    """ValueError for a tensor in memory that is mapped read-only, such as np.memmap's of mode 'r'.

    A store to it would end the process. Memory that torch has allocated can be written and is not
    looked at. Where there is no list of mappings, nothing is refused.
    """
    asked = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.device.type == "cpu"
        and tensor.numel()
        and not tensor.untyped_storage().resizable()
    }
    if not asked:
        return
    protected = [*_protected()]
    for name, tensor in asked.items():
        begin = tensor.data_ptr()
        end = begin + reach(tensor)
        if any(begin < last and first < end for first, last in protected):
            raise ValueError(
                f"{name} is in memory that is mapped read-only, but is an output. Give a copy, or "
                "map the file for writing: np.memmap(..., mode='r+'), or 'c' for a private copy"
            )


def _protected() -> Iterator[tuple[int, int]]:
    """Yield (first, behind the last) address of each mapping that cannot be written."""
    with contextlib.suppress(FileNotFoundError, PermissionError), open(MAPS) as lines:
        for line in lines:
            span, access, _ = line.split(" ", 2)
            if access[1] != "w":
                first, last = span.split("-")
                yield int(first, 16), int(last, 16)


def brought(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor of the host on `device`; to a GPU out of pinned memory, on the current stream,
    without a wait."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def as_meta(value: Any) -> Any:
    """Return the value with all tensors on 'meta', also inside dataclasses."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        return dataclasses.replace(value, **{k: as_meta(v) for k, v in fields.items()})
    return value
