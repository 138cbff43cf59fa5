"""Humming's products of experts, compiled on the spot by NVRTC: package humming-kernels, 0.6 MB.

It has two forms, which are two peers of the benchmark:

- indexed: rows are gathered by the tables of `glue.Blocks`, and results lie in the order of slots;
- grouped: rows lie sorted by expert, with their offsets.

A product has no activation. So the products `w13` are timed without SwiGLU, which this adapter adds
before results are compared; the layer has it as a launch of Humming's, with the quantisation of h
where activations are in e4m3. Activations in e4m3 have a scale for each row. Those of a product are
quantised before it is timed, those of a layer within it.

Kernels are those of Humming's heuristic for the number of rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from lab.bench.peers import glue
from lab.bench.peers.run import Launch, Run, missing
from lab.problems.moe_models import Model, Tokens
from moe.packing import CheckpointWeight

DISTRIBUTIONS = ("humming-kernels", "nvidia-cuda-nvrtc", "triton")
INDEXED, GROUPED = "indexed", "grouped_contiguous"
# N and K are padded to multiples of these: as SGLang does it, so that larger tiles divide them, or
# (tight) as little as its heuristic allows.
MULTIPLES = {False: (256, 128), True: (128, 64)}
SECTIONS = ("w13", "w2")


def available() -> str:
    """Return why it cannot run here, "" if it can."""
    absent = missing("humming", "cuda.bindings", "triton")
    return absent or ("" if torch.cuda.is_available() else "there is no GPU")


def expression(form: Any) -> str:
    """Return SwiGLU of a and b as the C++ expression that Humming compiles.

    form: has alpha, beta and limit.
    """
    gate, up, alpha, beta = "a", "b", float(form.alpha), float(form.beta)
    if form.limit is not None:
        limit = f"{float(form.limit)!r}f"
        gate, up = f"fminf(a, {limit})", f"fminf(fmaxf(b, -{limit}), {limit})"
    return f"({gate}) / (1.0f + __expf(-{alpha!r}f * ({gate}))) * (({up}) + {beta!r}f)"


def tensors_of(w: CheckpointWeight, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return a weight in MXFP4 as Humming's schema `mxfp4` names its tensors: as a checkpoint has
    it, two codes a byte with the lower column in the lower half, and a scale for 32 columns."""
    found = {"weight": w.data.contiguous(), "weight_scale": w.scales.view(torch.uint8)}
    return found if bias is None else found | {"bias": bias}


def input_schema(activations: str) -> dict[str, str]:
    """Return Humming's description of the activations, for `HummingLayer`."""
    if activations == "bf16":
        return {"quant_method": "humming", "dtype": "bfloat16"}
    return {"quant_method": "humming", "dtype": "float8e4m3", "quant_mode": "dynamic_token"}


