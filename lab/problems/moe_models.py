"""Layers of models with random weights of four bits, made where they are used, and routers' logits.

Codes and scale factors are drawn, not quantised: what a checkpoint would hold, for sizes of which a
CPU would pack one in minutes. Products of numbers that are standard normal are about as large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from kernelkit.numerics import e2m1
from moe import ArrangedExperts, CheckpointWeight, arrange, pack_quantised
from moe.formats import format_of
from moe.models import ModelLayer, of_model
from moe.packing import Biases
from moe.reference_routing import Permutation, permutation, route

CODES_RMS = math.sqrt(137 / 16)  # of all sixteen codes of e2m1
E4M3_CODES = 0x30, 0x40  # factors from 1/2 on, below 2
UE8M0_ONE = 127
CHOSEN = 8.0  # added to logits of experts that are to be chosen
WEIGHT_BYTES = {"mxfp4": 17 / 32, "nvfp4": 9 / 16}  # of a value, with its scale factor


@dataclass(frozen=True, eq=False)
class Model:
    """A layer of `name` in the format `fmt`: w13, w2 and biases as a checkpoint has them."""

    name: str
    layer: ModelLayer
    fmt: str
    w13: CheckpointWeight
    w2: CheckpointWeight
    biases: Biases

    @property
    def experts(self) -> int:
        """All of them, shared ones too."""
        return self.layer.experts + self.layer.router.shared

    @property
    def order(self) -> str:
        """Order of the rows of w13: gpt-oss has those of gate and up in turn, which biases go
        with."""
        return "alternating" if self.layer.biases else "gate_up"

    def arranged(self, activations: str = "bf16") -> ArrangedExperts:
        """Return the experts arranged for activations of this dtype."""
        biases = self.biases if self.layer.biases else None
        packed = pack_quantised(self.w13, self.w2, self.fmt, order=self.order, biases=biases)
        return arrange(packed, activations)


def model_of(
    name: str, fmt: str, device: str, seed: int = 0, layer: ModelLayer | None = None
) -> Model:
    """Model, one of `moe.models`, or of the layer that is given."""
    layer = layer or of_model(name)
    generator = torch.Generator(device).manual_seed(seed)
    count = layer.experts + layer.router.shared
    sizes = (2 * layer.intermediate, layer.hidden), (layer.hidden, layer.intermediate)
    w13, w2 = (_weight(count, *size, fmt, generator) for size in sizes)
    biases: Biases = (None, None)
    if layer.biases:
        first, second = (
            torch.randn(count, rows, generator=generator, device=device).bfloat16()
            for rows, _ in sizes
        )
        biases = first, second
    return Model(name, layer, fmt, w13, w2, biases)


def _weight(
    experts: int, rows: int, columns: int, fmt: str, generator: torch.Generator
) -> CheckpointWeight:
    form, device = format_of(fmt), generator.device
    exponent = round(math.log2(columns**-0.5 / CODES_RMS))

    def integers(low: int, high: int, width: int) -> torch.Tensor:
        shape, kind = (experts, rows, width), torch.uint8
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=kind)

    data = integers(0, 256, columns // form.per_byte)
    if form.scale == "ue8m0":
        one = UE8M0_ONE + exponent
        return CheckpointWeight(data, integers(one - 1, one + 1, form.columns(columns)))
    scales = integers(*E4M3_CODES, form.columns(columns)).view(torch.float8_e4m3fn)
    decode = torch.full((experts,), 2.0**exponent, device=device)
    return CheckpointWeight(data, scales, decode_scale=decode)


def values(w: CheckpointWeight, fmt: str) -> torch.Tensor:
    """bf16 [E, N, K]: every value of these weights exactly, expert by expert."""
    form = format_of(fmt)
    experts, rows, width = w.data.shape
    out = w.data.new_empty((experts, rows, width * form.per_byte), dtype=torch.bfloat16)
    for expert, (data, scales) in enumerate(zip(w.data, w.scales, strict=True)):
        if form.scale == "ue8m0":
            factors = torch.exp2(scales.float() - UE8M0_ONE)
        else:
            factors = scales.float() * w.decode_scale[expert]
        blocks = e2m1.unpacked(data).unflatten(-1, (-1, form.block))
        out[expert] = (blocks * factors[..., None]).flatten(-2)
    return out


# -- routing --------------------------------------------------------------------------------------


def logits_of(
    routing: str, tokens: int, layer: ModelLayer, device: str, seed: int = 1
) -> torch.Tensor:
    """Return router logits, fp32 [tokens, E].

    balanced: tokens choose experts round-robin.
    random: all experts are equally likely.
    power-law: the expert of rank r is drawn without replacement, with a probability proportional to
    1 / r.
    """
    generator = torch.Generator(device).manual_seed(seed)
    experts, top_k = layer.experts, layer.router.top_k
    noise = torch.rand(tokens, experts, generator=generator, device=device)
    if routing == "balanced":
        ids = torch.arange(tokens * top_k, device=device).view(tokens, top_k) % experts
        return noise.scatter_add(1, ids, torch.full_like(ids, CHOSEN, dtype=noise.dtype))
    gumbel = -torch.log(-torch.log(noise.clamp(1e-7, 1 - 1e-7)))
    if routing == "random":
        return gumbel
    rank = 1 + torch.randperm(experts, generator=generator, device=device)
    return gumbel - rank.log()


@dataclass(frozen=True, eq=False)
class Tokens:
    """Input of a layer: x [T, H], h [R, I] for its second product alone, and logits."""

    model: Model
    routing: str
    x: torch.Tensor
    h: torch.Tensor
    logits: torch.Tensor

    @cached_property
    def ids(self) -> torch.Tensor:
        """int32 [T, k], shared experts too."""
        return route(self.logits, **vars(self.model.layer.router))[0]

    @cached_property
    def rows(self) -> Permutation:
        """Sorted by expert."""
        return permutation(self.ids, self.model.experts)

    @cached_property
    def counts(self) -> list[int]:
        """Rows of each expert."""
        return self.rows.offsets.diff().tolist()


def tokens_of(model: Model, count: int, routing: str, seed: int = 1) -> Tokens:
    """Standard normal; those of a second product a half of that."""
    layer, device = model.layer, model.w2.data.device
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    x = normal(count, layer.hidden)
    h = normal(count * layer.router.slots, layer.intermediate) / 2
    return Tokens(model, routing, x, h, logits_of(routing, count, layer, str(device), seed + 1))
