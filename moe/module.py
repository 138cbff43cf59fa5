"""Packed experts as a torch module: its buffers move, are saved and are loaded with a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kernelkit.call.tensors import require_strided
from moe.api import fused_moe
from moe.arguments import Router
from moe.checkpoint import LAYOUT, WEIGHTS, Layout, layout_of, of_layout, read_layout, state_dict
from moe.config import DEFAULT_GRANULARITY
from moe.formats import format_of, row_blocks, scale_bytes
from moe.fused import FusedOptions
from moe.packing import PackedExperts, require_kind
from moe.quantized import Quantized, of_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ExpertWeights(nn.Module):
    """`PackedExperts` in buffers. `state_dict()` has the tensors of `moe.checkpoint.state_dict`, so
    that each can load files of the other.

    A change of dtype, such as `model.bfloat16()`, does not change the buffers. A state dict can be
    loaded only if sizes, format, granularity, biases and pairs are the same. It has no
    `model_type`: that of the module is the one of `packed`.
    """

    def __init__(self, packed: PackedExperts) -> None:
        """Store `packed`, sharing its memory."""
        require_kind("packed", packed, PackedExperts)
        tensors = state_dict(packed)
        require_strided(**tensors)
        super().__init__()
        self._layout: Layout = layout_of(packed)
        self._model_type = packed.model_type
        self.w13, self.w2 = nn.Module(), nn.Module()
        for name, tensor in tensors.items():
            owner, _, field = name.rpartition(".")
            self.get_submodule(owner).register_buffer(field, tensor)
        self._made: tuple[list[torch.Tensor], PackedExperts] = self._tensors(), packed

    @classmethod
    def empty(
        cls,
        sizes: tuple[int, int, int],
        fmt: str = "nvfp4",
        *,
        granularity: int = DEFAULT_GRANULARITY,
        biases: bool = False,
        pairs: bool = False,
        device: str | torch.device | None = None,
    ) -> ExpertWeights:
        """Allocate weights without contents, for `load_state_dict`.

        Args:
            sizes: E, H and I.
            fmt, granularity: as of `moe.pack`.
            biases: whether both products have biases.
            pairs: whether gate and up have separate global scales.
        """
        experts, hidden, intermediate = sizes

        def bias(rows: int) -> torch.Tensor | None:
            if not biases:
                return None
            return torch.empty(experts, rows, dtype=torch.float32, device=device)

        return cls(
            PackedExperts(
                _empty((experts, 2 * intermediate, hidden), fmt, device, pairs),
                _empty((experts, hidden, intermediate), fmt, device),
                granularity,
                bias(2 * intermediate),
                bias(hidden),
            )
        )

    @property
    def packed(self) -> PackedExperts:
        """Weights as `moe.fused_moe` expects them; they share memory with the buffers."""
        made, packed = self._made
        tensors = self._tensors()
        if not all(map(is_, made, tensors)):  # moved, or assigned
            packed = of_layout(self._layout, dict(self.named_buffers()))
            packed = replace(packed, model_type=self._model_type)
            self._made = tensors, packed
        return packed

    def forward(
        self, x: torch.Tensor, router_logits: torch.Tensor, router: Router,
        **options: Unpack[FusedOptions],
    ) -> torch.Tensor:  # fmt: skip
        """Call `moe.fused_moe` with these experts."""
        return fused_moe(x, self.packed, router_logits, router, **options)

    def extra_repr(self) -> str:
        """Sizes and format."""
        packed = self.packed
        sizes = f"E={packed.experts}, H={packed.hidden}, I={packed.intermediate}"
        return f"{sizes}, {packed.fmt}, granularity={packed.granularity}"

    def _tensors(self) -> list[torch.Tensor]:
        owners = (self, *(getattr(self, name) for name in WEIGHTS))
        return [tensor for owner in owners for tensor in owner._buffers.values()]

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> ExpertWeights:
        """Implement `to`, `cuda`, `half` and others: tensors change their device, never their
        dtype."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            other = fn(tensor)
            return other if other.dtype == tensor.dtype else tensor.to(other.device)

        for owner in (self, *(getattr(self, name) for name in WEIGHTS)):
            nn.Module._apply(owner, moved, recurse=False)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the buffers, or report experts that are packed differently."""
        name, errors = prefix + LAYOUT, args[-1]
        if name in state_dict:
            found = read_layout(name, state_dict[name])
            if found != self._layout:
                errors.append(f"{name} is {found}, these experts are {self._layout}")
                return
        super()._load_from_state_dict(state_dict, prefix, *args)


def _empty(
    shape: tuple[int, int, int], fmt: str, device: str | torch.device | None, pairs: bool = False
) -> Quantized:
    (experts, rows, k), form = shape, format_of(fmt)
    room = experts * scale_bytes(row_blocks(rows), form.columns(k))
    data = torch.empty(experts, rows, k // form.per_byte, dtype=torch.uint8, device=device)
    scales = torch.empty(room, dtype=torch.uint8, device=device)
    of_experts = (experts, 2) if pairs else (experts,)
    factors = (
        torch.empty(of_experts, dtype=torch.float32, device=device)
        for _ in range(2 * form.has_global)
    )
    return of_bytes(data, scales, fmt, *factors)
