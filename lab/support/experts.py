"""Calls of `moe.fused_moe`: experts, router and options of a row, and the layer's definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from kernelkit.call.launch import emulation
from kernelkit.call.tensors import as_meta
from kernelkit.compile.keys import KernelKey
from lab.measure.accuracy import EXTRA
from lab.problems.attention import PATIENCE
from lab.support.space import GPU, GPUS, Row, Space, module_of
from moe import (
    Chosen,
    PackedExperts,
    Router,
    RouterLinear,
    Scales,
    SwiGLU,
    arrange,
    fused_moe,
    pack,
    reference,
    unpack,
    unpack_biases,
)
from moe.fused import FUSED, layer_fields, routing_fields, run_layer
from moe.mixed.fragments import ArrangedExperts
from moe.mixed.layer import FUSED_MIXED
from moe.mixed.layer import run_layer as run_mixed
from moe.reference_routing import route
from ptxemu import Options
from ptxemu.check.text import render

# What is multiplied: the format of the weights, what they are arranged for, and `activations`.
FORMATS: dict[str, tuple[str, str, str | None]] = {
    "nvfp4": ("nvfp4", "", None),
    "mxfp4": ("mxfp4", "", None),
    "mxfp8": ("mxfp8", "", None),
    "mxfp4 + activations='mxfp8'": ("mxfp4", "", "mxfp8"),
    "nvfp4 + activations='mxfp8'": ("nvfp4", "", "mxfp8"),
    "mxfp8 + activations='mxfp4'": ("mxfp8", "", "mxfp4"),
    "arranged nvfp4": ("nvfp4", "bf16", None),
    "arranged mxfp4": ("mxfp4", "bf16", None),
    "arranged mxfp4 for e4m3": ("mxfp4", "e4m3", None),
    "arranged mxfp4 + activations='mxfp8'": ("mxfp4", "bf16", "mxfp8"),
    "arranged nvfp4 for e4m3": ("nvfp4", "e4m3", None),
    "arranged mxfp8": ("mxfp8", "bf16", None),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMS = {
    "swiglu": SwiGLU(),
    "limit=10": SwiGLU(limit=10.0),
    "alpha=1.702, beta=1, limit=7": SwiGLU(1.702, 1.0, 7.0),
    "limit=-1": SwiGLU(limit=-1.0),
}
GROUPS = {
    "none": {},
    "n_group=4, topk_group=2": {"n_group": 4, "topk_group": 2},
    "n_group=3": {"n_group": 3},
}
BIASES = {"none": (), "bias": ("bias",), "logit_bias": ("logit_bias",)}
OF_ROUTERS = ("scoring", "groups", "shared", "router bias")
KNOWN = {"x": 500.0, "h": 300.0}
EXPERTS, RANK = 16, (3, 7)
ROUNDING = {"bf16": 8e-3, "e4m3": 2.0**-6}  # of h, of the rows of both products and of y


@dataclass(frozen=True)
class Given:
    """Arguments of a call, and the experts before they were arranged."""

    x: torch.Tensor
    packed: PackedExperts
    experts: PackedExperts | ArrangedExperts
    choice: torch.Tensor | RouterLinear | Chosen
    router: Router | None
    options: dict[str, Any]
    routed: tuple[torch.Tensor, torch.Tensor]


@lru_cache(256)
def _packed(
    fmt: str, hidden: int, intermediate: int, experts: int, granularity: int, bias: bool
) -> PackedExperts:
    """Random experts, the same for the same arguments."""
    generator = torch.Generator().manual_seed(hidden + intermediate)
    shapes = (2 * intermediate, hidden), (hidden, intermediate)
    w13, w2 = (
        torch.randn(experts, rows, columns, generator=generator) * columns**-0.5
        for rows, columns in shapes
    )
    first, second = (torch.randn(experts, rows, generator=generator) for rows, _ in shapes)
    biases = (first, second) if bias else None
    return pack(w13.bfloat16(), w2.bfloat16(), fmt, granularity=granularity, biases=biases)


@lru_cache(256)
def _arranged(packed: PackedExperts, activations: str) -> ArrangedExperts:
    return arrange(packed, activations)


def given_of(row: Row) -> Given:
    """Return the arguments of a row; raises what packing and arranging raise."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tokens, hidden, rank = int(row["tokens"]), int(row["hidden"]), row["expert_range"] != "none"
    shared, (fmt, arranged, activations) = int(row["shared"]), FORMATS[row["experts"]]
    count = RANK[1] - RANK[0] if rank else EXPERTS + shared
    sizes = hidden, int(row["intermediate"]), count, int(row["granularity"])
    packed = _packed(fmt, *sizes, row["bias"] == "yes")
    experts = _arranged(packed, arranged) if arranged else packed
    x, logits = normal(tokens, hidden).to(DTYPES[row["x"]]), normal(tokens, EXPERTS)
    names = BIASES[row["router bias"]]
    router = Router(
        int(row["top_k"]),
        row["scoring"],
        shared=shared,
        **GROUPS[row["groups"]],
        **{name: normal(EXPERTS) for name in names},
    )
    choice: torch.Tensor | RouterLinear | Chosen = logits
    if row["router"] in DTYPES:
        choice = logits = logits.to(DTYPES[row["router"]])
    elif row["router"] == "RouterLinear":
        choice = RouterLinear((normal(EXPERTS, hidden) * hidden**-0.5).to(x.dtype))
        logits = x.float() @ choice.weight.float().T
    tile_rows = None if row["tile_rows"] == "none" else int(row["tile_rows"])
    options = {
        "activation": FORMS[row["activation"]],
        "scales": _scales(row["scales"]),
        "activations": activations,
        "expert_range": RANK if rank else None,
        "tile_rows": tile_rows,
        "few_rows": False,  # the steps, which have more to refuse than the launch for few rows
    }
    if row["router"].startswith("Chosen"):
        dtype = torch.int64 if "int64" in row["router"] else torch.int32
        ids = torch.randint(EXPERTS, (tokens, router.top_k), generator=generator)
        routed = ids.to(dtype), normal(tokens, router.top_k)
        choice = Chosen(*routed, EXPERTS if rank else None)
        own = any(row[name] != SPACE.factors[name][0] for name in OF_ROUTERS)
        return Given(x, packed, experts, choice, router if own else None, options, routed)
    routed = route(logits, **vars(router)) if _is_right(router) else (logits, logits)
    return Given(x, packed, experts, choice, router, options, routed)


