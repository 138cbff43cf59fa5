"""Experts of a serving engine: the parameters that it loads, packed once, and the layer's result.

A rank has E experts with H columns and I rows of gate and of up each. The engine names parameters
after the checkpoint's tensors: `w13_` and `w2_` before the suffixes of `moe.huggingface.SCHEMES`.
Weights are in four bits and activations in bf16, so nothing is rounded that the checkpoint has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import nan
from typing import Any

import torch

import moe.warm
from kernelkit.compile.warm import Progress, Warmed, warm
from moe import (
    ArrangedExperts,
    CheckpointWeight,
    Chosen,
    ExpertWeights,
    Fragments,
    PackedExperts,
    SwiGLU,
    arrange,
    fused_moe,
    pack_quantised,
)
from moe.formats import format_of
from moe.huggingface import Scheme
from moe.mixed.config import DEPTH, ROWS
from moe.mixed.fragments import unit_bytes, units_of
from moe.quantized import SCALE_DTYPES
from moe.reference import NAN_CODE

BLOCK = 32  # rows of I that a rank's share of gpt-oss is a multiple of


def whole_blocks(rows: int) -> int:
    """Round rows of I up to whole blocks of MXFP4, as engines divide gpt-oss among ranks."""
    return -(-rows // BLOCK) * BLOCK


@dataclass(frozen=True)
class Parameter:
    """A parameter of a layer before it is loaded.

    fill: of 8-bit scales, the code
    kind: of a scale, 'block' or 'tensor'; '' otherwise
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float = 0
    kind: str = ""

    def make(self) -> torch.Tensor:
        """Return a new tensor."""
        dtype = torch.uint8 if self.kind == "block" else self.dtype
        return torch.full(self.shape, self.fill, dtype=dtype).view(self.dtype)


