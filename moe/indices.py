"""Tables of rows and of experts, and scales, looked at in the memory of this machine. On a GPU
nobody reads them back: they are taken as they are."""

from __future__ import annotations

import torch

from kernelkit.limits import FLT_MAX, FLT_MIN


def check_range(name: str, tensor: torch.Tensor, end: int, limit: str) -> None:
    """ValueError for a value outside 0 .. end - 1; limit says what they are."""
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        return
    low, high = (int(value) for value in tensor.aminmax())
    if low < 0 or high >= end:
        raise ValueError(f"{name} has values from {low} to {high}, but {limit}")


def check_offsets(offsets: torch.Tensor, rows: int) -> None:
    """ValueError unless they ascend from 0 to the number of rows."""
    if offsets.device.type != "cpu":
        return
    values = offsets.tolist()
    if values[0] != 0 or values[-1] != rows or values != sorted(values):
        raise ValueError(f"offsets {values}: ascending from 0 to the {rows} rows of x")


def check_scale(name: str, scale: torch.Tensor) -> None:
    """ValueError unless all global scales are positive and finite."""
    if scale.device.type != "cpu":
        return
    wrong = (~((scale > 0) & scale.isfinite())).nonzero()
    if len(wrong):
        row = int(wrong[0, 0])
        raise ValueError(f"{name}[{row}] is {scale[row].item()}: positive and finite")


def check_factor(name: str, factor: float) -> None:
    """ValueError for a number of the host that is no positive normal one of fp32."""
    if not FLT_MIN <= factor <= FLT_MAX:
        raise ValueError(
            f"{name} {factor}: above 0, from {FLT_MIN:.4g} to {FLT_MAX:.4g} (normal in fp32)"
        )
