"""Checkpoints of experts in four bits for tests of engines, and a layer by its definition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from blackwell_engines.engines import experts as module
from blackwell_engines.engines.quantization import (
    COMPRESSED_MXFP4,
    COMPRESSED_NVFP4,
    GPT_OSS,
    MODELOPT,
)
from kernelkit.numerics import e2m1
from moe import PackedExperts, SwiGLU, unpack, unpack_biases
from moe.arguments import Chosen
from moe.formats import FORMATS
from moe.huggingface import Scheme
from moe.mixed.layer import FUSED_MIXED
from moe.reference import swiglu

EXPERTS, HIDDEN, INNER, TOP_K = 4, 128, 64, 2
OAI = SwiGLU(1.702, 1.0, 7.0)
KINDS = {
    "gpt-oss": GPT_OSS, "modelopt": MODELOPT,
    "nvfp4": COMPRESSED_NVFP4, "mxfp4": COMPRESSED_MXFP4,
}  # fmt: skip
DESCRIBED: dict[str, dict[str, Any]] = {
    "gpt-oss": {"quant_method": "mxfp4"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "nvfp4": {"quant_method": "compressed-tensors", "group_size": 16},
    "mxfp4": {"quant_method": "compressed-tensors", "group_size": 32},
}


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix of one expert: tensors by suffix, and its values in fp64."""

    tensors: dict[str, torch.Tensor]
    values: torch.Tensor


@dataclass(frozen=True)
class Checkpoint:
    """Experts of a layer: `matrices[e]` has gate, up and down of expert e. Biases are in bf16."""

    scheme: Scheme
    matrices: list[tuple[Matrix, Matrix, Matrix]]
    biases: tuple[torch.Tensor, torch.Tensor] | None  # [E, 2 I], gate first; [E, H]

    @property
    def w13(self) -> torch.Tensor:
        """Values [E, 2 I, H], all of gate first."""
        return torch.stack([torch.cat((g.values, u.values)) for g, u, _ in self.matrices])

    @property
    def w2(self) -> torch.Tensor:
        """Values [E, H, I]."""
        return torch.stack([down.values for *_, down in self.matrices])

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of all experts in one, rows of gate and up in turn, as of gpt-oss."""
        for name in (self.scheme.data, self.scheme.scales):
            gate, up, down = (
                torch.stack([each[place].tensors[name] for each in self.matrices])
                for place in range(3)
            )
            yield f"w13_{name}", torch.stack((gate, up), 2).flatten(1, 2)
            yield f"w2_{name}", down
        assert self.biases is not None
        yield "w13_bias", torch.stack(self.biases[0].chunk(2, 1), 2).flatten(1)
        yield "w2_bias", self.biases[1]


def checkpoint(kind: str, seed: int = 0) -> Checkpoint:
    """Random experts; each matrix has its own global scale, if the format has one."""
    draw, scheme = torch.Generator().manual_seed(seed), KINDS[kind]
    matrices = [
        tuple(
            _matrix(scheme, shape, draw)
            for shape in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
        )
        for _ in range(EXPERTS)
    ]
    biases = None
    if kind == "gpt-oss":
        biases = tuple(
            torch.randn(EXPERTS, n, generator=draw).bfloat16() for n in (2 * INNER, HIDDEN)
        )
    return Checkpoint(scheme, matrices, biases)  # type: ignore[arg-type]


def _matrix(scheme: Scheme, shape: tuple[int, int], draw: torch.Generator) -> Matrix:
    form, (rows, k) = FORMATS[scheme.fmt], shape
    data = torch.randint(0, 256, (rows, k // 2), generator=draw).to(torch.uint8)
    first, end = (118, 122) if form.scale == "ue8m0" else (0x30, 0x40)
    codes = torch.randint(first, end, (rows, k // form.block), generator=draw).to(torch.uint8)
    tensors = {scheme.data: data}
    if form.scale == "ue8m0":
        tensors[scheme.scales], scale = codes, torch.exp2(codes.double() - 127)
    else:
        tensors[scheme.scales] = codes.view(torch.float8_e4m3fn)
        scale = tensors[scheme.scales].double()
    if form.has_global:
        decode = torch.exp2(torch.randint(-9, -6, (), generator=draw).float())
        if scheme.decode:
            tensors[scheme.decode] = decode
        else:
            tensors[scheme.encode] = decode.reciprocal().reshape(1)
        tensors[scheme.activations] = torch.tensor(0.02)
    elements = e2m1.values_of(torch.stack((data & 15, data >> 4), -1).flatten(-2)).double()
    values = elements * scale.repeat_interleave(form.block, -1)
    return Matrix(tensors, values * decode.double() if form.has_global else values)


def tokens(count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x in bf16, ids with one -1, weights in fp32."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=draw).bfloat16()
    weights, ids = torch.rand(count, EXPERTS, generator=draw).topk(TOP_K)
    ids[0, 0] = -1
    return x, ids.int(), weights


def layer(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    biases: tuple[Any, Any] | None,
    choices: tuple[torch.Tensor, torch.Tensor],
    form: SwiGLU,
) -> torch.Tensor:
    """The layer in fp64. weights: w13 with all of gate first, and w2."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, factors) in enumerate(zip(*choices, strict=True)):
        for expert, factor in zip(ids.tolist(), factors.double(), strict=True):
            if expert < 0:
                continue
            both = weights[0][expert].double() @ x[token].double()
            both = both if biases is None else both + biases[0][expert].double()
            y = weights[1][expert].double() @ swiglu(*both.chunk(2), **vars(form))
            out[token] += factor * (y if biases is None else y + biases[1][expert].double())
    return out


def by_definition(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have `compute` use the definition. Returns the number of tokens of each call, later."""
    calls: list[int] = []
    arranged = module.arrange
    packed_of: dict[int, PackedExperts] = {}

    def arrange(packed: PackedExperts) -> Any:
        result = arranged(packed)
        packed_of[id(result)] = packed
        calls.append(0)
        held.append(result)
        return result

    def fused_moe(x: torch.Tensor, experts: Any, chosen: Chosen, *, activation: SwiGLU) -> Any:
        fields = {"x": x, "experts": experts, "activation": activation}
        fields |= module.moe.fused.routing_fields(chosen, None)
        FUSED_MIXED.arguments(fields).check()
        calls.append(len(x))
        packed = packed_of[id(experts)]
        biases = unpack_biases(packed)
        given = unpack(packed), None if biases[0] is None else biases
        return layer(x, *given, (chosen.ids, chosen.weights), activation).to(x.dtype)

    held: list[Any] = []
    monkeypatch.setattr(module, "arrange", arrange)
    monkeypatch.setattr(module, "fused_moe", fused_moe)
    monkeypatch.setattr(module, "warm", lambda keys, progress: f"{len(keys)} kernels")
    module.compile_all.cache_clear()
    return calls


def exact(given: Checkpoint, x: Any, ids: Any, weights: Any, form: SwiGLU) -> torch.Tensor:
    """What a layer of the checkpoint makes of tokens, in fp64."""
    return layer(x, (given.w13, given.w2), given.biases, (ids, weights), form)