@dataclass(frozen=True)
class StoredExperts:
    """A rank's experts of a layer, as the engine loads them.

    intermediate: I; the engine may have rounded it up
    top_k: experts of a token
    form: the activation
    order: of the rows of w13, see `moe.pack`
    bias: suffix of the names of biases, '' for experts without
    padded: whether the engine loads fewer rows than I; the others stay zero
    """

    scheme: Scheme
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    form: SwiGLU
    order: str = "gate_up"
    bias: str = ""
    padded: bool = False

    def check(self) -> None:
        """Raise ValueError for sizes that no kernel supports."""
        sizes = (self.experts, self.hidden, self.intermediate)
        ExpertWeights.empty(sizes, self.scheme.fmt, biases=bool(self.bias), device="meta")

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield each parameter with its name. Scales are NaN, which `pack` refuses, until they are
        loaded."""
        scheme, form, count = self.scheme, format_of(self.scheme.fmt), self.experts
        scale_dtype = torch.uint8 if form.scale == "ue8m0" else SCALE_DTYPES[form.scale]
        code = 0 if self.padded else NAN_CODE[form.scale]
        for matrix, rows, k in self._matrices():
            data, scales = (count, rows, k // form.per_byte), (count, rows, form.columns(k))
            yield f"{matrix}_{scheme.data}", Parameter(data, torch.uint8)
            yield f"{matrix}_{scheme.scales}", Parameter(scales, scale_dtype, code, "block")
            of_experts = (count, 2) if matrix == "w13" else (count,)
            for name in filter(None, (scheme.encode, scheme.decode, scheme.activations)):
                yield f"{matrix}_{name}", Parameter(of_experts, torch.float32, nan, "tensor")
            if self.bias:
                yield f"{matrix}_{self.bias}", Parameter((count, rows), torch.bfloat16)

    def pack(self, tensors: Mapping[str, torch.Tensor]) -> PackedExperts:
        """Pack loaded parameters; no value changes. Scales of activations are not used.

        Raises:
            ValueError: naming an expert with a scale that is not a number, as of one that was not
                loaded.
        """
        scheme = self.scheme

        def weight(matrix: str) -> CheckpointWeight:
            encode, decode = (
                tensors[f"{matrix}_{name}"] if name else None
                for name in (scheme.encode, scheme.decode)
            )
            data, scales = (tensors[f"{matrix}_{n}"] for n in (scheme.data, scheme.scales))
            return CheckpointWeight(data, scales, encode, decode)

        biases = None
        if self.bias:
            biases = tensors[f"w13_{self.bias}"], tensors[f"w2_{self.bias}"]
        return pack_quantised(
            weight("w13"), weight("w2"), scheme.fmt, order=self.order, biases=biases
        )

    def register(self, layer: torch.nn.Module, attributes: Mapping[str, Any]) -> None:
        """Register the parameters with a layer.

        Args:
            attributes: of every parameter, such as the engine's weight_loader.

        Raises:
            ValueError: no kernel supports the sizes.
        """
        self.check()
        for name, parameter in self.parameters():
            weight = torch.nn.Parameter(parameter.make(), requires_grad=False)
            layer.register_parameter(name, weight)
            of_scale: dict[str, Any] = {"quant_method": parameter.kind} if parameter.kind else {}
            if parameter.kind and parameter.dtype.is_floating_point:
                of_scale["dummy_weight_value"] = 1.0  # vLLM's --load-format dummy
            for field, value in {**attributes, **of_scale}.items():
                setattr(weight, field, value)

    def take(self, layer: torch.nn.Module, name: str) -> ArrangedExperts:
        """Pack and arrange the loaded parameters of the layer `name`, and remove them from it.

        Raises:
            ValueError: naming the layer, and an expert that is wrong or was not loaded.
        """
        names = [each for each, _ in self.parameters()]
        try:
            packed = self.pack({each: getattr(layer, each).data for each in names})
        except ValueError as error:
            raise ValueError(f"{name}: {error}; was it loaded?") from error
        for each in names:
            delattr(layer, each)
        return arrange(packed)

    def load(
        self, layer: torch.nn.Module, name: str, tokens: int, say: Callable[[str], Any]
    ) -> ArrangedExperts:
        """`take` the parameters, and compile or find every kernel of a step of up to so many
        tokens. say: called with a line for the log, once for all layers that are alike."""
        experts = self.take(layer, name)
        compile_all(self, tokens, experts.w13.data.device, experts.w13.has_pairs, say)
        return experts

    def warmup(
        self,
        tokens: Sequence[int],
        device: torch.device | str = "meta",
        arch: str | None = None,
        *,
        pairs: bool = False,
        progress: Progress | bool | None = None,
    ) -> Warmed:
        """Find or compile all kernels that `compute` can choose for so many tokens.

        Args:
            tokens: how many a call may have, such as `range(1, 8193)`.
            device: device of the layer, or 'meta' where `arch` is given, on any machine.
            arch: such as 'sm_90a'; None for that of the device.
            pairs: whether gate and up of an expert have different global scales.
            progress: see `kernelkit.compile.warm.warm`.

        Raises:
            TypeError, ValueError, NotImplementedError: what the kernels refuse.
        """
        x = torch.empty(1, self.hidden, dtype=torch.bfloat16, device=device)
        ids = torch.zeros(1, self.top_k, dtype=torch.int32, device=device)
        chosen = Chosen(ids, torch.zeros(1, self.top_k, device=device))
        experts = self._arranged(pairs, device)
        given = x, experts, chosen, None, tokens
        return warm(moe.warm.kernels_for(*given, arch=arch, activation=self.form), progress)

    def _matrices(self) -> tuple[tuple[str, int, int], ...]:
        """Name, rows and columns of each matrix."""
        return ("w13", 2 * self.intermediate, self.hidden), ("w2", self.hidden, self.intermediate)

    def _arranged(self, pairs: bool, device: torch.device | str) -> ArrangedExperts:
        """Experts without contents."""
        fmt, count = self.scheme.fmt, self.experts
        made: dict[str, Fragments] = {}
        biases: dict[str, torch.Tensor | None] = {}
        for matrix, rows, k in self._matrices():
            swiglu = matrix == "w13"
            size = units_of(rows, ROWS) * units_of(k, DEPTH) * unit_bytes(fmt)
            factor = torch.empty((count, 2) if swiglu and pairs else (count,), device=device)
            data = torch.empty(count, size, dtype=torch.uint8, device=device)
            made[matrix] = Fragments(data, factor, rows, k, fmt, swiglu)
            bias = torch.empty(count, rows, device=device) if self.bias else None
            biases[matrix.replace("w", "bias")] = bias
        return ArrangedExperts(made["w13"], made["w2"], biases["bias13"], biases["bias2"])


def local_ids(ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Map ids of a layer's experts to those of a rank: -1 for experts elsewhere, and for -1.

    Args:
        ids: int32 or int64 [T, k].
        expert_map: int32 or int64, one number for each expert of the layer; None: all are here.
    """
    if expert_map is None:
        return ids
    return torch.where(ids < 0, -1, expert_map[ids.clamp(min=0).long()])


def compute(
    x: torch.Tensor,
    experts: ArrangedExperts,
    ids: torch.Tensor,
    weights: torch.Tensor,
    form: SwiGLU,
    *,
    expert_map: torch.Tensor | None = None,
    weigh_tokens: bool = False,
) -> torch.Tensor:
    """The experts' part of a layer, [T, H]. A CUDA graph captures it.

    Args:
        x: bfloat16 [T, H].
        ids, weights: the router's choices [T, k]. The id -1 adds nothing.
        expert_map: see `local_ids`.
        weigh_tokens: whether a weight multiplies its token instead of its expert's output; with
            k = 1 only.

    Raises:
        TypeError, ValueError, NotImplementedError: what `moe.fused_moe` raises.
    """
    if weigh_tokens:
        if weights.shape[1] != 1:
            raise ValueError(f"weigh_tokens with {weights.shape[1]} experts of a token: 1")
        x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
    return fused_moe(x, experts, Chosen(local_ids(ids, expert_map), weights), activation=form)


@cache
def compile_all(
    stored: StoredExperts, tokens: int, device: torch.device, pairs: bool, say: Callable[[str], Any]
) -> None:
    """Compile or find the kernels of all layers that are alike, once.

    Args:
        stored, tokens, device, pairs: see `StoredExperts.warmup`; up to so many tokens.
        say: called with a line for the log.
    """
    warmed = stored.warmup(range(1, tokens + 1), device, pairs=pairs)
    say(f"Experts in {stored.scheme.fmt}, activations in bf16: {warmed}")
