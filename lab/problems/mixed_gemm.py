"""Problems of products of numbers with weights of four bits, and of whole layers of arranged
experts: inputs, a launch, what it has to give.

Whatever nobody may read is poisoned: rows of x behind the last offset, tokens that no slot names,
the rows of a table behind those that exist, and the memory around every tensor. Rows of the output
that nobody has stay as they were."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from kernelkit.numerics import tolerance
from kernelkit.numerics.aligned_sums import aligned_product
from lab.problems import hostile
from lab.problems.grouped_gemm import CHECKED, DTYPES, LARGEST_FP16, checked, with_pairs
from lab.tools.place import poisoned_outputs
from moe import (
    ArrangedExperts,
    PackedExperts,
    Router,
    SwiGLU,
    arrange,
    mixed_gemm,
    pack,
    reference,
    route,
    unpack,
    unpack_biases,
)
from moe.arguments import Activation
from moe.formats import format_of
from moe.mixed.config import ROWS, MixedConfig
from moe.mixed.fragments import DEPTH, PAIR_ROWS, Fragments, fragments, unit_bytes, units_of
from moe.mixed.launch import MixedArguments
from moe.mixed.plan import ProductPlan
from moe.mixed.sm90 import plan as sm90
from moe.mixed.sm100 import plan as sm100
from moe.packing import interleaved_rows, quantise_experts
from moe.quantized import Quantized
from ptxemu import Options

STEP = MixedConfig().step  # K of an MMA
AROUND = 64  # elements of poison on either side of a tensor
NO_INDEX = torch.iinfo(torch.int32).max
TUNING = ("tile_rows", "teams", "parts", "split", "pdl", "arch")
PLANS = {"sm_90a": sm90.make_plan, "sm_100a": sm100.make_plan}


@dataclass(frozen=True)
class Case:
    """A mixed GEMM.

    counts: rows of each expert.
    room: unused rows after them.
    k: depth of the product.
    columns: columns of the output.
    form: (alpha, beta, limit) of SwiGLU, None for the plain product.
    slots: slots per token if rows are gathered, else 0.
    pairs: whether gate and up have separate global scales.
    amplitude: amplitude of x.
    w_like: a kind of numbers in `lab.problems.hostile`.
    tile_rows, teams, parts, split, pdl, arch: options of `mixed_gemm`."""

    counts: tuple[int, ...]
    k: int = 192
    columns: int = 96
    fmt: str = "mxfp4"
    form: tuple[float, float, float | None] | None = (1.0, 0.0, None)
    bias: bool = False
    slots: int = 0
    room: int = 0
    out: str = "bf16"
    amplitude: float = 1.0
    w_like: str = "normal"
    tile_rows: int | None = None
    teams: int | None = None
    parts: int | None = None
    split: int | None = None
    pdl: bool = False
    arch: str = "sm_90a"
    pairs: bool = False

    def __str__(self) -> str:
        names = {"tile_rows": "m", "teams": "t", "parts": "p", "split": "s"}
        tile = [f"{text}{value}" for name, text in names.items() if (value := getattr(self, name))]
        arch = ["blackwell"] * (self.arch == "sm_100a")
        return "-".join([self.problem, *tile, *["pdl"] * self.pdl, *arch])

    @property
    def problem(self) -> str:
        """Name of the problem without the schedule, which is the seed of its numbers."""
        counts = ".".join(map(str, self.counts[:6])) + "..." * (len(self.counts) > 6)
        parts = [self.fmt, f"{len(self.counts)}x{counts}", f"k{self.k}", f"n{self.columns}"]
        parts += [str(self.form) if self.form else "plain", self.out] + ["bias"] * self.bias
        parts += [f"slots{self.slots}"] * bool(self.slots) + [f"room{self.room}"] * bool(self.room)
        parts += [f"x{self.amplitude:g}"] * (self.amplitude != 1.0)
        parts += [self.w_like.replace(" ", ".")] * (self.w_like != "normal")
        parts += ["pairs"] * self.pairs
        return "-".join(parts).replace(" ", "")

    @property
    def rows(self) -> int:
        """Rows that experts have."""
        return sum(self.counts)

    @property
    def rows_of_w(self) -> int:
        """Rows of each expert's matrix."""
        return self.columns * (2 if self.form else 1)

    @property
    def activation(self) -> SwiGLU | None:
        return SwiGLU(*self.form) if self.form else None

    def inputs(self, device: str = "cpu") -> Inputs:
        """Return inputs that are equal for every schedule and on every device."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.problem.encode()))
        x, rows = self._rows(generator)
        shape = len(self.counts), self.rows_of_w, self.k
        w = torch.randn(shape, generator=generator) * self.k**-0.5
        w = hostile.values(self.w_like, w, self.fmt)
        scale = hostile.encode_scale(self.w_like, w.flatten(1), self.fmt)
        quantised = quantise_experts(
            "w", w.to(device), format_of(self.fmt), None if scale is None else scale.to(device)
        )
        if self.pairs:
            of_up = torch.Generator().manual_seed(len(self.counts))
            quantised = with_pairs(quantised, of_up, self.columns)
        order = interleaved_rows(self.columns, PAIR_ROWS) if self.form else slice(None)
        arranged = fragments(quantised, order if self.form else None)
        bias = torch.randn(shape[:2], generator=generator).to(device) if self.bias else None
        tensors = {name: _poisoned(getattr(arranged, name)) for name in ("data", "factor")}
        return Inputs(
            _poisoned(x.to(device)),
            replace(arranged, **tensors),
            _poisoned(torch.tensor([0, *self.counts]).cumsum(0).int().to(device)),
            None if bias is None else _poisoned(bias[:, order]),
            None if rows is None else _poisoned(rows.to(device)),
            quantised,
            bias,
        )

    def _rows(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor | None]:
        """bf16 x, and int32 [rows, room behind them] of slots where they are gathered."""
        count = self.rows + self.room
        tokens = count if not self.slots else 2 + -(-max(count, 1) // self.slots)
        x = (torch.randn(tokens, self.k, generator=generator) * self.amplitude).bfloat16()
        if not self.slots:
            x[self.rows :] = math.nan
            return x, None
        some = torch.randperm((tokens - 2) * self.slots, generator=generator)[: self.rows]
        some += self.slots  # of the first token and of the last one nobody has a row
        named = torch.zeros(tokens, dtype=torch.bool)
        named[some // self.slots] = True
        x[~named] = math.nan
        behind = torch.full((self.room,), NO_INDEX)
        return x, torch.cat((some, behind)).int()

    def options(self) -> dict[str, Any]:
        """Further arguments of `mixed_gemm` but for tensors."""
        return {
            "activation": self.activation,
            "slots": max(self.slots, 1),
            "out": DTYPES[self.out],
            **{name: getattr(self, name) for name in TUNING},
        }


@dataclass(frozen=True)
class Inputs:
    """Arguments of `mixed_gemm`, and weights and biases in plain order, all of gate first."""

    x: torch.Tensor
    w: Fragments
    offsets: torch.Tensor
    bias: torch.Tensor | None
    rows: torch.Tensor | None
    quantised: Quantized
    plain_bias: torch.Tensor | None

    @property
    def tensors(self) -> dict[str, Any]:
        """Keywords of `mixed_gemm`."""
        given = ("x", "w", "offsets", "bias", "rows")
        return {name: getattr(self, name) for name in given}


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def empty_fragments(
    experts: int, rows: int, k: int, fmt: str, *, swiglu: bool, pairs: bool = False
) -> Fragments:
    """Weights without memory. pairs: gate and up have a factor each."""
    size = units_of(rows, ROWS) * units_of(k, DEPTH) * unit_bytes(fmt)
    factors = (experts, 2) if pairs else (experts,)
    data, factor = empty(experts, size, dtype=torch.uint8), empty(*factors, dtype=torch.float32)
    return Fragments(data, factor, rows, k, fmt, swiglu)


def arguments_of(case: Case) -> MixedArguments:
    """Arguments made of tensors without memory: what says which kernel is compiled."""
    experts, count, rows = len(case.counts), case.rows + case.room, case.rows_of_w
    form = None if case.form is None else Activation(PAIR_ROWS, *case.form)
    return MixedArguments(
        empty(count, case.k, dtype=torch.bfloat16),
        empty_fragments(
            experts, rows, case.k, case.fmt, swiglu=case.form is not None, pairs=case.pairs
        ),
        empty(experts + 1),
        empty(experts, rows, dtype=torch.float32) if case.bias else None,
        rows=empty(count) if case.slots else None,
        **case.options() | {"activation": form, "out": case.out},
    )


def plan_of(case: Case) -> ProductPlan:
    """Plan of its kernel."""
    return PLANS[case.arch](arguments_of(case).config)


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers in memory surrounded by poison: NaN, or the largest integer."""
    poison = math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    size = tensor.numel()
    whole = tensor.new_full((size + 2 * AROUND,), poison)
    inner = whole[AROUND : AROUND + size].view(tensor.shape)
    return inner.copy_(tensor)


