"""`GroupedGemmPlan` and `FusedMoePlan`: a product or a layer that is checked, compiled and
described once, and launched many times."""

from __future__ import annotations

import torch

from kernelkit.launch import PreparedLaunch, recording
from kernelkit.tensors import is_broadcast
from moe.arguments import Arguments
from moe.formats import FORMATS
from moe.forward import compile_for, has_tiles, kernel_arguments, make_results, prepare
from moe.quantized import Quantized, of_bytes
from moe.steps import Layer, run_layer


class GroupedGemmPlan:
    """plan() computes the product anew, into `result`; `moe.grouped.grouped_gemm_plan` makes it.

    Every tensor is read and written where it was when the plan was made; the plan keeps them all.
    Their contents may change, but for encode_scale; what offsets say is not looked at again. One
    thread and one stream at a time; launches go to the current stream, CUDA graphs capture them.
    """

    def __init__(
        self, arguments: Arguments, backend: str = "auto", arch: str | None = None
    ) -> None:
        target = prepare(arguments, backend, arch)
        self.config = arguments.config
        results = make_results(arguments)
        self.result = quantized_result(arguments, *results)
        self._kept = arguments, results
        self._prepared = None
        if has_tiles(arguments):
            given = kernel_arguments(arguments, results)
            compiled = compile_for(self.config, target.arch)
            device = arguments.offsets.device
            self._prepared = PreparedLaunch(compiled, given, target, device)

    def __call__(self) -> torch.Tensor | Quantized:
        """`result`, as the contents of the arguments are now."""
        if self._prepared is not None:
            self._prepared.launch()
        return self.result


class FusedMoePlan:
    """plan() computes the layer anew, into `result`; `moe.layer.fused_moe_plan` makes it.

    Every tensor is read and written where it was when the plan was made; the plan keeps them all.
    Their contents may change, but for global scales. One thread and one stream at a time; launches
    go to the current stream, CUDA graphs capture them.
    """

    def __init__(self, x: torch.Tensor, router_logits: torch.Tensor, layer: Layer) -> None:
        if layer.experts.w13.format.has_global:
            for name in ("x", "h"):
                scale = getattr(layer.scales, name)
                if not isinstance(scale, torch.Tensor):
                    raise ValueError(f"scales.{name} is {scale!r}: a plan takes one that is known")
        tables = {"router_logits": router_logits, "bias": layer.router.bias}
        for name, table in tables.items():
            if table is not None and is_broadcast(table):
                raise ValueError(f"{name} has strides {table.stride()}: a plan copies nothing")
        with recording() as self._launches:
            self.result = run_layer(x, router_logits, layer)

    def __call__(self) -> torch.Tensor:
        """`result`, as the contents of the arguments are now."""
        self._launches.repeat()
        return self.result


def quantized_result(
    arguments: Arguments, data: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor | Quantized:
    """What the operator returns, as a user wants it."""
    if arguments.out not in FORMATS:
        return data
    encode = arguments.encode_scale
    decode = None if encode is None else encode.reciprocal()
    return of_bytes(data, scales, encode, decode, arguments.out)