class Experts:
    """Weights of both products in Humming's layout.

    form: indexed or grouped_contiguous.
    activations: bf16, or e4m3 with a scale for each row.
    tight: whether weights are padded as little as possible.
    """

    def __init__(self, model: Model, form: str, activations: str, tight: bool = False) -> None:
        if model.fmt != "mxfp4":
            raise NotImplementedError(f"weights in {model.fmt}: mxfp4")
        self.model, self.form, self.activations = model, form, activations
        self.multiples = MULTIPLES[tight]
        self.max_error = 0.1 if activations == "e4m3" else 0.02
        self.alternating = model.order == "alternating"
        layer = model.layer
        sizes = (2 * layer.intermediate, layer.hidden), (layer.hidden, layer.intermediate)
        weights = zip(SECTIONS, sizes, (model.w13, model.w2), model.biases, strict=True)
        self.layers = {name: self._layer(*each) for name, *each in weights}
        self.chosen: dict[tuple[str, int], dict[str, Any]] = {}

    def _layer(self, size: tuple[int, int], w: CheckpointWeight, bias: torch.Tensor | None) -> Any:
        """Make the module of a product, and arrange its weight."""
        from humming.layer import HummingLayer

        with torch.device(w.data.device):
            layer = HummingLayer(
                shape_n=size[0],
                shape_k=size[1],
                weight_config={"quant_method": "mxfp4"},
                input_config=input_schema(self.activations),
                pad_n_to_multiple=self.multiples[0],
                pad_k_to_multiple=self.multiples[1],
                num_experts=self.model.experts,
                has_bias=bias is not None,
                torch_dtype=torch.bfloat16,
            )
        layer.load_from_tensors(tensors_of(w, bias))
        layer.transform()
        return layer

    # -- kernels ----------------------------------------------------------------------------------

    def kernel(self, part: str, rows: int) -> dict[str, Any]:
        """Return the heuristic's choice for a number of rows, as Humming's JSON describes it."""
        from humming.tune import get_heuristics_config

        if (part, rows) not in self.chosen:
            self.chosen[part, rows] = get_heuristics_config(
                self.layers[part].humming_config, shape_m=rows, gemm_type=self.form
            )
        return self.chosen[part, rows]

    def warm(self, counts: Sequence[int]) -> None:
        """Compile the kernels for these numbers of tokens, in parallel."""
        from humming.config import ComputeConfig
        from humming.kernel.humming import HummingKernel

        compute = ComputeConfig(gemm_type=self.form).to_str()
        for part in SECTIONS:
            config = self.layers[part].humming_config
            kernels = [self.kernel(part, count * self.model.layer.router.slots) for count in counts]
            given = [(0, 1 << 30, kernel) for kernel in kernels]
            HummingKernel.prepare_kernels(config.to_str(), compute, given)

    def product(self, part: str, inputs: torch.Tensor, **given: Any) -> torch.Tensor:
        """Compute a product; inputs in e4m3 have their input_scale."""
        rows = given.pop("rows")
        kernel, layer = self.kernel(part, rows), self.layers[part]
        columns = layer.shape_n
        return layer(
            inputs,
            outputs=torch.empty(rows, columns, dtype=torch.bfloat16, device=inputs.device),
            compute_config={"gemm_type": self.form},
            tuning_config=json.dumps(kernel),
            valid_shape_m=rows,
            **given,
        )

    # -- activations ------------------------------------------------------------------------------

    def quantise(self, part: str, x: torch.Tensor, **how: Any) -> dict[str, Any]:
        """Return inputs of a product by Humming's launch, quantised if it takes e4m3."""
        from humming.forward import may_process_input

        inputs, _, scale = may_process_input(self.layers[part].humming_config, x, **how)
        return {"inputs": inputs} | ({} if scale is None else {"input_scale": scale})

    def activate(self, both: torch.Tensor) -> dict[str, Any]:
        """Return inputs of the second product: SwiGLU, and quantisation, in one launch."""
        kind = "binary_interleaved" if self.alternating else "binary_split"
        how = {"activation_type": kind, "activation_impl": expression(self.model.layer.activation)}
        return self.quantise("w2", both, **how)

    # -- launches ---------------------------------------------------------------------------------

    def tables(self, part: str, rows: int, sorted_rows: Any) -> dict[str, Any]:
        """Return the keywords by which a product finds the rows of its experts."""
        if self.form == GROUPED:
            return {"expert_layout": sorted_rows.offsets.long(), "rows": rows}
        block = self.kernel(part, rows)["block_shape"][0]
        most = glue.most_blocks(rows, self.model.experts, block)
        found = glue.blocks_of(sorted_rows.offsets, sorted_rows.slot_of_row, block, most)
        return {
            "sorted_ids": found.slots,
            "expert_ids": found.experts,
            "num_tokens_padded": found.padded,
            "rows": rows,
        }

    def launch(self, part: str, tokens: Tokens) -> Launch:
        """Return a call of this part; a graph captures the same call."""
        rows = tokens.ids.numel()
        if part == "layer":
            return self._whole(tokens, rows)
        grouped = self.form == GROUPED
        if part == "w2":
            name, x, top_k = "w2", tokens.h if grouped else glue.by_slot(tokens.h, tokens), 1
        elif grouped == (part == "w13"):
            raise NotImplementedError(
                "rows in order: w13-ordered" if grouped else "it gathers: w13"
            )
        else:
            name, x = "w13", glue.gathered(tokens) if grouped else tokens.x
            top_k = 1 if grouped else tokens.ids.shape[1]
        given = self.tables(name, rows, tokens.rows) | self.quantise(name, x) | {"top_k": top_k}

        def finish(y: torch.Tensor) -> torch.Tensor:
            y = y if grouped else glue.by_expert(y, tokens)
            form = self.model.layer.activation
            return y if name == "w2" else glue.swiglu_in_torch(y, form, self.alternating)

        return Run(lambda: self.product(name, **given), finish, (given,))

    def _whole(self, tokens: Tokens, rows: int) -> Launch:
        slots = glue.every_slot(tokens)
        top_k = tokens.ids.shape[1]

        def layer() -> torch.Tensor:
            _, weights, order = glue.routed(tokens, self.model)
            x, grouped = tokens.x, self.form == GROUPED
            if grouped:
                x = x[torch.div(order.slot_of_row, top_k, rounding_mode="floor")]
            first = self.tables("w13", rows, order)
            both = self.product(
                "w13", **self.quantise("w13", x), **first, top_k=1 if grouped else top_k
            )
            second = self._second(first, rows, order)
            y = self.product("w2", **self.activate(both), **second, top_k=1)
            return glue.summed(y, weights, order.row_of_slot if grouped else slots)

        return Run(layer, torch.Tensor.float, (slots,))

    def _second(self, first: dict[str, Any], rows: int, order: Any) -> dict[str, Any]:
        """Return the tables of the second product: those of the first if blocks are alike."""
        blocks = {self.kernel(part, rows)["block_shape"][0] for part in SECTIONS}
        if self.form == GROUPED or len(blocks) == 1:
            return first
        return self.tables("w2", rows, order)


def prepare(
    model: Model, form: str = INDEXED, activations: str = "bf16", tight: bool = False
) -> Experts:
    """Lay the weights of a model out; RuntimeError with the reason where it cannot run."""
    if reason := available():
        raise RuntimeError(reason)
    return Experts(model, form, activations, tight)