def call(case: Case, inputs: Inputs, **changes: Any) -> torch.Tensor:
    """The result, on the device of the inputs."""
    return mixed_gemm(**inputs.tensors | case.options() | changes)


def run(case: Case, options: Options = CHECKED, **changes: Any) -> torch.Tensor:
    """The result of the kernel in the emulator, where nothing is found; its memory held NaN."""
    with checked(options), poisoned_outputs():
        return call(case, case.inputs(), **changes)


def definition(
    case: Case, inputs: Inputs, dtype: torch.dtype, *, aligned_sums: bool = False
) -> torch.Tensor:
    """[rows, columns] on the device of the inputs, in fp64, or with what the kernel computes in
    fp32: sums along K, in steps or as a tensor core makes them, times the global scale, plus the
    bias, SwiGLU."""
    x, w = inputs.x, inputs.quantised
    rows = slice(case.rows) if inputs.rows is None else inputs.rows[: case.rows] // case.slots
    x = x[rows]
    factor = torch.ones(len(case.counts)) if w.decode_scale is None else w.decode_scale
    factor = factor.view(len(factor), -1)  # of all rows of an expert, or of gate and of up
    factor = factor.repeat_interleave(case.rows_of_w // factor.shape[1], 1)
    if w.decode_scale is not None:
        one = w.decode_scale.new_ones(len(w.data))
        w = replace(w, encode_scale=one, decode_scale=one)
    matrices = reference.dequantise(w)
    xs = [x[begin:end] for begin, end in pairwise(inputs.offsets.tolist())]
    rows_of = sums(xs, matrices, dtype, aligned_sums=aligned_sums)
    for expert, found in enumerate(rows_of):
        found *= factor[expert].to(found)
        if inputs.plain_bias is not None:
            found += inputs.plain_bias[expert].to(dtype)
    product = torch.cat(rows_of)
    if case.form is None:
        return product
    alpha, beta, limit = case.form
    gate, up = product.chunk(2, dim=-1)
    return reference.swiglu(gate, up, alpha=alpha, beta=beta, limit=limit)


def sums(
    xs: Sequence[torch.Tensor], ws: torch.Tensor, dtype: torch.dtype, *, aligned_sums: bool
) -> list[torch.Tensor]:
    """[rows, N] of each expert, of its x [rows, K] and of all w, fp64 [E, N, K]."""
    if dtype == torch.float64:
        return [x.double() @ w.T for x, w in zip(xs, ws, strict=True)]
    if aligned_sums:
        return _aligned(xs, ws)
    return [_in_steps(x, w.T) for x, w in zip(xs, ws, strict=True)]


def _in_steps(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(len(x), w.shape[1], device=x.device)
    for own, other in zip(x.split(STEP, 1), w.split(STEP, 0), strict=True):
        total += own.float() @ other.float()
    return total


def _aligned(xs: Sequence[torch.Tensor], ws: torch.Tensor) -> list[torch.Tensor]:
    """Compute products as a GPU does, batching experts with similar numbers of rows, since each
    batch is some thousand operations in torch."""
    found = [x.new_empty((0, ws.shape[1]), dtype=torch.float32) for x in xs]
    alike: dict[int, list[int]] = {}
    for expert, x in enumerate(xs):
        if len(x):
            alike.setdefault((len(x) - 1).bit_length(), []).append(expert)
    for experts in alike.values():
        padded = pad_sequence([xs[expert] for expert in experts], batch_first=True)
        together = aligned_product(padded, ws[experts].mT, torch.bfloat16)
        for expert, rows in zip(experts, together, strict=True):
            found[expert] = rows[: len(xs[expert])].contiguous()
    return found


def judge(
    case: Case, result: torch.Tensor, inputs: Inputs, *, aligned_sums: bool = False
) -> Sequence[tolerance.Report]:
    """Verdict on the rows that experts have, and that the others were not written. aligned_sums: as
    a GPU makes them."""
    assert result.dtype == DTYPES[case.out]
    exact = definition(case, inputs, torch.float64)
    rounded = definition(case, inputs, torch.float32, aligned_sums=aligned_sums)
    if case.out == "fp16":
        exact = torch.where(exact.abs() > LARGEST_FP16, exact.sign() * math.inf, exact)
    output = tolerance.compare_output(
        result[: case.rows], exact, rounded.to(result.dtype), result.dtype
    )
    written = (~result[case.rows :].isnan()).nonzero().tolist()
    where = (case.rows + written[0][0], written[0][1]) if written else ()
    untouched = tolerance.Report("rows of nobody", not written, where, 0.0, 0.0, 0.0)
    return output, untouched


# Problems of whole layers of arranged experts: inputs of `fused_moe`, and what it has to give.
#
# Experts and weights of the router are those that the kernel `route` gives, which is held against
# its definition elsewhere: a choice between two that are nearly equal is no error of the layer.


ARCH = "sm_90a"  # of the router, in the emulator
FAR = 50.0  # between logits of experts that are chosen and others


@dataclass(frozen=True)
class Layer:
    """An MoE layer.

    shared: experts in addition to those that are chosen from.
    rank: (first, end) among all experts, None for the whole layer.
    routing: 'any'; 'one', an expert for all tokens; 'elsewhere', none of the rank.
    form: form of SwiGLU.
    amplitude: amplitude of x.
    tile_rows: option of `fused_moe`."""

    tokens: int
    hidden: int = 160
    intermediate: int = 96
    experts: int = 5
    top_k: int = 2
    fmt: str = "mxfp4"
    scoring: str = "softmax"
    shared: int = 0
    rank: tuple[int, int] | None = None
    routing: str = "any"
    form: tuple[float, float, float | None] = (1.702, 1.0, 7.0)
    bias: bool = True
    amplitude: float = 1.0
    tile_rows: int | None = None

    def __str__(self) -> str:
        words = (f"{each.name}={getattr(self, each.name)}" for each in fields(self))
        return "-".join(words).replace(" ", "")

    @property
    def total(self) -> int:
        """Experts, here or elsewhere."""
        return self.experts + self.shared

    @property
    def here(self) -> tuple[int, int]:
        """Range of the experts on this rank."""
        return self.rank or (0, self.total)

    @property
    def router(self) -> Router:
        return Router(self.top_k, self.scoring, shared=self.shared)

    @property
    def activation(self) -> SwiGLU:
        return SwiGLU(*self.form)

    def options(self) -> dict[str, Any]:
        """Further arguments of `fused_moe`."""
        return {
            "router": self.router,
            "activation": self.activation,
            "expert_range": self.rank,
            "tile_rows": self.tile_rows,
        }

    def inputs(self, device: str = "cpu") -> LayerInputs:
        """Return inputs that are equal on every device."""
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))
        first, end = self.here
        count = end - first

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        x = (normal(self.tokens, self.hidden) * self.amplitude).bfloat16()
        logits = normal(self.tokens, self.experts)
        if self.routing == "one":
            logits[:, first % self.experts] += FAR
        elif self.routing == "elsewhere":
            logits[:, first:end] -= FAR
        w13 = normal(count, 2 * self.intermediate, self.hidden) * self.hidden**-0.5
        w2 = normal(count, self.hidden, self.intermediate) * self.intermediate**-0.5
        biases = normal(count, 2 * self.intermediate), normal(count, self.hidden)
        packed = pack(
            *(w.bfloat16().to(device) for w in (w13, w2)),
            self.fmt,
            granularity=8,
            biases=tuple(bias.to(device) for bias in biases) if self.bias else None,
        )
        return LayerInputs(x.to(device), packed, arrange(packed), logits.to(device))


