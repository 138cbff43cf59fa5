"""`grouped_gemm` and `fused_moe`: check a user's arguments, then call the operator or make a plan.

All checks come before compilation. Nothing waits for the device or reads from it, so that a CUDA
graph captures every call. torch.compile sees one operator, `blackwell_kernels::moe_grouped_gemm` or
`blackwell_kernels::moe_fused`. Forward only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypedDict, TypeVar, overload

import torch

from kernelkit.call.front import defaults_of, fronted, given_options, spelled
from kernelkit.call.prepared import Plan
from kernelkit.call.tensors import is_broadcast, require_memory
from moe.arguments import (
    Activation,
    Chosen,
    Router,
    RouterLinear,
    SwiGLU,
    check_form,
    out_name,
)
from moe.config import DEFAULT_GRANULARITY
from moe.fused import FUSED, FusedOptions, fields_of
from moe.launch import GROUPED_GEMM, quantised_result
from moe.mixed.fragments import ArrangedExperts
from moe.mixed.layer import FUSED_MIXED
from moe.packing import PackedExperts
from moe.quantized import Quantized, laid_out

if TYPE_CHECKING:
    from typing_extensions import Unpack

Result = TypeVar("Result", bound=torch.Tensor | Quantized)


class SwigluOptions(TypedDict, total=False):
    """Options that `grouped_gemm_swiglu` shares with `grouped_gemm`."""

    bias: Annotated[torch.Tensor | None, None]
    encode_scale: Annotated[torch.Tensor | None, None]
    amax: Annotated[torch.Tensor | None, None]
    tile_rows: Annotated[int | None, None]
    most_rows: Annotated[int | None, None]
    tile_n: Annotated[int | None, None]
    carry: Annotated[bool, False]
    pdl: Annotated[bool, False]
    w_ready: Annotated[bool, False]
    backend: Annotated[str, "auto"]
    arch: Annotated[str | None, None]


class GemmOptions(SwigluOptions, total=False):
    """Options that all overloads and plans of `grouped_gemm` share."""

    activation: Annotated[Activation | None, None]


@overload
def grouped_gemm(
    x: Quantized, w: Quantized, offsets: torch.Tensor, *,
    out: torch.dtype = torch.bfloat16, **options: Unpack[GemmOptions],
) -> torch.Tensor: ...  # fmt: skip


@overload
def grouped_gemm(
    x: Quantized, w: Quantized, offsets: torch.Tensor, *,
    out: str, **options: Unpack[GemmOptions],
) -> Quantized: ...  # fmt: skip


@spelled(GemmOptions)
def grouped_gemm(
    x: Quantized, w: Quantized, offsets: torch.Tensor, *,
    out: torch.dtype | str = torch.bfloat16, **options: Unpack[GemmOptions],
) -> torch.Tensor | Quantized:  # fmt: skip
    """Compute Y_e = X_e W_e^T + b_e for every expert e, and optionally the activation, in one
    launch.

    `moe.reference.grouped_gemm` and `moe.reference.swiglu` define the result.

    Args:
        x: data [R, K], rows sorted by expert: `quantise(..., offsets=offsets)`.
        w: data [E, N, K], in the format of x, or in mxfp4 with x in mxfp8. With an activation N = 2
            I, packed by its granularity (`moe.packing`).
        offsets: int32 [E + 1], ascending from 0 to R; experts may have no rows. They must be those
            that x was quantised with (compared on the CPU).
        activation: None for the plain product.
        bias: fp32 [E, N], in the order of the rows of w, added before the activation.
        out: dtype of the result (bfloat16, float16, float32), or the format that it is quantised to
            in the same kernel.
        encode_scale: fp32 [1], the global scale of an output in nvfp4, only.
        amax: fp32 [1], becomes max(amax, the largest magnitude of the output), to calibrate the
            next encode_scale. It may not share memory with another argument.
        tile_rows: rows of an expert in a tile, one of `moe.config.TILE_ROWS`; None: chosen
            (`moe.choose`).
        most_rows: upper bound of an expert's rows, R by default. Tiles of up to 32 rows need it.
        tile_n: columns of a tile, 128 or 256; None: chosen by sizes.
        carry: the epilogue processes 8 columns at a time, if gate and up alternate by 8 and a tile
            has 128 rows or more; same bits.
        pdl: programmatic dependent launch: the kernel may begin before the previous kernel on the
            stream has ended, and waits for it before it reads anything.
        w_ready: with pdl: offsets, w and bias are older than the previous kernel, and are read
            without waiting.
        backend, arch: see `kernelkit.call.launch.choose_target`.

    Returns:
        [R, N], with an activation [R, I]. In a format: a `Quantized` with scale factors by expert,
            as those of x.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit.
    """
    fields = _fields(x, w, offsets, {"out": out, **options})
    result = quantised_result(fields["out"], fields.get("encode_scale"), *GROUPED_GEMM(fields))
    return laid_out(result, offsets=offsets) if isinstance(result, Quantized) else result


_DEFAULTS = defaults_of(grouped_gemm)


@overload
def grouped_gemm_swiglu(
    x: Quantized, w13: Quantized, offsets: torch.Tensor, *,
    form: SwiGLU | None = None, granularity: int = DEFAULT_GRANULARITY,
    out: torch.dtype = torch.bfloat16, **options: Unpack[SwigluOptions],
) -> torch.Tensor: ...  # fmt: skip


@overload
def grouped_gemm_swiglu(
    x: Quantized, w13: Quantized, offsets: torch.Tensor, *,
    form: SwiGLU | None = None, granularity: int = DEFAULT_GRANULARITY,
    out: str, **options: Unpack[SwigluOptions],
) -> Quantized: ...  # fmt: skip


@spelled(SwigluOptions)
def grouped_gemm_swiglu(
    x: Quantized, w13: Quantized, offsets: torch.Tensor, *,
    form: SwiGLU | None = None, granularity: int = DEFAULT_GRANULARITY,
    out: torch.dtype | str = torch.bfloat16, **options: Unpack[SwigluOptions],
) -> torch.Tensor | Quantized:  # fmt: skip
    """Compute H_e = swiglu(X_e W13_e^T), the first product of a layer: `grouped_gemm` with its
    options.

    Args:
        w13: data [E, 2 I, K] of `moe.packing.pack`: gate and up alternate by `granularity` rows.
        form: plain SwiGLU by default.

    Returns:
        [R, I].

    Raises:
        TypeError, ValueError, NotImplementedError: as `grouped_gemm`.
    """
    if not isinstance(w13, Quantized):
        raise TypeError(f"w13 is {type(w13).__name__}, expected Quantized")
    if not isinstance(form, SwiGLU | None):
        raise TypeError(f"form is {type(form).__name__}, expected SwiGLU or None")
    activation = (form or SwiGLU()).of_rows(granularity)
    return grouped_gemm(x, w13, offsets, activation=activation, out=out, **options)


class InPlacePlan(Generic[Result]):
    """Plan that recomputes `result` in place: plan().

    The plan keeps every tensor, and reads and writes it at the address it had when the plan was
    made. Contents may change, except global scales. Changed offsets are not checked.
    """

    def __init__(self, plan: Plan, result: Result) -> None:
        self._plan, self.result = plan, result

    def __call__(self) -> Result:
        """Compute `result` from the current contents of the arguments."""
        self._plan()
        return self.result


@overload
def grouped_gemm_plan(
    x: Quantized, w: Quantized, offsets: torch.Tensor, *,
    out: torch.dtype = torch.bfloat16, **options: Unpack[GemmOptions],
) -> InPlacePlan[torch.Tensor]: ...  # fmt: skip


@overload
def grouped_gemm_plan(
    x: Quantized, w: Quantized, offsets: torch.Tensor, *,
    out: str, **options: Unpack[GemmOptions],
) -> InPlacePlan[Quantized]: ...  # fmt: skip


@spelled(GemmOptions)
def grouped_gemm_plan(
    x: Quantized, w: Quantized, offsets: torch.Tensor, *,
    out: torch.dtype | str = torch.bfloat16, **options: Unpack[GemmOptions],
) -> InPlacePlan[Any]:  # fmt: skip
    """Plan a product that is recomputed in place: plan() writes plan.result.

    Args:
        x, w, offsets, out, options: as for `grouped_gemm`. Checks, compilation and allocation
            happen here. A call only launches, and costs the host some microseconds.

    Raises:
        TypeError, ValueError, NotImplementedError: as `grouped_gemm`.
    """
    fields = _fields(x, w, offsets, {"out": out, **options})
    plan = Plan(GROUPED_GEMM, fields)
    result = quantised_result(fields["out"], fields.get("encode_scale"), *plan.made)
    return InPlacePlan(plan, result)


def _fields(
    x: Quantized, w: Quantized, offsets: torch.Tensor, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Map arguments of `grouped_gemm` to fields of `moe.arguments.Arguments`."""
    given = given_options(grouped_gemm, options, _DEFAULTS)
    activation = given.get("activation")
    if isinstance(activation, Activation):
        check_form(activation)
        _check_granularity(w, activation)
    _check_offsets(x, offsets)
    return {"x": x, "w": w, "offsets": offsets, **given, "out": out_name(options["out"])}


