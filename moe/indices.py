"""Tables of rows and of experts, and scales, looked at in the memory of this machine. On a GPU
nobody reads them back: they are taken as they are."""

from __future__ import annotations

import torch

from kernelkit.call.tensors import as_number, require_type
from kernelkit.plan.limits import FLT_MAX, FLT_MIN


def check_range(name: str, tensor: torch.Tensor, end: int, limit: str, *, begin: int = 0) -> None:
    """ValueError for a value outside begin .. end - 1; limit says what they are."""
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        return
    low, high = (int(value) for value in tensor.aminmax())
    if low < begin or high >= end:
        raise ValueError(f"{name} has values from {low} to {high}, but {limit}")


def check_offsets(offsets: torch.Tensor, rows: int) -> None:
    """ValueError unless they ascend from 0 to the number of rows at most."""
    if offsets.device.type != "cpu":
        return
    values = offsets.tolist()
    if values[0] != 0 or values[-1] > rows or values != sorted(values):
        raise ValueError(f"offsets {values}: ascending from 0, at most to the {rows} rows of x")


def range_fields(expert_range: tuple[int, int] | None) -> dict[str, int]:
    """The fields `first_expert` and `end_expert` that stand for a range of experts, none for all of
    them; TypeError for what is no pair of ints."""
    if expert_range is None:
        return {}
    if not isinstance(expert_range, tuple | list) or len(expert_range) != 2:
        raise TypeError(f"expert_range is {expert_range!r}, expected (first, end) or None")
    first, end = expert_range
    return {
        "first_expert": as_number("expert_range[0]", first, int),
        "end_expert": as_number("expert_range[1]", end, int),
    }


def check_expert_range(first: int, end: int, experts: int) -> None:
    """ValueError for a range without experts, or with some that there are not."""
    if not 0 <= first < end <= experts:
        raise ValueError(
            f"expert_range ({first}, {end}): at least one of the experts 0 to {experts - 1}"
        )


def check_scale(name: str, scale: torch.Tensor) -> None:
    """ValueError unless all global scales are positive and finite."""
    if scale.device.type != "cpu":
        return
    wrong = (~((scale > 0) & scale.isfinite())).nonzero()
    if len(wrong):
        row = int(wrong[0, 0])
        raise ValueError(f"{name}[{row}] is {scale[row].item()}: positive and finite")


def check_bias(name: str, bias: torch.Tensor) -> None:
    """ValueError for a bias of experts that is NaN or +inf; -inf is the last choice of all."""
    if bias.device.type != "cpu":
        return
    wrong = (~(bias < torch.inf)).nonzero()
    if len(wrong):
        expert = int(wrong[0, 0])
        raise ValueError(
            f"{name}[{expert}] is {bias[expert].item()}: expected a number below +inf; -inf makes "
            "an expert the last choice"
        )


def check_factor(name: str, factor: float) -> None:
    """TypeError for what is no number, ValueError unless it is positive and normal in fp32."""
    require_type(name, factor, float)
    if not FLT_MIN <= factor <= FLT_MAX:
        raise ValueError(
            f"{name} {factor}: above 0, from {FLT_MIN:.4g} to {FLT_MAX:.4g} (normal in fp32)"
        )
