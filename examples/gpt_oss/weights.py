"""The weights of a model: drawn on the device from a seed, or read from a checkpoint's folder.

Names are those of openai/gpt-oss-* on Hugging Face's hub. Everything but experts is in bf16. The
experts of a drawn model lie on the grid of MXFP4, as those that were released do, or, with
`normal`, are normal numbers in bf16, which MXFP4 has to round.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from os import PathLike
from typing import Protocol

import torch

from examples.gpt_oss.config import Config, of_folder
from examples.gpt_oss.experts import (
    Bf16Experts,
    Experts,
    Mxfp4Experts,
    PlainExperts,
    packed_of,
    plain_of,
)
from examples.gpt_oss.ranks import Ranks
from moe import CheckpointWeight, PackedExperts, pack_gpt_oss, pack_quantised
from moe.huggingface import Checkpoint, tracked

KINDS = ("mxfp4", "bf16")  # of experts
GRID_RMS = 2.93  # of the sixteen values of e2m1, each as often as the others
BIAS = 127  # of the exponent of a scale factor
# For decided weights: the logit of the following token, where others are around 1; and the factor
# of the router weights.
SUCCESSOR, PEAKED = 16.0, 4.0


class Source(Protocol):
    """Source of weights. If `ranks` share the weights, it returns the part of one rank."""

    @property
    def ranks(self) -> Ranks | None: ...

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor that does not belong to an expert."""

    def packed(self, layer: int) -> PackedExperts | None:
        """The experts of a layer in MXFP4, None where they are in 16 bits."""

    def plain(self, layer: int) -> PlainExperts | None:
        """Return the experts of a layer in 16 bits, or None if they are in MXFP4."""


