"""Launch of both products and the sum of a layer with few rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernelkit.call.launch import Target, choose_target, launch, sms_of
from kernelkit.call.tensors import in_sequence, require_tma
from kernelkit.compile.arch import written_for
from kernelkit.compile.compiler import compile_once
from moe.arguments import SwiGLU, check_range
from moe.kernel_arguments import FewKernelArguments, FewSizes, FewTensors
from moe.launch import numbers_of, plain
from moe.mixed.config import ROWS
from moe.mixed.few.config import (
    ARCHS,
    GROUPS,
    KERNELS,
    MOST_ROWS,
    WARP_ROWS,
    FewConfig,
    warps_for,
)
from moe.mixed.fragments import ArrangedExperts, units_of


@dataclass(frozen=True, eq=False)
class FewArguments:
    """Arguments of the launch."""

    x: torch.Tensor  # bf16 [T, H]
    experts: ArrangedExperts
    ids: torch.Tensor  # int32 [T, slots]
    weights: torch.Tensor  # fp32 [T, slots]
    counts: torch.Tensor  # int32 zeros, of `new_counts`
    activation: SwiGLU
    experts_in_all: int  # here or elsewhere
    first_expert: int = 0
    partial: bool = False  # ids may be of no expert that is here
    backend: str = "auto"
    arch: str | None = None

    @property
    def config(self) -> FewConfig:
        """Config to compile."""
        experts, by_warp = self.experts, self.ids.numel() <= WARP_ROWS
        return FewConfig(
            fmt=experts.w13.fmt,
            slots=self.ids.shape[1],
            pair_factor=experts.w13.has_pairs,
            limit=self.activation.limit is not None,
            bias13=experts.bias13 is not None,
            bias2=experts.bias2 is not None,
            partial=self.partial,
            k13=experts.w13.k,
            k2=experts.w2.k,
            warps=warps_for(experts.w13.k, experts.w2.k),
            # Measured: parts of a chunk balance few items, whole ones are faster with many.
            granule=2 if by_warp else GROUPS,
            most_rows=WARP_ROWS if by_warp else MOST_ROWS,
        )

    @property
    def target(self) -> Target:
        """Device and backend that run the launch."""
        return choose_target(self.x.device, self.backend, self.arch, ARCHS)


def run_few(arguments: FewArguments) -> torch.Tensor:
    """Compute the experts' weighted sum of every token, [T, H] in bf16, in one launch."""
    require_tma("x", arguments.x)
    every = arguments.experts_in_all
    limit = f"experts are 0 to {every - 1}, and -1 for none"
    check_range("ids", arguments.ids, every, limit, begin=-1)
    out = arguments.x.new_empty(arguments.x.shape)
    if out.numel():
        target = arguments.target
        compiled = compile_once(arguments.config, target.arch, KERNELS[written_for(target.arch)])
        launch(compiled, (kernel_arguments(arguments, out),), target, out.device)
    return out


def new_counts(x: torch.Tensor, experts: ArrangedExperts) -> torch.Tensor:
    """Allocate the words that CTAs count in: of those that have stored h, and for every 64 columns
    of the result the groups that are done. The launch needs zeros."""
    return x.new_empty(1 + units_of(experts.w2.rows, ROWS), dtype=torch.int32)


def kernel_arguments(arguments: FewArguments, out: torch.Tensor) -> FewKernelArguments:
    """Return the launch arguments, with new workspaces."""
    x, experts, ids = arguments.x, arguments.experts, arguments.ids
    w13, w2, rows = experts.w13, experts.w2, ids.numel()
    sizes = FewSizes(
        tall13=units_of(w13.rows, ROWS),
        tall2=units_of(w2.rows, ROWS),
        first_expert=arguments.first_expert,
        experts=w13.experts,
        inner=w2.k,
    )
    tensors = FewTensors(
        x=plain(x.contiguous()),
        w13=w13.data,
        w2=w2.data,
        factor13=w13.factor,
        factor2=w2.factor,
        ids=in_sequence(ids),
        weights=in_sequence(arguments.weights),
        h=x.new_empty((rows, w2.k)),
        y=x.new_empty((rows, w2.rows), dtype=torch.float32),
        out=out,
        counts=plain(arguments.counts),
        bias13=plain(experts.bias13),
        bias2=plain(experts.bias2),
    )
    most = rows * max(sizes.tall13, sizes.tall2)  # chunks of a product
    return FewKernelArguments(
        tensors=tensors,
        numbers=numbers_of(arguments.activation),
        sizes=sizes,
        ctas=min(sms_of(x.device), most),
    )
