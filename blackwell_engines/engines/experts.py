"""Experts of a serving engine: the parameters that it loads, packed once, and the layer's result.

A rank has E experts with H columns and I rows of gate and of up each. The engine names parameters
after the checkpoint's tensors: `w13_` and `w2_` before the suffixes of `moe.huggingface.SCHEMES`.
Weights are in four bits and activations in bf16, so nothing is rounded that the checkpoint has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    SwiGLU,
    arrange,
    fused_moe,
    pack_quantised,
)
from moe.formats import format_of
from moe.huggingface import SCHEMES, Scheme
from moe.mixed.config import DEPTH, ROWS
from moe.mixed.fragments import unit_bytes, units_of
from moe.quantized import SCALE_DTYPES
from moe.reference import NAN_CODE

NAME = "blackwell_kernels"  # --quantization
GPT_OSS = Scheme("mxfp4", "weight", "weight_scale")  # as engines rename `_blocks` and `_scales`
MODELOPT, COMPRESSED_NVFP4, COMPRESSED_MXFP4 = SCHEMES[:3]
GROUPS = {16: COMPRESSED_NVFP4, 32: COMPRESSED_MXFP4}  # of compressed-tensors, by group size
WANTED = "MXFP4 of gpt-oss, NVFP4 of ModelOpt, NVFP4 or MXFP4 of compressed-tensors"


def kind_of(config: Mapping[str, Any]) -> str:
    """The kind of a checkpoint: 'mxfp4', 'modelopt' or 'compressed-tensors'.

    Args:
        config: `quantization_config` of config.json, or the contents of hf_quant_config.json.

    Raises:
        ValueError: the experts are not in four bits that the kernels read.
    """
    method = str(config.get("quant_method", "modelopt" if "quantization" in config else ""))
    algorithm = (config.get("quantization") or config).get("quant_algo", "")
    if method in ("mxfp4", "gpt_oss_mxfp4"):
        return "mxfp4"
    if method.startswith("modelopt") and str(algorithm).upper() in ("NVFP4", "W4A16_NVFP4"):
        return "modelopt"
    if method == "compressed-tensors":
        return method
    found = f"quant_method {method!r}" + (f" with quant_algo {algorithm!r}" if algorithm else "")
    raise ValueError(f"--quantization {NAME}: the checkpoint has {found}, expected {WANTED}")


def scheme_of(layer: str, weights: Any) -> Scheme:
    """The scheme of a layer of compressed-tensors.

    Args:
        layer: the layer's name, for the message.
        weights: its `QuantizationArgs`, None for a layer that is not quantised.

    Raises:
        ValueError: the layer is in another format.
    """
    kind = weights and (weights.num_bits, getattr(weights.type, "value", weights.type))
    if kind != (4, "float") or weights.group_size not in GROUPS:
        raise ValueError(f"--quantization {NAME}: {layer} has weights {weights}, expected {WANTED}")
    return GROUPS[weights.group_size]


@contextmanager
def fp32_by_default() -> Iterator[None]:
    """New tensors without a dtype are fp32 meanwhile: engines load models with another default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Parameter:
    """An empty parameter of a layer. kind: of a scale, 'block' or 'tensor'; '' otherwise."""

    data: torch.Tensor
    kind: str = ""


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

    @fp32_by_default()
    def check(self) -> None:
        """Raise ValueError for sizes that no kernel supports."""
        sizes = (self.experts, self.hidden, self.intermediate)
        ExpertWeights.empty(sizes, self.scheme.fmt, biases=bool(self.bias), device="meta")

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield each parameter with its name. Scales are NaN, which `pack` refuses, until they are
        loaded."""
        scheme, form, count = self.scheme, format_of(self.scheme.fmt), self.experts
        scale_dtype = torch.uint8 if form.scale == "ue8m0" else SCALE_DTYPES[form.scale]
        for matrix, rows, k in self._matrices():
            data = torch.zeros(count, rows, k // form.per_byte, dtype=torch.uint8)
            code = 0 if self.padded else NAN_CODE[form.scale]
            codes = torch.full((count, rows, form.columns(k)), code, dtype=torch.uint8)
            yield f"{matrix}_{scheme.data}", Parameter(data)
            yield f"{matrix}_{scheme.scales}", Parameter(codes.view(scale_dtype), "block")
            of_experts = (count, 2) if matrix == "w13" else (count,)
            for name in filter(None, (scheme.encode, scheme.decode, scheme.activations)):
                scales = torch.full(of_experts, torch.nan, dtype=torch.float32)
                yield f"{matrix}_{name}", Parameter(scales, "tensor")
            if self.bias:
                bias = torch.zeros(count, rows, dtype=torch.bfloat16)
                yield f"{matrix}_{self.bias}", Parameter(bias)

    @fp32_by_default()
    def pack(self, tensors: Mapping[str, torch.Tensor]) -> ArrangedExperts:
        """Pack loaded parameters; no value changes. Scales of activations are not used.

        Raises:
            ValueError: naming an expert with a scale that is not a number, as of one that was not
                loaded.
        """
        scheme = self.scheme

        def weight(matrix: str) -> CheckpointWeight:
            names = (scheme.data, scheme.scales, scheme.encode, scheme.decode)
            return CheckpointWeight(*(tensors[f"{matrix}_{n}"] if n else None for n in names))

        biases = None
        if self.bias:
            biases = tensors[f"w13_{self.bias}"], tensors[f"w2_{self.bias}"]
        packed = pack_quantised(
            weight("w13"), weight("w2"), scheme.fmt, order=self.order, biases=biases
        )
        return arrange(packed)

    @fp32_by_default()
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
        place: dict[str, Any] = {"device": device}
        x = torch.empty(1, self.hidden, dtype=torch.bfloat16, **place)
        ids = torch.zeros(1, self.top_k, dtype=torch.int32, **place)
        weights = torch.zeros(1, self.top_k, **place)
        experts = self._arranged(pairs, place)
        chosen, options = Chosen(ids, weights), {"activation": self.form, "arch": arch}
        return warm(moe.warm.kernels_for(x, experts, chosen, None, tokens, **options), progress)

    def _matrices(self) -> tuple[tuple[str, int, int], ...]:
        """Name, rows and columns of each matrix."""
        return ("w13", 2 * self.intermediate, self.hidden), ("w2", self.hidden, self.intermediate)

    def _arranged(self, pairs: bool, place: Mapping[str, Any]) -> ArrangedExperts:
        """Experts without contents."""
        fmt, count, made, biases = self.scheme.fmt, self.experts, [], []
        for matrix, rows, k in self._matrices():
            swiglu = matrix == "w13"
            size = units_of(rows, ROWS) * units_of(k, DEPTH) * unit_bytes(fmt)
            factor = torch.empty((count, 2) if swiglu and pairs else (count,), **place)
            data = torch.empty(count, size, dtype=torch.uint8, **place)
            made.append(Fragments(data, factor, rows, k, fmt, swiglu))
            biases.append(torch.empty(count, rows, **place) if self.bias else None)
        return ArrangedExperts(*made, *biases)


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
