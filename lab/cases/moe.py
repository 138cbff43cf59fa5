"""One MoE layer, from its flags to its products: what `run`, `explain` and `dump moe` share."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from lab.flags.moe import ACTIVATIONS, ARCHS_OF, MODELS, OF_A_MODEL, PLAIN, TUNED
from moe import (
    ArrangedExperts,
    Fragments,
    PackedExperts,
    Router,
    Scales,
    SwiGLU,
    arrange,
    pack,
    reference,
    unpack,
    unpack_biases,
)
from moe.arguments import Activation, Arguments
from moe.config import DEFAULT_GRANULARITY
from moe.formats import FORMATS, Quantized, of_bytes, row_blocks, scale_blocks, scale_bytes
from moe.mixed.config import ACTIVATIONS as MIXED
from moe.mixed.config import ROWS
from moe.mixed.fragments import DEPTH, PAIR_ROWS, unit_bytes, units_of
from moe.mixed.launch import X_DTYPES, MixedArguments
from moe.reference_routing import route

SEED = 0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUTERS = {
    "softmax": {"scoring": "softmax"},
    "sigmoid": {"scoring": "sigmoid", "scale": 2.5},
    "sqrtsoftplus": {"scoring": "sqrtsoftplus", "scale": 2.5},
}


@dataclass(frozen=True)
class Layer:
    """What the flags spell, by their names."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: str
    scoring: str
    dtype: str
    format: str
    granularity: int
    x_scale: str | float | None
    h_scale: str | float | None
    amax: bool
    tile_rows: int | None
    activations: str = "quantised"
    bias: bool = False

    def __str__(self) -> str:
        words = [f"T{self.tokens} H{self.hidden} I{self.intermediate} E{self.experts}"]
        words += [f"k{self.top_k} {self.format} {self.dtype} {self.activation} {self.scoring}"]
        words += [f"granularity({self.granularity})"] * (self.granularity != DEFAULT_GRANULARITY)
        words += [f"{n}({s})" for n, s in (("x", self.x_scale), ("h", self.h_scale)) if s]
        words += ["amax"] * self.amax + [f"tile_rows({self.tile_rows})"] * bool(self.tile_rows)
        words += [f"activations({self.activations})"] * self.mixed + ["bias"] * self.bias
        return " ".join(words)

    @property
    def mixed(self) -> bool:
        """Whether the products take numbers, as Hopper's do."""
        return self.activations in MIXED

    @property
    def archs(self) -> tuple[str, ...]:
        """What the products are written for."""
        return ARCHS_OF[self.activations]

    @property
    def router(self) -> Router:
        return Router(self.top_k, **ROUTERS[self.scoring])

    @property
    def form(self) -> SwiGLU:
        return SwiGLU(**ACTIVATIONS[self.activation])

    @property
    def scales(self) -> Scales:
        """Numbers as tensors; Hopper's products have none."""
        if self.mixed:
            return Scales()
        x, h = (
            torch.tensor([scale]) if isinstance(scale, float) else scale
            for scale in (self.x_scale, self.h_scale)
        )
        return Scales(x, h, torch.zeros(1) if self.amax else None)

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """x, w13, w2, logits: standard normal, weights such that all products are, too."""
        generator = torch.Generator().manual_seed(SEED)
        shapes = (
            (self.tokens, self.hidden),
            (self.experts, 2 * self.intermediate, self.hidden),
            (self.experts, self.hidden, self.intermediate),
            (self.tokens, self.experts),
        )
        x, w13, w2, logits = (torch.randn(shape, generator=generator) for shape in shapes)
        dtype = DTYPES[self.dtype]
        w13, w2 = w13 * self.hidden**-0.5, w2 * self.intermediate**-0.5
        return x.to(dtype), w13.to(dtype), w2.to(dtype), logits

    @cached_property
    def biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of w13 and w2, standard normal."""
        if not self.bias:
            return None, None
        generator = torch.Generator().manual_seed(SEED + 1)
        rows = 2 * self.intermediate, self.hidden
        first, second = (torch.randn((self.experts, n), generator=generator) for n in rows)
        return first, second

    def packed(self) -> PackedExperts:
        """The weights in the format of the layer."""
        _, w13, w2, _ = self.tensors
        return pack(w13, w2, self.format, granularity=self.granularity, biases=self.biases)

    def weights(self, packed: PackedExperts) -> PackedExperts | ArrangedExperts:
        """Those weights as `fused_moe` takes them for such activations."""
        if not self.mixed:
            return packed
        return arrange(packed, self.activations, h_scale=self.h_number)

    @property
    def h_number(self) -> float:
        """What the output of SwiGLU is multiplied by before it is rounded to e4m3."""
        return self.h_scale if isinstance(self.h_scale, float) else 1.0

    def sizes(self, name: str) -> tuple[int, int]:
        """Rows and columns of a matrix of w13 or w2."""
        sizes = {"w13": (2 * self.intermediate, self.hidden),
                 "w2": (self.hidden, self.intermediate)}  # fmt: skip
        return sizes[name]

    def mixed_product(self, name: str, arch: str | None = None, **tuning: Any) -> MixedArguments:
        """What mixed_gemm gets for w13 or w2 inside a layer, tensors without contents; checked.
        arch: the first one by default."""
        rows, (n, k), first = self.tokens * self.top_k, self.sizes(name), name == "w13"
        units, arch = units_of(n, ROWS) * units_of(k, DEPTH), arch or self.archs[0]
        data = _empty((self.experts, units * unit_bytes(self.format)), torch.uint8)
        x, given = _empty((rows, k), DTYPES[self.dtype]), {}
        fp8, factor = self.activations == "e4m3", _empty(self.experts)
        if fp8:
            x, factor = x.to(X_DTYPES["e4m3"]), _empty((self.experts, n))
            given["x_scale"] = _empty(len(x) if first else 1)
            given |= {"out": "e4m3", "out_scale": _empty(1)} if first else {}
        arguments = MixedArguments(
            x,
            Fragments(data, factor, n, k, self.format, first, self.activations),
            _empty(self.experts + 1, torch.int32),
            _empty((self.experts, n)) if self.bias else None,
            self.form.of_rows(PAIR_ROWS) if first else None,
            tile_rows=self.tile_rows, most_rows=self.tokens, pdl=True, arch=arch,
            **given, **tuning,
        )  # fmt: skip
        if first and arguments.gathers:
            of_tokens = {"rows": _empty(rows, torch.int32), "slots": self.top_k}
            arguments = replace(arguments, x=x[: self.tokens], **of_tokens)
        arguments.check()
        return arguments

    def product(self, name: str, **tuning: Any) -> Arguments:
        """What grouped_gemm gets for w13 or w2, tensors without contents; checked."""
        rows, form, (n, k) = self.tokens * self.top_k, FORMATS[self.format], self.sizes(name)
        of_rows = self.h_scale if name == "w2" else self.x_scale
        x = blank((rows, k), self.format, self.experts, rows if of_rows == "token" else 1)
        w = blank((self.experts, n, k), self.format, self.experts, self.experts)
        offsets = _empty(self.experts + 1, torch.int32)
        tiles = {"tile_rows": self.tile_rows, "most_rows": self.tokens, **tuning}
        if self.bias:
            tiles["bias"] = _empty((self.experts, n))
        if name == "w2":
            arguments = Arguments(x, w, offsets, out=self.dtype, **tiles)
        else:
            quantised = isinstance(self.h_scale, float) or not form.has_global
            encode = _empty(1) if quantised and form.has_global else None
            amax = _empty(1) if self.amax else None
            act = Activation(self.granularity, **vars(self.form))
            out = self.format if quantised else self.dtype
            arguments = Arguments(x, w, offsets, encode, amax, act, out, **tiles)
        arguments.check()
        return arguments


def errors_of(layer: Layer, experts: PackedExperts, y: torch.Tensor) -> dict[str, float]:
    """Of y, relative to the definition with plain weights, to torch that quantises what the kernels
    do, and its own."""
    x, w13, w2, logits = layer.tensors
    scales, form, y = layer.scales, vars(layer.form), y.double()
    routed = route(logits, **vars(layer.router))
    exact = reference.layer(x, w13, w2, routed, biases=layer.biases, **form)
    given = {"fmt": layer.format, "x_scale": scales.x, "h_scale": scales.h}
    if layer.mixed:
        h_scale = torch.tensor([layer.h_number])
        given = {"fmt": "e4m3", "h_scale": h_scale} if layer.activations == "e4m3" else {}
    given["biases"] = unpack_biases(experts)
    rounded = reference.layer(x, *unpack(experts), routed, **given, **form).double()
    norm = exact.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return {
        "relative": ((y - exact).norm() / norm).item(),
        "reference": ((rounded - exact).norm() / norm).item(),
        "apart": ((y - rounded).norm() / norm).item(),
        "max_error": max((y - exact).abs().flatten().tolist(), default=0.0),
    }


def _empty(size: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def blank(
    shape: tuple[int, ...], fmt: str, experts: int, scales: int, device: str = "meta"
) -> Quantized:
    """Zeros that nobody has touched, so that they take no memory: rows of all experts [rows, K], or
    a matrix of each [E, rows, K], and so many global scales of 1."""
    form, (*outer, k) = FORMATS[fmt], shape
    if len(outer) == 2:
        blocks = outer[0] * row_blocks(outer[1])
    else:
        blocks = scale_blocks(outer[0], experts)
    sizes = (*outer, k // form.per_byte), scale_bytes(blocks, form.columns(k))
    data, codes = (torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes)
    scale = torch.ones(scales, device=device) if form.has_global else None
    return of_bytes(data, codes, fmt, scale, scale)


def product_of(arguments: argparse.Namespace) -> Arguments:
    """The product that the flags spell."""
    _without(arguments, "needs --activations bf16 or e4m3", *TUNED)
    layer = layer_of(arguments)
    return layer.product(arguments.product, tile_n=arguments.tile_n, carry=arguments.carry)


def mixed_product_of(arguments: argparse.Namespace) -> MixedArguments:
    """The same of a layer whose activations are numbers."""
    _without(arguments, NOT_MIXED[arguments.activations], "tile_n", "carry")
    tuning = {name: getattr(arguments, name) for name in ("arch", *TUNED)}
    return layer_of(arguments).mixed_product(arguments.product, **tuning)


NOT_MIXED = {
    "bf16": "with --activations bf16 nothing is quantised but weights",
    "e4m3": "with --activations e4m3 each token has a scale, and h one that is known",
}


def _without(arguments: argparse.Namespace, reason: str, *names: str) -> None:
    """ValueError for one of these flags."""
    for name in names:
        if (value := getattr(arguments, name)) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')} {value}: {reason}")


def layer_of(arguments: argparse.Namespace) -> Layer:
    """The layer that the flags spell; ValueError for sizes that are none."""
    model = MODELS[arguments.model] | OF_A_MODEL if arguments.model else {}
    fields = {**PLAIN, **model}
    fields |= {name: value for name in PLAIN if (value := getattr(arguments, name)) is not None}
    for name in ("hidden", "intermediate", "experts", "top_k"):
        if fields[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} {fields[name]}: at least 1")
    if fields["tokens"] < 0:
        raise ValueError(f"--tokens {fields['tokens']}: at least 0")
    if fields["top_k"] > fields["experts"]:
        raise ValueError(f"--top-k {fields['top_k']}: {fields['experts']} experts")
    own = ("dtype", "format", "granularity", "x_scale", "h_scale", "amax", "tile_rows",
           "activations", "bias")  # fmt: skip
    for name in own:
        fields[name] = getattr(arguments, name)
    layer, arch = Layer(**fields), getattr(arguments, "arch", None)
    if arch not in (None, *layer.archs):
        raise ValueError(f"--arch {arch}: {layer.archs[0]} with --activations {layer.activations}")
    if layer.mixed:
        return _mixed(layer, arguments)
    if FORMATS[layer.format].has_global:
        h_scale = 300.0 if layer.h_scale is None else layer.h_scale
        return replace(layer, x_scale=layer.x_scale or "token", h_scale=h_scale)
    for name in ("x_scale", "h_scale"):
        if fields[name] is not None:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {fields[name]}: {layer.format} has no global scale")
    return layer


def _mixed(layer: Layer, arguments: argparse.Namespace) -> Layer:
    """It, or ValueError for flags of what it does not have."""
    which = layer.activations
    known = which == "e4m3" and isinstance(layer.h_scale, float)
    _without(arguments, NOT_MIXED[which], "x_scale", "amax", *(() if known else ("h_scale",)))
    if layer.format not in MIXED[which]:
        formats = " or ".join(MIXED[which])
        raise ValueError(f"--format {layer.format}: {formats} with --activations {which}")
    return layer