def _check_granularity(w: Quantized, activation: Activation) -> None:
    """Raise ValueError if gate and up of w are known to alternate differently."""
    packed = getattr(w, "granularity", None)
    if packed not in (None, activation.granularity):
        raise ValueError(
            f"granularity {activation.granularity}, but gate and up of w alternate every "
            f"{packed} rows"
        )


def _check_offsets(x: Quantized, offsets: torch.Tensor) -> None:
    """Raise ValueError if x is known to have been quantised with other offsets; on the CPU only."""
    made = getattr(x, "offsets", None)
    if made is None or torch.compiler.is_compiling():
        return
    if not isinstance(offsets, torch.Tensor) or offsets.ndim != 1 or offsets.device.type != "cpu":
        return
    require_memory(offsets=offsets)
    if made != (given := tuple(offsets.tolist())):
        raise ValueError(f"offsets {[*given]}, but x was quantised with offsets {[*made]}")


# Arguments of vLLM's fused_experts and fused_moe -> what to do instead.
OTHER_NAMES = {
    "w1": "experts, which moe.pack makes of w1 and w2",
    "w2": "experts, which moe.pack makes of w1 and w2",
    "topk_ids": "router_logits=Chosen(topk_ids, topk_weights)",
    "topk_weights": "router_logits=Chosen(topk_ids, topk_weights)",
    "hidden_states": "x",
    "gating_output": "router_logits",
    "topk": "router=Router(topk)",
    "renormalize": "router=Router(topk, renormalize=)",
    "inplace": "drop it: the result has memory of its own",
    "expert_map": "Chosen(expert_map[topk_ids], topk_weights): -1 is no expert; or expert_range=",
    "global_num_experts": "Chosen(..., experts=), with expert_range=",
    "apply_router_weight_on_input": "multiply x by the weights, and give Chosen weights of 1",
    "quant_config": "drop it: moe.pack and activations= choose formats",
}


