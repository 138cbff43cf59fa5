"""FlashInfer's layer of experts with MXFP4 weights and bf16 activations on Hopper.

It is `cutlass_fused_moe` with `use_w4_group_scaling`: a grouped product of mixed inputs in CUTLASS,
with permutation, SwiGLU and sum in launches of its own. It has no function for a product alone, so
only the layer is timed. It starts from chosen experts; our router chooses them.

FlashInfer compiles this module on first use: 190 files with nvcc, more than an hour on few cores.
The benchmark does not start that. `python -m lab.bench.peers.flashinfer_moe` does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from lab.bench.peers.run import Launch, Run, missing
from lab.problems.moe_models import Model, Tokens
from moe import route

DISTRIBUTIONS = ("flashinfer-python", "flashinfer-jit-cache", "apache-tvm-ffi")
MODULE = "fused_moe_90"
MULTIPLE = 128  # of hidden and intermediate size


def library() -> Path | None:
    """Return the compiled module, None if there is none. FlashInfer has to be installed."""
    from flashinfer.jit import env

    places = (env.FLASHINFER_AOT_DIR, env.FLASHINFER_JIT_DIR)
    return next(
        (path for place in places if (path := place / MODULE / f"{MODULE}.so").is_file()), None
    )


def available() -> str:
    """Return why it cannot run here, "" if it can."""
    if absent := missing("flashinfer", "tvm_ffi"):
        return absent
    if not torch.cuda.is_available():
        return "there is no GPU"
    if torch.cuda.get_device_capability() != (9, 0):
        return "mixed inputs are for Hopper"
    return "" if library() else f"{MODULE} is not compiled: python -m {__name__}"


def halves(rows: torch.Tensor, alternating: bool, padded: int) -> torch.Tensor:
    """Return rows of w13 as it takes them: those of up first, then those of gate, each followed by
    zeros up to `padded`.

    rows: [E, 2 I, ...].
    alternating: rows of gate and up in turn, else gate first.
    """
    gate, up = (rows[:, ::2], rows[:, 1::2]) if alternating else rows.chunk(2, 1)
    return torch.cat((_padded(up, padded), _padded(gate, padded)), 1)


def _padded(rows: torch.Tensor, count: int, dim: int = 1) -> torch.Tensor:
    """Return the tensor with zeros up to a size."""
    more = count - rows.shape[dim]
    if not more:
        return rows.contiguous()
    shape = [*rows.shape]
    shape[dim] = more
    return torch.cat((rows, rows.new_zeros(shape)), dim)


def up_to(size: int) -> int:
    """Return the size that it takes."""
    return -(-size // MULTIPLE) * MULTIPLE


class Experts:
    """Weights of both products, padded and interleaved as the module wants them."""

    max_error = 0.02

    def __init__(self, model: Model) -> None:
        from flashinfer.fused_moe import (
            cutlass_fused_moe,
            interleave_moe_scales_for_sm90_mixed_gemm,
            interleave_moe_weights_for_sm90_mixed_gemm,
        )

        if model.fmt != "mxfp4":
            raise NotImplementedError(f"weights in {model.fmt}: mxfp4")
        self.model, self.function = model, cutlass_fused_moe
        layer, alternating = model.layer, model.order == "alternating"
        self.hidden, inner = up_to(layer.hidden), up_to(layer.intermediate)
        self.weights, self.scales = [], []
        for w, wide, first in ((model.w13, self.hidden, True), (model.w2, inner, False)):
            for source, each in ((w.data, wide // 2), (w.scales.view(torch.uint8), wide // 32)):
                rows = _padded(source, each, 2)
                rows = halves(rows, alternating, inner) if first else _padded(rows, self.hidden)
                if source is w.data:
                    self.weights.append(interleave_moe_weights_for_sm90_mixed_gemm(rows, "fp4"))
                else:
                    self.scales.append(interleave_moe_scales_for_sm90_mixed_gemm(rows))
        first_bias, second_bias = model.biases
        self.biases: dict[str, torch.Tensor] = {}
        if first_bias is not None and second_bias is not None:
            self.biases = {
                "fc1_expert_biases": halves(first_bias, alternating, inner),
                "fc2_expert_biases": _padded(second_bias, self.hidden),
            }
        form, device = layer.activation, model.w13.data.device
        self.form = {
            f"swiglu_{name}": torch.full((model.experts,), float(value), device=device)
            for name, value in (("alpha", form.alpha), ("beta", form.beta), ("limit", form.limit))
            if value is not None
        }
        self.device = device

    def launch(self, part: str, tokens: Tokens) -> Launch:
        """Return a call of the layer; a graph captures the same call."""
        if part != "layer":
            raise NotImplementedError("a product alone: the layer")
        x = _padded(tokens.x, self.hidden)
        given: dict[str, Any] = {
            "fc1_expert_weights": self.weights[0],
            "fc2_expert_weights": self.weights[1],
            "output_dtype": torch.bfloat16,
            "quant_scales": self.scales,
            "use_w4_group_scaling": True,
            "output": torch.empty_like(x),
            **self.biases,
            **self.form,
        }
        router = vars(self.model.layer.router)

        def layer() -> torch.Tensor:
            ids, weights = route(tokens.logits, **router)
            self.function(x, ids, weights, **given)
            return given["output"]

        columns = self.model.layer.hidden
        return Run(layer, lambda y: y[:, :columns].float(), (x, given))

    def warm(self, counts: Any) -> None:
        """Let its tuner choose the tiles of both products for these numbers of tokens."""
        from flashinfer.autotuner import autotune

        from lab.problems.moe_models import tokens_of

        with autotune(True):
            for count in counts:
                self.launch("layer", tokens_of(self.model, count, "random"))()


def prepare(model: Model) -> Experts:
    """Lay the weights of a model out; RuntimeError with the reason where it cannot run."""
    if reason := available():
        raise RuntimeError(reason)
    return Experts(model)


def compile_module() -> int:
    """Compile FlashInfer's module for Hopper; it needs nvcc."""
    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module

    gen_cutlass_fused_moe_sm90_module().build_and_load()
    return 0


if __name__ == "__main__":
    sys.exit(compile_module())
