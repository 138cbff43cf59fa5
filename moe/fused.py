"""The operator `blackwell_kernels::moe_fused`: the steps of a layer, each a kernel or two.

Nothing here waits for the device or reads from it, so that a CUDA graph can capture it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypedDict

import torch

from kernelkit.call.operator import Operator
from kernelkit.call.tensors import (
    DTYPE_NAMES,
    require_rank,
    require_table,
    require_tensors,
    require_type,
)
from moe.arguments import (
    Arguments,
    Chosen,
    Router,
    RouterLinear,
    Scales,
    SwiGLU,
    check_expert_range,
    check_form,
    check_scale,
    range_fields,
)
from moe.choose import check_tile_rows
from moe.config import GroupedConfig
from moe.formats import FORMATS, SCALINGS, format_of
from moe.launch import forward
from moe.models import CLAMPED
from moe.packing import LayerWeights, PackedExperts
from moe.quantiser.launch import Tokens, quantise
from moe.quantized import Quantized, made_of
from moe.routing.launch import (
    Choices,
    OrderTables,
    Slots,
    Weighted,
    empty_tables,
    run_combine,
    run_permutation,
    run_route,
)
from moe.routing.linear_launch import TokenChoices, run_route_tokens

MIXED = (("mxfp8", "mxfp4"),)  # formats of activations and of weights that go together
FOUR_BITS = tuple(name for name, form in FORMATS.items() if form.element == "e2m1")
PLAIN, FOUND = SwiGLU(), Scales()


@dataclass(frozen=True, eq=False)
class Layer:
    """The arguments of `moe.fused_moe`."""

    x: torch.Tensor
    router_logits: torch.Tensor | None  # None with `linear`
    experts: PackedExperts
    router: Router
    activation: SwiGLU = PLAIN
    scales: Scales = FOUND
    h_decode_scale: torch.Tensor | None = None  # 1 / scales.h, if it is known as well
    tile_rows: int | None = None
    backend: str = "auto"
    arch: str | None = None
    first_expert: int = 0
    end_expert: int | None = None  # None: all experts are here
    activations: str | None = None  # format of x and h; None: that of the weights
    linear: RouterLinear | None = None  # computes the logits, if there are none
    chosen: Chosen | None = None  # instead of both; the router then only has top_k
    few_rows: bool | None = None  # of arranged experts: one launch for both products and the sum

    @property
    def where(self) -> dict[str, Any]:
        """Keywords of every step."""
        return {"backend": self.backend, "arch": self.arch}

    @property
    def fmt(self) -> str:
        """Format of x and h as they are multiplied."""
        return self.activations or self.experts.w13.fmt

    @property
    def total(self) -> int:
        """Experts of the layer, here or elsewhere, shared ones among them."""
        return self.routed + self.router.shared

    @property
    def routed(self) -> int:
        """Experts that are chosen from, here or elsewhere."""
        if self.chosen is not None:
            return self.chosen.experts or self.experts.experts
        if self.linear is not None:
            return self.linear.weight.shape[0]
        assert self.router_logits is not None
        return self.router_logits.shape[1]

    @property
    def is_partial(self) -> bool:
        """Whether slots may belong to experts elsewhere."""
        return self.end_expert is not None

    @property
    def has_gaps(self) -> bool:
        """Whether slots may have no row: of experts elsewhere, or of none."""
        return self.is_partial or self.chosen is not None

    @property
    def rows(self) -> int:
        """Upper bound of rows: our routers choose an expert once for a token, others may repeat."""
        most = self.router.slots
        return len(self.x) * (most if self.chosen else min(most, self.experts.experts))

    @property
    def tiles(self) -> dict[str, Any]:
        """Keywords of products, with the most rows of an expert."""
        most = self.rows if self.chosen else len(self.x)
        return {"tile_rows": self.tile_rows, "most_rows": most, "pdl": True}

    def check(self) -> None:
        """Raise TypeError, ValueError or NotImplementedError for tokens that do not fit the
        experts."""
        x, experts = self.x, self.experts
        # Name, tensor and shape of the tensor with the number of experts, or of choices.
        named, sizes = ("router_logits", self.router_logits), "[T, E]"
        if self.linear is not None:
            named, sizes = ("linear.weight", self.linear.weight), "[E, H]"
        elif self.chosen is not None:
            named, sizes = ("chosen.ids", self.chosen.ids), "[T, k]"
        name, table = named
        require_tensors(**{"x": x, name: table}, w13=experts.w13.data)
        assert table is not None
        require_rank("x", x, "[T, H]")
        require_rank(name, table, sizes)
        if x.dtype not in DTYPE_NAMES or x.dtype == torch.float32:
            raise NotImplementedError(f"x is {x.dtype}, expected bfloat16 or float16")
        check_form(self.activation)
        self.router.check_slots()
        self._check_own()
        self._check_range()
        routed = self.routed if self.is_partial else experts.experts - self.router.shared
        fits = (x.shape[0], routed) if self.linear is None else (routed, experts.hidden)
        if self.chosen is not None:
            self._check_chosen(self.chosen)
            fits = x.shape[0], self.router.top_k
        if tuple(table.shape) != fits or x.shape[1] != experts.hidden:
            wanted = sizes.replace("E", str(routed)).replace("H", str(experts.hidden))
            raise ValueError(
                f"x {tuple(x.shape)} and {name} {tuple(table.shape)}, expected [T, "
                f"{experts.hidden}] and {wanted} for these experts"
            )

    def _check_chosen(self, chosen: Chosen) -> None:
        """TypeError or ValueError for choices that are none."""
        ids, weights = chosen.ids, chosen.weights
        if ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"chosen.ids is {ids.dtype}, expected int32 or int64")
        require_tensors(**{"x": self.x, "chosen.weights": weights})
        if not weights.is_floating_point() or weights.shape != ids.shape:
            raise ValueError(
                f"chosen.weights is {weights.dtype} {tuple(weights.shape)}, expected floating "
                f"point {tuple(ids.shape)}, as chosen.ids"
            )
        if self.is_partial and chosen.experts is None:
            raise ValueError("chosen.experts is None: expert_range needs the number of all experts")
        if not self.is_partial and chosen.experts not in (None, self.experts.experts):
            raise ValueError(
                f"chosen.experts {chosen.experts}, but {self.experts.experts} are packed: all have "
                "to be, or give expert_range"
            )

    def _check_own(self) -> None:
        """Raise for arguments that the products of this kind of experts do not support."""
        self._check_scales()
        if self.few_rows:
            raise NotImplementedError(
                "few_rows True with packed experts: pass moe.arrange(experts), or None"
            )
        fmt = self.experts.w13.fmt
        if self.fmt != fmt and (self.fmt, fmt) not in MIXED:
            possible = [fmt, *(x for x, w in MIXED if w == fmt)]
            raise NotImplementedError(
                f"activations {self.activations!r} with packed experts in {fmt}: one of "
                f"{possible}; for 'bf16' or 'e4m3' pass moe.arrange(experts)"
            )
        if self.tile_rows is not None:
            GroupedConfig(tile_rows=self.tile_rows).check_values()
            check_tile_rows(self.tile_rows, len(self.x))

    def _check_range(self) -> None:
        """Raise ValueError for an invalid range, or one that differs from the packed experts."""
        first, end = self.first_expert, self.end_expert
        if end is None:
            return
        check_expert_range(first, end, self.total)
        if end - first != self.experts.experts:
            raise ValueError(
                f"expert_range ({first}, {end}), but {self.experts.experts} are packed"
            )

    def _check_scales(self) -> None:
        """Raise TypeError or ValueError for an invalid scale of this format."""
        has_global = format_of(self.fmt).has_global
        if self.scales.h_amax is not None:
            require_table("scales.h_amax", self.scales.h_amax, torch.float32, (1,))
        for name in ("x", "h"):
            scale = getattr(self.scales, name)
            if scale is not None and not has_global:
                raise ValueError(
                    f"scales.{name} with {self.fmt}, which has no global scale: pass None"
                )
            if isinstance(scale, torch.Tensor):
                require_table(f"scales.{name}", scale, torch.float32, (1,))
                check_scale(f"scales.{name}", scale)
            elif not isinstance(scale, str | None):
                raise TypeError(
                    f"scales.{name} is {type(scale).__name__}, expected str, torch.Tensor or None"
                )
            elif scale not in (None, *SCALINGS):
                raise ValueError(
                    f"scales.{name} {scale!r}: one of {SCALINGS}, fp32 [1], or None for 'token'"
                )


@dataclass(frozen=True, eq=False)
class Routed:
    """Assignment of tokens to experts."""

    weights: torch.Tensor  # [T, slots]
    offsets: torch.Tensor  # int32 [E + 1]: first row of each expert
    slot_of_row: torch.Tensor  # int32, the order by expert
    row_of_slot: torch.Tensor  # int32, its inverse


def run_layer(layer: Layer) -> tuple[torch.Tensor]:
    """Compute the layer: [T, H] in the dtype of x."""
    layer.check()
    return run_experts(layer, run_routing(layer))


def run_routing(layer: Layer) -> Routed:
    """Route the tokens of a layer; the launch that routes one token also sorts its slots."""
    if len(layer.x) == 1 and layer.chosen is None:
        tables = empty_tables(layer.x, layer.experts.experts, layer.router.slots)
        first = layer.first_expert if layer.is_partial else None
        _, weights = chosen_of(layer, (*tables, first))
        return Routed(weights, *tables)
    ids, weights = chosen_of(layer)
    slots = Slots(ids, layer.total, layer.first_expert, layer.end_expert, **layer.where)
    return Routed(weights, *run_permutation(slots))


def chosen_of(
    layer: Layer, order: OrderTables | None = None, cleared: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, weights). `order` is written, and `cleared` becomes zeros."""
    if layer.chosen is not None:
        if cleared is not None:
            cleared.zero_()
        return layer.chosen.ids.int(), layer.chosen.weights.float()
    if layer.linear is not None:
        given = TokenChoices(layer.x, layer.linear, layer.router, **layer.where)
        return run_route_tokens(given, order, cleared)
    assert layer.router_logits is not None
    choices = Choices(logits=layer.router_logits, **vars(layer.router), **layer.where)
    return run_route(choices, order, cleared)