@fronted(OTHER_NAMES)
@spelled(FusedOptions)
def fused_moe(
    x: torch.Tensor,
    experts: PackedExperts | ArrangedExperts,
    router_logits: torch.Tensor | RouterLinear | Chosen,
    router: Router | None = None,
    **options: Unpack[FusedOptions],
) -> torch.Tensor:
    """Return the router-weighted sum of each token's experts, as `moe.reference.layer` defines it.

    Every step is a kernel: top-k, permutation, quantising with the gather of rows, the first
    product with SwiGLU (and quantising, if its scale is known), the second product, and the
    combination in the order of a token's choices. A token's result does not depend on other tokens,
    unless a scale is that of the 'tensor'.

    Args:
        x: [T, H], bfloat16 or float16.
        experts: of `moe.pack`, or of `moe.arrange` for activations in bf16, at load time. Shared
            experts (`Router.shared`) follow the E that are chosen from.
        router_logits: [T, E], bfloat16, float16 or float32; or the linear layer that computes them
            from x. For few tokens the linear layer and the choice are one launch, see
            `route_tokens`. Or `Chosen`: the ids and weights that an engine has chosen already.
        router: how experts are chosen; None with `Chosen`.
        activation: plain SwiGLU by default; ValueError for experts of a checkpoint that needs
            another one, such as gpt-oss.
        scales: global scales of the activations, in a format that has any; by default one for each
            row, see `Scales`.
        expert_range: (first, end): `experts` are only these of all E + shared, the experts of a
            rank. The result is their contribution; the sum over ranks is the layer's. With scales
            of the 'tensor', that of x covers all of x, that of h the rows of these experts.
        activations: the precision of x and h in the products, and with it of the layer. Of packed
            experts: the format of the weights, or 'mxfp8' with weights in mxfp4, which has a fifth
            of the error of mxfp4 with mxfp4. None stands for the format of the weights; in four
            bits that warns, since it is 11 to 24 % off. Of arranged experts: what they were
            arranged for, 'bf16' (0.3 % off) or 'e4m3' (3 to 5 %), which None stands for.
        tile_rows: of both products, see `grouped_gemm`; None: chosen by sizes.
        few_rows: whether one cooperative launch computes all after the choice, for experts that
            are arranged for bf16 and at most 256 slots in all. None: if there are at most four
            slots for each expert on average, which an H200 showed to be faster. False: the steps.
        backend, arch: see `kernelkit.call.launch.choose_target`.

    Returns:
        [T, H] in the dtype of x.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit. If a later step
            raises, the earlier steps have been launched.
    """
    operator = FUSED_MIXED if isinstance(experts, ArrangedExperts) else FUSED
    given = given_options(fused_moe, options, _FUSED_DEFAULTS)
    return operator(fields_of(x, experts, router_logits, router, given))