@dataclass(frozen=True)
class LayerInputs:
    """Arguments of `fused_moe`, and the experts before they were arranged."""

    x: torch.Tensor
    packed: PackedExperts
    experts: ArrangedExperts
    logits: torch.Tensor

    @property
    def tensors(self) -> dict[str, Any]:
        """Keywords of `fused_moe`."""
        return {"x": self.x, "experts": self.experts, "router_logits": self.logits}


def layer_definition(
    case: Layer, inputs: LayerInputs, dtype: torch.dtype, *, aligned_sums: bool = False
) -> torch.Tensor:
    """[T, H] on the device of the inputs, in fp64, or rounded where the kernels round: sums to
    fp32, rows of both products to bf16."""
    x = inputs.x
    ids, weights = route(inputs.logits, **vars(case.router), arch=None if x.is_cuda else ARCH)
    matrices, biases = unpack(inputs.packed), unpack_biases(inputs.packed)
    alpha, beta, limit = case.form
    first, end = case.here

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return values if dtype == torch.float64 else values.bfloat16().to(dtype)

    def product(values: list[torch.Tensor], which: int) -> list[torch.Tensor]:
        found = sums(values, matrices[which], dtype, aligned_sums=aligned_sums)
        bias = biases[which]
        if bias is None:
            return found
        return [own + added.to(dtype) for own, added in zip(found, bias, strict=True)]

    def activated(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return rounded(reference.swiglu(gate, up, alpha=alpha, beta=beta, limit=limit))

    y = torch.zeros(*ids.shape, case.hidden, dtype=dtype, device=x.device)
    places = [(ids == expert).nonzero(as_tuple=True) for expert in range(first, end)]
    hs = [activated(both) for both in product([x[token] for token, _ in places], 0)]
    for (token, slot), rows in zip(places, product(hs, 1), strict=True):
        y[token, slot] = rounded(rows)
    total = torch.zeros(len(x), case.hidden, dtype=dtype, device=x.device)
    for slot in range(ids.shape[1]):
        total += y[:, slot] * weights[:, slot, None].to(dtype)
    return total


def judge_layer(
    case: Layer, result: torch.Tensor, inputs: LayerInputs, *, aligned_sums: bool = False
) -> Sequence[tolerance.Report]:
    """aligned_sums: as a GPU makes them."""
    exact = layer_definition(case, inputs, torch.float64)
    rounded = layer_definition(case, inputs, torch.float32, aligned_sums=aligned_sums)
    return (tolerance.compare_output(result, exact, rounded.to(result.dtype), result.dtype),)
