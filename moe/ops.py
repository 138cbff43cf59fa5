"""The torch operators `blackwell_kernels::moe_grouped_gemm` and `blackwell_kernels::moe_fused`.

Tracers see each whole: torch.compile and FakeTensor get shapes from the fake implementations and
never look inside. A quantised operand is four tensors (`tensors_of_operand`), a quantised result is
bytes of elements and of scale factors. Results are new tensors; amax alone is written in place, as
the schema says.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from kernelkit.schema import register_mutating_operator
from kernelkit.tensors import require_no_grad
from moe.arguments import Activation, Arguments, Router, Scales, SwiGLU
from moe.forward import Results, empty_results, forward
from moe.packing import PackedExperts
from moe.quantized import Quantized, of_bytes
from moe.steps import Layer, run_layer

PLACE = "str backend='auto', str? arch=None"
FORM = "int granularity=0, float alpha=1.0, float beta=0.0, float? limit=None"


def _operand(name: str) -> str:
    return (
        f"Tensor {name}, Tensor {name}_scales, Tensor? {name}_encode_scale, "
        f"Tensor? {name}_decode_scale"
    )


GROUPED_GEMM = (
    f"({_operand('x')}, {_operand('w')}, Tensor offsets, Tensor? encode_scale=None, "
    f"Tensor(a!)? amax=None, *, str fmt, str out='bf16', {FORM}, int? tile_rows=None, "
    f"SymInt? most_rows=None, int? tile_n=None, bool carry=False, "
    f"bool pdl=False, {PLACE}) -> (Tensor, Tensor)"
)
FUSED = (
    f"(Tensor x, Tensor router_logits, Tensor? bias, {_operand('w13')}, {_operand('w2')}, "
    "Tensor? x_scale=None, Tensor? h_scale=None, Tensor(a!)? h_amax=None, *, str fmt, "
    f"{FORM}, str? x_scale_of=None, str? h_scale_of=None, int top_k, str scoring='softmax', "
    "int n_group=1, int topk_group=1, bool renormalize=True, float scale=1.0, "
    f"int? tile_rows=None, {PLACE}) -> Tensor"
)


FIELDS_OF_FORM = tuple(field.name for field in dataclasses.fields(Activation))


def tensors_of_operand(operand: Quantized) -> tuple[torch.Tensor | None, ...]:
    """Elements, scale factors, and the global scales or None."""
    return operand.data, operand.scales, operand.encode_scale, operand.decode_scale


def tensors_of(arguments: Arguments) -> tuple[torch.Tensor | None, ...]:
    """The tensors of `moe_grouped_gemm` in order."""
    operands = (*tensors_of_operand(arguments.x), *tensors_of_operand(arguments.w))
    return *operands, arguments.offsets, arguments.encode_scale, arguments.amax


def numbers_of(arguments: Arguments) -> dict[str, Any]:
    """Its other arguments, but for the place."""
    form = arguments.activation or Activation(0)
    return {
        "fmt": arguments.x.fmt,
        "out": arguments.out,
        **vars(form),
        "tile_rows": arguments.tile_rows,
        "most_rows": arguments.most_rows,
        "tile_n": arguments.tile_n,
        "carry": arguments.carry,
        "pdl": arguments.pdl,
    }


def tensors_of_layer(layer: Layer) -> tuple[torch.Tensor | None, ...]:
    """The tensors of `moe_fused` behind x and router_logits, in order."""
    experts, scales = layer.experts, layer.scales
    found = (None if isinstance(scale, str) else scale for scale in (scales.x, scales.h))
    weights = (*tensors_of_operand(experts.w13), *tensors_of_operand(experts.w2))
    return layer.router.bias, *weights, *found, scales.h_amax


def numbers_of_layer(layer: Layer) -> dict[str, Any]:
    """Its other arguments."""
    numbers = {**vars(layer.router), **vars(layer.activation), **layer.where}
    del numbers["bias"]
    scales = {"x_scale_of": layer.scales.x, "h_scale_of": layer.scales.h}
    words = {name: scale for name, scale in scales.items() if isinstance(scale, str)}
    experts = {"fmt": layer.experts.fmt, "granularity": layer.experts.granularity}
    return numbers | words | experts | {"tile_rows": layer.tile_rows}


def _grouped_gemm(*tensors: torch.Tensor | None, fmt: str, **options: Any) -> Results:
    """See `moe.grouped.grouped_gemm`."""
    x, w = of_bytes(*tensors[:4], fmt), of_bytes(*tensors[4:8], fmt)
    place = _taken(options, "backend", "arch")
    form = _taken(options, *FIELDS_OF_FORM)
    activation = Activation(**form) if form.get("granularity") else None
    arguments = Arguments(x, w, *tensors[8:], activation=activation, **options)
    return forward(arguments, **place)


def _fake_grouped_gemm(
    *tensors: torch.Tensor | None, out: str = "bf16", granularity: int = 0, **options: Any
) -> Results:
    x, w = tensors[0], tensors[4]
    columns = w.shape[1] // (2 if granularity else 1)
    return empty_results(x, (x.shape[0], columns), w.shape[0], out)


def _fused(*tensors: torch.Tensor | None, fmt: str, **options: Any) -> torch.Tensor:
    """See `moe.layer.fused_moe`."""
    x, router_logits, bias, *weights = tensors[:11]
    x_scale, h_scale, h_amax = (*tensors[11:], None, None, None)[:3]
    found = _taken(options, "x_scale_of", "h_scale_of")
    require_no_grad(x=x, router_logits=router_logits)
    form, granularity = _taken(options, "alpha", "beta", "limit"), options.pop("granularity")
    packed = PackedExperts(of_bytes(*weights[:4], fmt), of_bytes(*weights[4:], fmt), granularity)
    place = _taken(options, "tile_rows", "backend", "arch")
    scales = Scales(
        found.get("x_scale_of") if x_scale is None else x_scale,
        found.get("h_scale_of") if h_scale is None else h_scale,
        h_amax,
    )
    layer = Layer(packed, Router(bias=bias, **options), SwiGLU(**form), scales, **place)
    return run_layer(x, router_logits, layer)


def _fake_fused(x: torch.Tensor, *tensors: torch.Tensor | None, **options: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _taken(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Those of the options that are there, which are no longer afterwards."""
    return {name: options.pop(name) for name in names if name in options}


grouped_gemm = register_mutating_operator(
    "moe_grouped_gemm", GROUPED_GEMM, _grouped_gemm, _fake_grouped_gemm
)
fused = register_mutating_operator("moe_fused", FUSED, _fused, _fake_fused)