@dataclass(frozen=True)
class Drawn:
    """Random weights that depend only on the seed, the name and the kind of device, not the order.

    Attributes:
        normal: Draw experts from a normal distribution.
        decided: Imitate a trained model. Roundings do not grow from layer to layer, since each
            layer adds little and routers clearly prefer some experts. The next token is certain:
            the successor of each token, in an order drawn at random, leads by far.
    """

    config: Config
    device: torch.device
    seed: int = 0
    normal: bool = False
    ranks: Ranks | None = None
    decided: bool = False

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Norms around 1, rows of matrices of length 1, embeddings and sinks of size 1."""
        if self.ranks is not None:
            shape = self.ranks.whole_shape(name, shape)
        drawn = torch.randn(shape, generator=self._numbers(name), device=self.device)
        if "norm" in name:
            drawn = 1 + 0.1 * drawn
        elif name.endswith("bias"):
            drawn *= 0.1
        elif name.endswith(("proj.weight", "router.weight", "lm_head.weight")):
            drawn *= shape[-1] ** -0.5
        if self.decided:
            self._decide(name, drawn)
        drawn = drawn.bfloat16()
        return drawn if self.ranks is None else self.ranks.part(name, drawn)

    def _decide(self, name: str, drawn: torch.Tensor) -> None:
        """Apply `decided` to a drawn tensor, in place."""
        if name == "lm_head.weight":
            before = torch.randperm(
                len(drawn), generator=self._numbers("before"), device=self.device
            )
            embedding = self.tensor("model.embed_tokens.weight", tuple(drawn.shape))
            drawn += SUCCESSOR / self.config.hidden * embedding[before]
        elif "router" in name:
            drawn *= PEAKED
        elif "o_proj" in name or "down_proj" in name:
            drawn *= 2.0**-self._halvings

    @property
    def _halvings(self) -> int:
        """Number of halvings of each layer's addend to the residual stream.

        All addends together are then about as large as the stream at the start. This is GPT-2's
        rule and one halving more, since such experts turn 1 into 2.
        """
        return round(math.log2(2 * self.config.layers) / 2) + 1 if self.decided else 0

    def packed(self, layer: int) -> PackedExperts | None:
        """Codes as likely as each other, and one of three scale factors for each block."""
        if self.normal:
            return None
        count, sizes = self.config.experts.experts, self._sizes()
        pairs = [self._matrix(f"{layer} {name}", (count, *size)) for name, size in sizes.items()]
        own = slice(*_own(self.ranks, self.config))
        (w13, bias13), (w2, bias2) = [
            (CheckpointWeight(w.data[own], w.scales[own]), bias[own]) for w, bias in pairs
        ]
        return pack_quantised(w13, w2, "mxfp4", order="alternating", biases=(bias13, bias2))

    def plain(self, layer: int) -> PlainExperts | None:
        """Normal numbers, rows of length 1."""
        if not self.normal:
            return None
        count, found = self.config.experts.experts, []
        for name, (rows, columns) in self._sizes().items():
            numbers = self._numbers(f"{layer} {name}")
            shape = (count, columns, rows)
            drawn = torch.randn(shape, generator=numbers, device=self.device, dtype=torch.bfloat16)
            drawn *= columns**-0.5
            if name == "down_proj":
                drawn *= 2.0**-self._halvings
            found += [drawn, self._bias(f"{layer} {name}", (count, rows))]
        return PlainExperts(*found)

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of an expert's matrices."""
        form = self.config.experts
        hidden, inner = form.hidden, form.intermediate
        return {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}

    def _matrix(
        self, name: str, shape: tuple[int, int, int]
    ) -> tuple[CheckpointWeight, torch.Tensor]:
        """Draw one matrix for all experts of a layer, and its biases."""
        numbers, (count, rows, columns) = self._numbers(name), shape
        middle = BIAS + round(math.log2(columns**-0.5 / GRID_RMS))
        if "down_proj" in name:
            middle -= self._halvings

        def drawn(low: int, high: int, of: int) -> torch.Tensor:
            """Bytes from low to high - 1, one for so many columns."""
            size, kind = (count, rows, columns // of), torch.uint8
            return torch.randint(low, high, size, generator=numbers, device=self.device, dtype=kind)

        w = CheckpointWeight(drawn(0, 256, 2), drawn(middle - 1, middle + 2, 32))
        return w, self._bias(name, (count, rows))

    def _bias(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        return self.tensor(f"{name}_bias", shape)

    def _numbers(self, name: str) -> torch.Generator:
        seed = zlib.crc32(name.encode(), self.seed)
        return torch.Generator(self.device).manual_seed(seed)


def _own(ranks: Ranks | None, config: Config) -> tuple[int, int]:
    """(first, end) of the experts that are here."""
    found = None if ranks is None else ranks.expert_range(config)
    return (0, config.experts.experts) if found is None else found


@dataclass(frozen=True)
class Stored:
    """A folder of safetensors files: experts in MXFP4 as they were released, or in bf16."""

    folder: str | PathLike[str]
    device: torch.device
    ranks: Ranks | None = None

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """ValueError where it is missing or of another shape."""
        if self.ranks is not None:
            shape = self.ranks.whole_shape(name, shape)
        with Checkpoint(self.folder) as checkpoint:
            found = checkpoint.tensor(name)
        if tuple(found.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(found.shape)}, config.json says {shape}")
        if self.ranks is not None:
            found = self.ranks.part(name, found)
        return found.to(self.device, torch.bfloat16)

    def packed(self, layer: int) -> PackedExperts | None:
        """Pack one expert at a time, without changing a value."""
        prefix = f"model.layers.{layer}.mlp.experts"
        with Checkpoint(self.folder) as checkpoint:
            if f"{prefix}.gate_up_proj_blocks" not in checkpoint:
                return None
        own = None if self.ranks is None else self.ranks.expert_range(of_folder(self.folder))
        return pack_gpt_oss(self.folder, prefix, device=self.device, expert_range=own)

    def plain(self, layer: int) -> PlainExperts | None:
        """Read experts from a checkpoint that transformers saved in bf16."""
        prefix = f"model.layers.{layer}.mlp.experts"
        names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        with Checkpoint(self.folder) as checkpoint:
            if f"{prefix}.gate_up_proj" not in checkpoint:
                return None
            found = [checkpoint.tensor(f"{prefix}.{name}") for name in names]
        return PlainExperts(*(each.to(self.device, torch.bfloat16) for each in found))


@dataclass(frozen=True, eq=False)
class Layer:
    """Weights of a layer. qkv [(Hq + 2 Hkv) D, H]: queries, keys, values, one product; out [H, Hq
    D]; sinks fp32 [Hq], as kernels read them; router [E, H]."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    sinks: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor
    experts_norm: torch.Tensor
    router: torch.Tensor
    router_bias: torch.Tensor
    experts: Experts


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights of a model; embedding and head are [V, H]."""

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        whole = (self.embedding, self.norm, self.head)
        parts = [value for layer in self.layers for value in vars(layer).values()]
        return sum(each.nbytes for each in (*whole, *parts))


def load(
    config: Config,
    source: Source,
    *,
    experts: str = "mxfp4",
    dtype: torch.dtype = torch.bfloat16,
    progress: bool = False,
) -> Weights:
    """The weights of a model as it computes with them; experts are packed here, once.

    Args:
        experts: 'mxfp4', or 'bf16' for the same numbers in 16 bits.
        dtype: of everything that is not in four bits; fp32 is for tests, without kernels.
        progress: whether a bar says how many layers are ready; needs rich.

    Raises:
        ValueError: for another kind of experts, or tensors that are missing or of another shape.
    """
    if experts not in KINDS:
        raise ValueError(f"experts {experts!r}: one of {KINDS}")
    hidden, vocabulary = config.hidden, config.vocabulary
    layers = tracked([(f"layer {each}", each) for each in range(config.layers)], progress)
    made = []
    for item in layers:
        made.append(_layer(config, source, item[1], experts, dtype))
    return Weights(
        source.tensor("model.embed_tokens.weight", (vocabulary, hidden)).to(dtype),
        tuple(made),
        source.tensor("model.norm.weight", (hidden,)).to(dtype),
        source.tensor("lm_head.weight", (vocabulary, hidden)).to(dtype),
    )


def _layer(config: Config, source: Source, number: int, kind: str, dtype: torch.dtype) -> Layer:
    prefix, hidden, dim = f"model.layers.{number}", config.hidden, config.head_dim
    rows = {"q": config.q_heads * dim, "k": config.kv_heads * dim, "v": config.kv_heads * dim}
    routed = config.experts.experts

    def get(name: str, *shape: int) -> torch.Tensor:
        return source.tensor(f"{prefix}.{name}", shape).to(dtype)

    return Layer(
        attention_norm=get("input_layernorm.weight", hidden),
        qkv=torch.cat([get(f"self_attn.{x}_proj.weight", n, hidden) for x, n in rows.items()]),
        qkv_bias=torch.cat([get(f"self_attn.{x}_proj.bias", n) for x, n in rows.items()]),
        sinks=get("self_attn.sinks", config.q_heads).float(),
        out=get("self_attn.o_proj.weight", hidden, rows["q"]),
        out_bias=get("self_attn.o_proj.bias", hidden),
        experts_norm=get("post_attention_layernorm.weight", hidden),
        router=get("mlp.router.weight", routed, hidden),
        router_bias=get("mlp.router.bias", routed),
        experts=_experts(config, source, number, kind, dtype),
    )


def _experts(config: Config, source: Source, number: int, kind: str, dtype: torch.dtype) -> Experts:
    own = None if source.ranks is None else source.ranks.expert_range(config)
    if own is not None and kind != "mxfp4":
        raise NotImplementedError(f"experts in {kind} over ranks: 'mxfp4'")
    packed, plain = source.packed(number), source.plain(number)
    if packed is None and plain is None:
        raise ValueError(f"layer {number} has experts neither in MXFP4 nor in bf16")
    if kind == "mxfp4":
        if packed is None:
            assert plain is not None
            packed = packed_of(plain if own is None else plain.part(own))
        return Mxfp4Experts(packed, config.experts, own)
    if plain is None:
        assert packed is not None
        return Bf16Experts(plain_of(packed, dtype), config.experts)
    cast = {name: tensor.to(dtype) for name, tensor in vars(plain).items()}
    return Bf16Experts(PlainExperts(**cast), config.experts)
