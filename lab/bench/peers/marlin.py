"""Marlin's product of experts in MXFP4 with bf16 activations, from the sources in package sglang.

`lab.bench.peers.marlin_build` compiles its kernels once; MARLIN_LIBRARIES names the folder. Rows
are gathered by the tables of `glue.Blocks`, and results lie in the order of slots. SwiGLU is a
launch of `glue`, as SGLang also has one of its own. The products `w13` are timed without it, and
this adapter adds it before results are compared.

Block sizes are those that SGLang's `fused_marlin_moe` chooses by rows for each expert.
"""

from __future__ import annotations

from typing import Any

import torch

from lab.bench.peers import glue, marlin_build
from lab.bench.peers.marlin_layout import (
    GROUP,
    packed_codes,
    padded_rows,
    permuted_bias,
    permuted_scales,
)
from lab.bench.peers.run import Launch, Run, missing
from lab.problems.moe_models import Model, Tokens
from moe.packing import CheckpointWeight

DISTRIBUTIONS = ("sglang", "apache-tvm-ffi", "triton")
BLOCKS, FULL = (8, 16, 32, 48, 64), 0.9
WIDEST = 256  # columns of a tile
# The id of e2m1: exponent and mantissa bits, a sign, only finite values.
E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49


def available() -> str:
    """Return why it cannot run here, "" if it can."""
    if absent := missing("tvm_ffi", "triton"):
        return absent
    place = marlin_build.folder()
    if place is None or not marlin_build.library(place, True).is_file():
        return f"{marlin_build.PLACE} names no folder of python -m lab.bench.peers.marlin_build"
    return "" if torch.cuda.is_available() else "there is no GPU"


def block_of(rows: int, experts: int) -> int:
    """Return the rows of a block: the smallest size that an expert's rows fill on average."""
    return next((each for each in BLOCKS if rows / experts / each < FULL), BLOCKS[-1])


class Weight:
    """A weight in Marlin's layout, with rows of zeros behind the last where N is not enough.

    codes: int32 [E, K / 16, 2 N].
    scales: uint8 [E, K / 32, N].
    bias: bf16 [E, N] or None.
    """

    def __init__(self, w: CheckpointWeight, bias: torch.Tensor | None) -> None:
        _, self.rows, width = w.data.shape
        self.columns = 2 * width
        self.padded = padded_rows(self.rows, self.columns)
        more = self.padded - self.rows
        scales = w.scales.view(torch.uint8)
        self.codes = torch.stack([packed_codes(_longer(each, more)) for each in w.data])
        self.scales = permuted_scales(_longer(scales, more, 1))
        self.bias = None if bias is None else permuted_bias(_longer(bias, more, 1))


def _longer(tensor: torch.Tensor, more: int, dim: int = 0) -> torch.Tensor:
    """Return the tensor with zeros behind its last rows."""
    if not more:
        return tensor
    shape = [*tensor.shape]
    shape[dim] = more
    return torch.cat((tensor, tensor.new_zeros(shape)), dim)


class Experts:
    """Weights of both products in Marlin's layout, and its library."""

    max_error = 0.02

    def __init__(self, model: Model) -> None:
        import tvm_ffi

        if model.fmt != "mxfp4":
            raise NotImplementedError(f"weights in {model.fmt}: mxfp4")
        self.model, self.alternating = model, model.order == "alternating"
        self.weights = {
            "w13": Weight(model.w13, model.biases[0]),
            "w2": Weight(model.w2, model.biases[1]),
        }
        place = marlin_build.folder()
        assert place is not None
        path = marlin_build.library(place, model.biases[0] is not None)
        self.function = tvm_ffi.load_module(str(path)).moe_wna16_marlin_gemm
        device = model.w13.data.device
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.locks = torch.zeros(4 * self.processors, dtype=torch.int32, device=device)

    def product(
        self,
        part: str,
        x: torch.Tensor,
        blocks: glue.Blocks,
        weights: torch.Tensor,
        top_k: int,
    ) -> torch.Tensor:
        """Return rows by slot, [rows of x * top_k, N]; top_k: slots of a row of x."""
        w = self.weights[part]
        rows, block = len(x), len(blocks.slots) // len(blocks.experts)
        out = x.new_empty(rows * top_k, w.padded)
        sums = min(w.padded * len(blocks.slots), 4 * self.processors * block * WIDEST)
        sums *= 2 if block == 8 else 1
        none = x.new_empty(0, dtype=torch.int32)
        bias = x.new_empty(0) if w.bias is None else w.bias
        scratch = torch.empty(sums, dtype=torch.float32, device=x.device)
        groups = w.columns // GROUP
        self.function(
            *(x, out, w.codes, bias, w.scales, x.new_empty(0), x.new_empty(0), none, none),
            *(self.locks, blocks.slots, blocks.experts, blocks.padded, weights),
            *(x.new_empty(0), scratch, block, top_k, False, False, E2M1),
            *(rows, w.padded, w.columns, False, w.bias is not None, True, False),
            *(groups, GROUP, False, True, False),
        )
        return out if w.padded == w.rows else out[:, : w.rows]

    def blocks(self, rows: int, order: Any) -> glue.Blocks:
        """Return the tables by which both products find the rows of their experts."""
        experts = self.model.experts
        block = block_of(rows, experts)
        most = glue.most_blocks(rows, experts, block)
        return glue.blocks_of(order.offsets, order.slot_of_row, block, most)

    def launch(self, part: str, tokens: Tokens) -> Launch:
        """Return a call of this part; a graph captures the same call."""
        if part == "w13-ordered":
            raise NotImplementedError("it gathers rows: w13")
        rows, top_k = tokens.ids.numel(), tokens.ids.shape[1]
        if part == "layer":
            return self._whole(tokens, rows, top_k)
        blocks = self.blocks(rows, tokens.rows)
        ones = torch.ones(rows, device=tokens.x.device)
        x, each = (tokens.x, top_k) if part == "w13" else (glue.by_slot(tokens.h, tokens), 1)

        def finish(y: torch.Tensor) -> torch.Tensor:
            y, form = glue.by_expert(y, tokens), self.model.layer.activation
            return y if part == "w2" else glue.swiglu_in_torch(y, form, self.alternating)

        return Run(lambda: self.product(part, x, blocks, ones, each), finish, (blocks, ones))

    def _whole(self, tokens: Tokens, rows: int, top_k: int) -> Launch:
        slots, form = glue.every_slot(tokens), self.model.layer.activation

        def layer() -> torch.Tensor:
            _, weights, order = glue.routed(tokens, self.model)
            blocks = self.blocks(rows, order)
            flat = weights.flatten()
            both = self.product("w13", tokens.x, blocks, flat, top_k)
            h = glue.swiglu_of(both, form, self.alternating)
            y = self.product("w2", h, blocks, flat, 1)
            return glue.summed(y, weights, slots)

        return Run(layer, torch.Tensor.float, (slots,))


def prepare(model: Model) -> Experts:
    """Lay the weights of a model out; RuntimeError with the reason where it cannot run."""
    if reason := available():
        raise RuntimeError(reason)
    return Experts(model)