def run_experts(layer: Layer, routed: Routed) -> tuple[torch.Tensor]:
    """Compute the steps after routing: [T, H] in the dtype of x."""
    x, experts, where, offsets = layer.x, layer.experts, layer.where, routed.offsets
    tokens = Tokens(
        x, layer.fmt, layer.scales.x, routed.slot_of_row.narrow(0, 0, layer.rows), offsets,
        routed.row_of_slot, layer.router.slots, layer.has_gaps, **where,
    )  # fmt: skip
    hidden = _first_product(quantise(tokens), offsets, layer)
    out = DTYPE_NAMES[x.dtype]
    given = {"bias": experts.bias2, "w_ready": True, **layer.tiles, **where}
    y, _ = forward(Arguments(hidden, experts.w2, offsets, out=out, **given))
    return combined(layer, routed, y)


def combined(layer: Layer, routed: Routed, y: torch.Tensor) -> tuple[torch.Tensor]:
    """The weighted sum of each token's rows of y."""
    rows = routed.row_of_slot.view(routed.weights.shape)
    given = routed.weights, layer.x.dtype, layer.has_gaps
    return run_combine(Weighted(y, rows, *given, **layer.where))


def routing_fields(
    given: torch.Tensor | RouterLinear | Chosen, router: Router | None
) -> dict[str, Any]:
    """Map logits, what makes them, or choices, and the router to fields of `Layer`.

    TypeError without a router, ValueError for one beside choices.
    """
    if isinstance(given, Chosen):
        if router is not None:
            raise ValueError("router with Chosen, which holds the choices: pass router=None")
        require_type("chosen.ids", given.ids, torch.Tensor)
        require_rank("chosen.ids", given.ids, "[T, k]")
        return {"router_logits": None, "chosen": given, "router": Router(given.ids.shape[1])}
    if not isinstance(given, RouterLinear | torch.Tensor):
        raise TypeError(
            f"router_logits is {type(given).__name__}, expected torch.Tensor, RouterLinear or "
            "Chosen(topk_ids, topk_weights)"
        )
    if not isinstance(router, Router):
        raise TypeError(f"router is {type(router).__name__}, expected Router")
    if isinstance(given, RouterLinear):
        return {"router_logits": None, "linear": given, "router": router}
    return {"router_logits": given, "router": router}


