"""What a kernel may assume of a torch tensor, checked by value and limit before anything compiles.

TMA reads any tensor whose last dimension is contiguous and whose base address and other strides
are multiples of 16 bytes: views and slices need no copy, broadcasts (stride 0) are refused.
"""

from __future__ import annotations

import torch

from kernelkit import hw


def require_tensors(**tensors: object) -> None:
    """TypeError for what is no tensor, ValueError for tensors that live on different devices."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}, expected torch.Tensor")
    devices = {name: str(tensor.device) for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"tensors are on different devices: {devices}")


def require_rank(name: str, tensor: torch.Tensor, layout: str) -> None:
    """ValueError unless `tensor` has as many dimensions as `layout` names, e.g. '[B, S, H, D]'."""
    rank = layout.count(",") + 1
    if tensor.ndim != rank:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, rank {tensor.ndim}; expected {layout}"
        )


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
    """The same memory; dimensions of size 1, whose stride means nothing, get a harmless one."""
    strides = [
        tensor.shape[-1] if size == 1 else stride
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    ]
    return tensor.as_strided(tensor.shape, (*strides, 1))