def _is_right(router: Router) -> bool:
    """Whether the definition of routing takes it."""
    group = EXPERTS // router.n_group
    right = 1 <= router.top_k <= router.topk_group * group and not EXPERTS % router.n_group
    return right and router.scoring in ("softmax", "sigmoid", "sqrtsoftplus")


def _scales(word: str) -> Scales:
    """Scales of activations as a row words them."""
    if word == "fp32 [1]":
        return Scales(**{name: torch.tensor([scale]) for name, scale in KNOWN.items()})
    if word == "h_amax":
        return Scales(h_amax=torch.zeros(1))
    return Scales() if word == "none" else Scales(word, word)


def call(row: Row) -> Any:
    """Check the call of a row and collect its kernels; tensors have no memory after the checks."""
    given, arch = given_of(row), row[GPU]
    arranged = isinstance(given.experts, ArrangedExperts)
    operator, run = (FUSED_MIXED, run_mixed) if arranged else (FUSED, run_layer)
    fields = {"x": given.x, "experts": given.experts, **routing_fields(given.choice, given.router)}
    options = {name: value for name, value in given.options.items() if value is not None}
    layer = operator.arguments(fields | layer_fields(options) | {"arch": arch}, alone=True)
    layer.check()
    return run(as_meta(layer))


def kernel(keys: Sequence[KernelKey]) -> str:
    """The folder of the products' kernel."""
    return next((name for name in map(module_of, keys) if ".sm" in name), "nothing")


def wrong(row: Row) -> list[str]:
    """Run an accepted row in the emulator; return what is out of tolerance."""
    given = given_of(row)
    with emulation(Options(policy="round-robin", limit=PATIENCE)) as active:
        y = fused_moe(
            given.x, given.experts, given.choice, given.router, arch=row[GPU], **given.options
        ).double()
    found = [render(report) for report in active.reports if report.findings]
    exact = _definition(row, given, {}).double()
    fmt, arranged, activations = FORMATS[row["experts"]]
    norm = exact.norm().clamp_min(torch.finfo(torch.float64).tiny)
    apart = ((y - exact).norm() / norm).item()
    limit = ROUNDING["bf16"]
    if arranged == "e4m3":
        rounded = {"fmt": "e4m3", "h_scale": torch.ones(1)}
        apart = ((y - _definition(row, given, rounded).double()).norm() / norm).item()
        limit = ROUNDING["e4m3"]
    elif not arranged:
        scales = {f"{name}_scale": getattr(given.options["scales"], name) for name in KNOWN}
        rounded = {"fmt": activations or fmt, **scales}
        own = ((_definition(row, given, rounded).double() - exact).norm() / norm).item()
        limit = EXTRA * own + torch.finfo(given.x.dtype).eps
    wrong_norm = [f"{apart:.2e} apart in the norm, limit {limit:.2e}"] if apart > limit else []
    return found + wrong_norm


def _definition(row: Row, given: Given, rounding: dict[str, Any]) -> torch.Tensor:
    """The layer, or this rank's part of it, by `moe.reference`."""
    ids, weights = given.routed
    if row["expert_range"] != "none":
        first, end = RANK
        here = (ids >= first) & (ids < end)
        ids, weights = torch.where(here, ids - first, 0), weights.masked_fill(~here, 0.0)
    form = vars(FORMS[row["activation"]])
    matrices, biases = unpack(given.packed), unpack_biases(given.packed)
    return reference.layer(given.x, *matrices, (ids, weights), biases=biases, **rounding, **form)


SPACE = Space(
    "moe.fused_moe",
    "experts is the format of the weights, whether `arrange` made them, and `activations` if it is "
    "given. hidden, intermediate and granularity are sizes for `pack`, top_k to router bias fields "
    "of `Router`. The calls have 16 experts.",
    {
        GPU: GPUS,
        "experts": tuple(FORMATS),
        "x": tuple(DTYPES),
        "hidden": ("128", "256", "96", "64", "48", "40"),
        "intermediate": ("128", "96", "64", "32", "48", "40"),
        "granularity": ("32", "8", "16", "64", "12"),
        "bias": ("no", "yes"),
        "activation": tuple(FORMS),
        "scales": ("none", "token", "tensor", "fp32 [1]", "h_amax", "row"),
        "tokens": ("5", "1", "70", "0"),
        "router": ("fp32", "bf16", "fp16", "RouterLinear", "Chosen of int32", "Chosen of int64"),
        "top_k": ("2", "1", "16", "17", "0"),
        "scoring": ("softmax", "sigmoid", "sqrtsoftplus", "tanh"),
        "groups": tuple(GROUPS),
        "shared": ("0", "1"),
        "router bias": tuple(BIASES),
        "expert_range": ("none", "(3, 7)"),
        "tile_rows": ("none", "8", "64", "128", "256", "7"),
    },
    (GPU, "experts", "x"),
    (GPU, "experts"),
    call,
    wrong,
    kernel,
)  # fmt: skip
