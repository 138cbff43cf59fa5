"""A layer of experts as the commands know it: from flags to its products, run and errors."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from rich.console import Console

from kernelkit.compile.arch import written_for
from kernelkit.tune.choices import forcing
from lab.flags.moe import ACTIVATIONS, ARCHS_OF, MODELS, OF_A_MODEL, PLAIN, PRODUCTS, TUNED
from lab.measure.accuracy import EXTRA
from lab.measure.timing import Sample, cold_and_warm, sets_here
from lab.problems import family, mixed_plan, moe_plan
from lab.problems.family import Family, Grid
from lab.sass.kernel import Subject
from lab.tools import tables
from lab.tools.place import Place
from moe import (
    ArrangedExperts,
    Fragments,
    PackedExperts,
    Router,
    Scales,
    SwiGLU,
    arrange,
    fused_moe,
    pack,
    reference,
    unpack,
    unpack_biases,
)
from moe.arguments import Activation, Arguments
from moe.choose import TUNED as TILES
from moe.config import DEFAULT_GRANULARITY
from moe.formats import FORMATS, row_blocks, scale_blocks, scale_bytes
from moe.mixed.config import ACTIVATIONS as MIXED
from moe.mixed.config import ROWS
from moe.mixed.fragments import DEPTH, PAIR_ROWS, unit_bytes, units_of
from moe.mixed.launch import X_DTYPES, MixedArguments
from moe.quantized import Quantized, of_bytes
from moe.reference_routing import route

SEED = 0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUTERS = {
    "softmax": {"scoring": "softmax"},
    "sigmoid": {"scoring": "sigmoid", "scale": 2.5},
    "sqrtsoftplus": {"scoring": "sqrtsoftplus", "scale": 2.5},
}
QUANTISED = "of the format: torch with the kernels' quantisation; limit: 2 % more"
NUMBERS = "of the format: the definition with these weights; limit: a difference of 2^-7"
FP8 = "of the format: torch with the kernels' rounding to e4m3; limit: a difference of 2^-6"
SAID = {"quantised": QUANTISED, "bf16": NUMBERS, "e4m3": FP8}
FIELDS = tuple(field.name for field in fields(Quantized))
ERRORS = (
    ("\nrun as", "{backend}"),
    ("relative\nerror", "{relative:.2e}"),
    ("of the\nformat", "{reference:.2e}"),
    ("apart\nfrom it", "{apart:.2e}"),
    ("max abs\nerror", "{max_error:.2e}"),
    ("", lambda row: "ok" if row["ok"] else "OUT"),
)


@dataclass(frozen=True)
class Layer:
    """The flags' values by name."""

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
        """Architectures that the products are written for."""
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
        """Biases of w13 and w2, standard normal."""
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
        """The weights as `fused_moe` takes them for such activations."""
        if not self.mixed:
            return packed
        return arrange(packed, self.activations, h_scale=self.h_number)

    @property
    def h_number(self) -> float:
        """Factor of SwiGLU's output before it is rounded to e4m3."""
        return self.h_scale if isinstance(self.h_scale, float) else 1.0

    def sizes(self, name: str) -> tuple[int, int]:
        """Rows and columns of a matrix of w13 or w2."""
        sizes = {"w13": (2 * self.intermediate, self.hidden),
                 "w2": (self.hidden, self.intermediate)}  # fmt: skip
        return sizes[name]

    def mixed_product(self, name: str, arch: str | None = None, **tuning: Any) -> MixedArguments:
        """Return the checked arguments of mixed_gemm for w13 or w2 in a layer, without contents.

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
        """Return the checked arguments of grouped_gemm for w13 or w2, without contents."""
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
    """Errors of y, relative to the definition with plain weights, to torch that quantises what the
    kernels do, and its own."""
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


NOT_MIXED = {
    "bf16": "with --activations bf16 only weights are quantised",
    "e4m3": "with --activations e4m3 each token has a scale, and h a given one",
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
    if written_for(arch) not in (None, *layer.archs):
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
    """Return the layer; raise ValueError for flags of features that it lacks."""
    which = layer.activations
    known = which == "e4m3" and isinstance(layer.h_scale, float)
    _without(arguments, NOT_MIXED[which], "x_scale", "amax", *(() if known else ("h_scale",)))
    if layer.format not in MIXED[which]:
        formats = " or ".join(MIXED[which])
        raise ValueError(f"--format {layer.format}: {formats} with --activations {which}")
    return layer


# -- the layer as a problem -----------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """Arguments of `fused_moe` on a device; the maker of each call moves the weights there."""

    device: str
    x: torch.Tensor
    logits: torch.Tensor
    experts: PackedExperts
    scales: Scales


@dataclass(frozen=True)
class Experts(family.Problem):
    """A layer of experts.

    product: which of its two products is explained.
    tuning: fields of its config that sizes do not choose.
    tile_n: tile size for packed experts, None to choose by sizes."""

    layer: Layer
    product: str
    tuning: dict[str, Any]
    tile_n: int | None

    def __str__(self) -> str:
        return str(self.layer)

    @property
    def named(self) -> dict[str, Any]:
        return {"layer": str(self.layer), "product": self.product}

    def draw(self, seed: int, device: str) -> Drawn:
        """Numbers are the same, whatever the seed."""
        x, _, _, logits = (tensor.to(device) for tensor in self.layer.tensors)
        scales = {name: _to(device, value) for name, value in vars(self.layer.scales).items()}
        return Drawn(device, x, logits, self.layer.packed(), Scales(**scales))

    def _call(self, drawn: Drawn, place: Place) -> Callable[[], torch.Tensor]:
        """Return a call from router logits to the output, with separate weights."""
        layer = self.layer
        weights = layer.weights(_experts_to(drawn.device, drawn.experts))
        given = {"activation": layer.form, "scales": drawn.scales, "tile_rows": layer.tile_rows}
        given["activations"] = layer.activations if layer.mixed else layer.format
        call = partial(
            fused_moe, drawn.x, weights, drawn.logits, layer.router, **given, **place.given
        )
        return call if self.tile_n is None else _forced(call, self.tile_n)

    def calls(self, drawn: Drawn, place: Place) -> dict[str, Callable[[], torch.Tensor]]:
        return {"": self._call(drawn, place)}

    def judge(self, drawn: Drawn, name: str, results: Any, slack: float) -> dict[str, Any]:
        """Errors relative to the definition, and what is found beside the result."""
        layer, amax = self.layer, drawn.scales.h_amax
        errors: dict[str, Any] = errors_of(layer, drawn.experts, results.cpu())
        eps = torch.finfo(drawn.x.dtype).eps
        if layer.mixed:
            # In e4m3 a number of h between two codes may become the other one.
            limit = 2 * eps if layer.activations == "e4m3" else eps
            errors["ok"] = errors["apart"] <= slack * limit  # which a NaN is not
        else:
            errors["ok"] = errors["relative"] <= slack * (EXTRA * errors["reference"] + eps)
        found = {} if amax is None else {"h_amax": amax.item()}
        return errors | found | {"packed_bytes": drawn.experts.nbytes}

    def samples(self, drawn: Drawn, results: Any, place: Place) -> dict[str, Sample]:
        sets = sets_here(drawn.experts.nbytes)
        return cold_and_warm([self._call(drawn, place) for _ in range(sets)])

    def _product(self, arch: str) -> Arguments | MixedArguments:
        if self.layer.mixed:
            return self.layer.mixed_product(self.product, arch, **self.tuning)
        return self.layer.product(self.product, **self.tuning)

    def plan(self, arch: str) -> Iterator[str]:
        product, words = self._product(arch), f"with {self.product} of {self.layer}"
        if isinstance(product, MixedArguments):
            return mixed_plan.explain(product, words)
        return moe_plan.explain(product, words, arch)

    def kernels(self, arch: str) -> list[Subject]:
        product = self._product(arch)
        if isinstance(product, MixedArguments):
            arch = product.target.arch
            return [mixed_plan.subject_of(arch, config) for config in product.configs]
        return [moe_plan.subject_of(product.config, arch)]


def _forced(call: Callable[..., torch.Tensor], tile_n: int) -> Callable[..., torch.Tensor]:
    """Force tiles of `tile_n` columns, which `fused_moe` otherwise chooses by sizes."""

    def inside(**more: Any) -> torch.Tensor:
        with forcing(TILES.name, {"tile_n": tile_n}):
            return call(**more)

    return inside


def _to(device: str, value: Any) -> Any:
    """Elements and scale factors of quantised tensors as bytes, which every torch can copy."""
    if not isinstance(value, torch.Tensor) or value.element_size() > 1:
        return value.to(device) if isinstance(value, torch.Tensor) else value
    return value.view(torch.uint8).to(device).view(value.dtype)


def _experts_to(device: str, experts: PackedExperts) -> PackedExperts:
    w13, w2 = (
        Quantized(**{name: _to(device, getattr(w, name)) for name in FIELDS})
        for w in (experts.w13, experts.w2)
    )
    bias13, bias2 = (_to(device, bias) for bias in experts.biases)
    return replace(experts, w13=w13, w2=w2, bias13=bias13, bias2=bias2)


def experts_of(options: argparse.Namespace, place: Place) -> list[Experts]:
    """The layer that the flags spell. Raises what its products raise."""
    layer, product = layer_of(options), getattr(options, "product", "")
    if product:
        names, other = (TUNED, ("tile_n", "carry")) if layer.mixed else (("tile_n", "carry"), TUNED)
        reason = NOT_MIXED.get(layer.activations, "needs --activations bf16 or e4m3")
        _without(options, reason, *other)
        tuning = {name: getattr(options, name) for name in names}
        return [Experts(layer, product, tuning, None)]
    for name in PRODUCTS:  # refused before anything is drawn
        layer.mixed_product(name, place.arch) if layer.mixed else layer.product(name)
    return [Experts(layer, product, {}, getattr(options, "tile_n", None))]


def tell(
    rows: Sequence[dict[str, Any]], options: argparse.Namespace, place: Place
) -> dict[str, Any]:
    """A line: errors, and beside them the time of a launch or the work of the emulator."""
    (row,), layer, console = rows, layer_of(options), Console()
    console.print(row["case"])
    cost = (("warm\nus", "{warm_us:.1f}"), ("cold\nus", "{cold_us:.1f}"))
    if "warm_us" not in row:
        cost = (("\nlaunches", "{launches}"), ("warp-\ninstr.", "{instructions:,}"),
                ("\nseconds", "{seconds:.1f}"))  # fmt: skip
    tables.show(*tables.table("", (*ERRORS, *cost), [row]), console)
    if "h_amax" in row:
        show_amax(layer, row["h_amax"], console)
    console.print(SAID[layer.activations])
    console.print("within tolerance" if row["ok"] else "out of tolerance")
    return {"row": row}


def show_amax(layer: Layer, found: float, console: Console) -> None:
    """Print the largest abs(h), and the scale that a calibration would derive from it."""
    words = f"largest |h|: {found:.4g}"
    if FORMATS[layer.format].has_global:
        scale = reference.encode_scale(torch.tensor([found]), layer.format).item()
        words += f", which --h-scale {scale:.4g} maps to the largest number of {layer.format}"
    console.print(words)


def grid_of(options: argparse.Namespace) -> Grid:
    """Grid of the products of such a layer."""
    layer = layer_of(options)
    if layer.mixed:
        return mixed_plan.grid_of(options.arch or layer.archs[0])
    return moe_plan.grid_of(options.arch or layer.archs[0])


FAMILY = Family(lambda options: layer_of(options).archs, experts_of, tell, grid_of)