def fields_of(
    x: torch.Tensor,
    experts: LayerWeights,
    given: torch.Tensor | RouterLinear | Chosen,
    router: Router | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Map arguments of `moe.fused_moe` to fields of `Layer`. options: those that are not at their
    default.

    ValueError for a model's experts without the activation that they need. FutureWarning for
    packed experts in four bits if the precision of the activations is not named.
    """
    model = getattr(experts, "model_type", None)
    if model in CLAMPED and "activation" not in options:
        raise ValueError(
            f"activation is missing: experts of {model} are no plain SwiGLU; pass that of "
            f"moe.models.from_config(config), such as {CLAMPED[model]}"
        )
    if "activations" not in options and isinstance(experts, PackedExperts):
        fmt = experts.w13.fmt
        if fmt in FOUR_BITS and not torch.compiler.is_compiling():
            _warn_of_precision(fmt)
    fields = {"x": x, "experts": experts, **routing_fields(given, router)}
    return fields | layer_fields(options)


def _warn_of_precision(fmt: str) -> None:
    """Warn of 4-bit activations that nobody asked for, at the caller's line."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] in ("moe", "kernelkit"):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"activations are quantised to {fmt}, as the weights are (11 to 24 % off): pass "
        f"activations={fmt!r} if that is meant, or moe.arrange(experts) for bf16 (0.3 % off). A "
        "later release requires one of both.",
        FutureWarning,
        stacklevel=level,
    )


