"""The arguments of `append_pages` and `gather_pages`, and every check of them.

Pages are views by strides, as engines have them: K and V may be columns of one tensor, heads may
lie outside of rows, pages apart. So nothing here is a pool of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernelkit.call.tensors import (
    require_no_grad,
    require_rank,
    require_table,
    require_tensors,
)
from kernelkit.plan.limits import FLT_MAX, FLT_MIN
from kvcache.layouts.rows import MAX_ENTRIES, check_mapping
from kvcache.movement.arguments import require_once

QUANTISED = torch.float8_e4m3fn
SOURCES = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # of what becomes e4m3
NAMES = ("k", "v")


@dataclass(frozen=True)
class MovedPages:
    """Arguments common to both; `kvcache.append_pages` documents them."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.slots.shape[0]

    @property
    def entries(self) -> int:
        """Rows of all pages: what the numbers of `slots` stay below."""
        return self.k_pages.shape[0] * self.k_pages.shape[1]

    def check_layouts(self) -> None:
        """Raise TypeError or ValueError, naming the value and the limit."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        require_tensors(**tensors)
        for name in NAMES:
            pages, x = getattr(self, f"{name}_pages"), getattr(self, name)
            require_no_grad(**{name: x})
            require_rank(f"{name}_pages", pages, "[pages, page_size, heads, D]")
            require_rank(name, x, "[T, heads, D]")
            if x.shape[0] < self.tokens or x.shape[1:] != pages.shape[2:]:
                raise ValueError(
                    f"{name} {tuple(x.shape)} with pages {tuple(pages.shape)} and {self.tokens} "
                    "slots: heads and columns as in pages, and a row for each slot"
                )
            for one, tensor in ((f"{name}_pages", pages), (name, x)):
                if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                    raise ValueError(f"{one} has last stride {tensor.stride(-1)}, expected 1")
        if self.k_pages.shape[:3] != self.v_pages.shape[:3]:
            raise ValueError(
                f"k_pages {tuple(self.k_pages.shape)} and v_pages {tuple(self.v_pages.shape)} "
                "differ in pages, rows or heads"
            )
        if self.k_pages.dtype != self.v_pages.dtype or self.k.dtype != self.v.dtype:
            raise ValueError(
                f"k {self.k.dtype} and v {self.v.dtype}, pages {self.k_pages.dtype} and "
                f"{self.v_pages.dtype}: K and V need one dtype"
            )
        if not 0 < self.entries <= MAX_ENTRIES:
            raise ValueError(f"{self.entries} rows of pages: from 1 to {MAX_ENTRIES}")
        require_table("slots", self.slots, torch.int64, (None,))
        limit = f"{self.k_pages.shape[0]} pages of {self.k_pages.shape[1]} rows have 0 to "
        check_mapping("slots", self.slots, self.entries, f"{limit}{self.entries - 1}")


@dataclass(frozen=True)
class AppendPages(MovedPages):
    """Arguments of `kvcache.append_pages`."""

    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    backend: str = "auto"
    arch: str | None = None

    @property
    def quantised(self) -> str:
        """The dtype of tokens that become e4m3, '' where bytes stay as they are."""
        return "" if self.k.dtype == self.k_pages.dtype else SOURCES[self.k.dtype]

    def check(self) -> None:
        """Raise TypeError or ValueError, naming the value and the limit."""
        self.check_layouts()
        if self.k.dtype != self.k_pages.dtype and (
            self.k_pages.dtype != QUANTISED or self.k.dtype not in SOURCES
        ):
            raise ValueError(
                f"tokens of {self.k.dtype} to pages of {self.k_pages.dtype}: one dtype, or one of "
                f"{tuple(SOURCES)} to {QUANTISED}"
            )
        self._check_scales()
        require_once("slots", self.slots)

    def _check_scales(self) -> None:
        named = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        scales = {name: scale for name, scale in named.items() if scale is not None}
        for name, scale in scales.items():
            if not self.quantised:
                raise ValueError(f"{name} with pages of {self.k_pages.dtype}: only e4m3 is scaled")
            if scale.dtype != torch.float32 or scale.numel() != 1:
                raise ValueError(
                    f"{name} is {scale.dtype} {tuple(scale.shape)}, expected one torch.float32"
                )
            if scale.device.type == "cpu" and not FLT_MIN <= abs(scale.item()) <= FLT_MAX:
                raise ValueError(
                    f"{name} {scale.item()}: elements are divided by it, so its magnitude is from "
                    f"{FLT_MIN:.4g} to {FLT_MAX:.4g}. Pass 1.0 for pages that are not scaled"
                )
        if len(scales) == 1:
            raise ValueError(f"{next(iter(scales))} alone: give the scales of K and V, or neither")
        if self.quantised and any(x.shape[-1] % 4 for x in (self.k, self.v)):
            raise ValueError(
                f"{self.k.shape[-1]} and {self.v.shape[-1]} columns: multiples of 4 in e4m3"
            )


@dataclass(frozen=True)
class GatherPages(MovedPages):
    """Arguments of `kvcache.gather_pages`."""

    backend: str = "auto"
    arch: str | None = None

    def check(self) -> None:
        """Raise TypeError or ValueError, naming the value and the limit."""
        self.check_layouts()
        if self.k.dtype != self.k_pages.dtype:
            raise ValueError(f"k is {self.k.dtype}, but its pages are {self.k_pages.dtype}")