_FUSED_DEFAULTS = defaults_of(fused_moe)


@spelled(FusedOptions)
def fused_moe_plan(
    x: torch.Tensor,
    experts: PackedExperts | ArrangedExperts,
    router_logits: torch.Tensor | RouterLinear | Chosen,
    router: Router | None = None,
    **options: Unpack[FusedOptions],
) -> InPlacePlan[torch.Tensor]:
    """Plan a layer that is recomputed in place: plan() writes plan.result.

    Args:
        x, experts, router_logits, router, options: as for `fused_moe`. Checks (on the CPU, of
            contents as well), compilation and allocation happen here. A call only launches, and
            costs the host some microseconds a launch.

    Raises:
        TypeError, ValueError, NotImplementedError: as `fused_moe`, and ValueError for arguments
            that a plan cannot repeat.
    """
    given = given_options(fused_moe_plan, options, _FUSED_DEFAULTS)
    operator = FUSED_MIXED if isinstance(experts, ArrangedExperts) else FUSED
    layer = operator.arguments(fields_of(x, experts, router_logits, router, given))
    if isinstance(layer.scales.h, torch.Tensor):
        layer = replace(layer, h_decode_scale=layer.scales.h.reciprocal())
    biases = {name: getattr(layer.router, name) for name in ("bias", "logit_bias")}
    linear = layer.linear and layer.linear.bias
    tables = {"router_logits": layer.router_logits, "linear.bias": linear, **biases}
    for name, table in tables.items():
        if table is not None and is_broadcast(table):
            raise ValueError(f"{name} has strides {table.stride()}: a plan makes no copy")
    # Without a GPU each step checks what the previous one wrote.
    plan = Plan(operator, vars(layer), dry=layer.x.is_cuda)
    return InPlacePlan(plan, *plan.made)