class FusedOptions(TypedDict, total=False):
    """Options of `moe.fused_moe`, its plan and its `warmup`."""

    activation: Annotated[SwiGLU | None, None]
    scales: Annotated[Scales | None, None]
    activations: Annotated[str | None, None]
    expert_range: Annotated[tuple[int, int] | None, None]
    tile_rows: Annotated[int | None, None]
    few_rows: Annotated[bool | None, None]
    backend: Annotated[str, "auto"]
    arch: Annotated[str | None, None]


def layer_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Map options of `moe.fused_moe` that are not at their default to fields of `Layer`."""
    given = dict(options)
    return range_fields(given.pop("expert_range", None)) | given


def _first_product(operand: Quantized, offsets: torch.Tensor, layer: Layer) -> Quantized:
    """Compute swiglu(x w13) in the format of w2's product: in one kernel, unless its global scale
    has to be found first.

    Offsets and weights are older than the previous kernel: like every kernel here, it waited for
    earlier kernels before it let the next one begin.
    """
    experts, scales = layer.experts, layer.scales
    form = layer.activation.of_rows(experts.granularity)
    first = Arguments(
        operand, experts.w13, offsets, amax=scales.h_amax, activation=form,
        bias=experts.bias13, w_ready=True, **layer.tiles, **layer.where,
    )  # fmt: skip
    if isinstance(scales.h, str) or (scales.h is None and FORMATS[layer.fmt].has_global):
        h, _ = forward(replace(first, out=DTYPE_NAMES[layer.x.dtype]))
        return quantise(Tokens(h, layer.fmt, scales.h, offsets=offsets, **layer.where))
    results = forward(replace(first, out=layer.fmt, encode_scale=scales.h))
    return made_of(*results, layer.fmt, scales.h, layer.h_decode_scale)


FUSED = Operator(
    "moe_fused",
    Layer,
    run_layer,
    lambda layer: (layer.x.new_empty(layer.x.shape),),
    results=1,
    writes=("scales_h_amax",),
)
