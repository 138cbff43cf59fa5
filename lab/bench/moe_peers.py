"""Peers that compute layers of experts in `bench.py moe --model`: moe and the libraries of others.

A peer is made once for a model, which lays the weights out for it, and then makes a launch of each
part:

- `layer`: from logits to the sum of a token's experts;
- `w13`: the first product, which gathers its rows from the tokens, with SwiGLU;
- `w13-ordered`: the same, of rows that lie sorted by expert;
- `w2`: the second product, of rows that lie sorted by expert or, if the peer prefers that, by slot.

Rows are sorted before a product is timed. Libraries whose product has no SwiGLU (Humming, Marlin)
are timed without it in `w13`, which favours them. A peer raises where it cannot: ImportError where
it is not installed, anything else for a model or a part that it does not take. It is imported when
it is asked for. `lab.bench.peers` has the adapters to libraries that need one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lab.bench.peers import deepgemm, flashinfer_moe, glue, humming, marlin
from lab.bench.peers.run import versions
from lab.problems.moe_models import Model, Tokens, values
from lab.problems.moe_steps import torch_route
from moe import fused_moe, fused_moe_plan, mixed_gemm
from moe.models import GPT_OSS_BETA

OURS, OURS_E4M3, OURS_STEPS = ALL_OURS = "moe", "moe-e4m3", "moe-steps"
LAYER, W13, ORDERED, W2 = PARTS = ("layer", "w13", "w13-ordered", "w2")
# of the worst row, norm over norm, beside the first peer that computed it
MAX_ERROR = {"bf16": 0.02, "e4m3": 0.1}
TRITON_WARPS = 8  # of a program: the layout of scale factors depends on it

Launch = Callable[[], torch.Tensor]


class Ours:
    """`fused_moe` and `mixed_gemm`.

    activations: bf16, or e4m3, in which the rows of a product are quantised before it is timed.
    few_rows: of `fused_moe`; False: its steps in any case, the layer alone.
    where: `backend` and `arch` of both, this GPU by default.
    """

    def __init__(
        self, model: Model, activations: str = "bf16", few_rows: bool | None = None, **where: str
    ) -> None:
        self.layer, self.where = model.layer, where or {"backend": "cuda"}
        self.few_rows = few_rows
        self.experts, self.max_error = model.arranged(activations), MAX_ERROR[activations]

    def launch(self, part: str, tokens: Tokens) -> Launch:
        """Return a call of this part."""
        if self.few_rows is False and part != LAYER:
            raise NotImplementedError(f"{part} is that of {OURS!r}")
        if part == LAYER:
            return partial(fused_moe, *self._layer(tokens), **self._options)
        given: dict[str, Any] = {"most_rows": len(tokens.x), **self.where}
        x, w = {W13: tokens.x, ORDERED: None, W2: tokens.h}[part], self.experts.w13
        if part == W2:
            w, given["bias"] = self.experts.w2, self.experts.bias2
        else:
            given |= {"bias": self.experts.bias13, "activation": self.layer.activation}
        if part == W13:
            given |= {"rows": tokens.rows.slot_of_row, "slots": self.layer.router.slots}
        x = glue.gathered(tokens) if x is None else x
        if self.experts.x != "bf16":
            x, given["x_scale"] = glue.quantised(x)
        return partial(mixed_gemm, x, w, tokens.rows.offsets, **given)

    def planned(self, part: str, tokens: Tokens) -> Launch:
        """Return the form that a graph captures: a plan for a layer, else a call."""
        if part != LAYER:
            return self.launch(part, tokens)
        return fused_moe_plan(*self._layer(tokens), **self._options)

    def _layer(self, tokens: Tokens) -> tuple[Any, ...]:
        return tokens.x, self.experts, tokens.logits, self.layer.router

    @property
    def _options(self) -> dict[str, Any]:
        form = self.layer.activation
        return {"activation": form, "few_rows": self.few_rows, **self.where}


class Triton:
    """Triton's own kernels for MXFP4, `triton_kernels.matmul_ogs` with its routing. swizzled: in
    the layouts that it has for this GPU; else as a checkpoint has them."""

    def __init__(self, model: Model, *, swizzled: bool = True) -> None:
        import triton_kernels.matmul_ogs as ogs
        from triton_kernels.numerics import InFlexData
        from triton_kernels.routing import routing
        from triton_kernels.swiglu import swiglu_fn
        from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
        from triton_kernels.tensor_details import layout as layouts

        self.sources = digest(Path(str(ogs.__file__)).parent)
        if model.fmt != "mxfp4":
            raise NotImplementedError(f"weights in {model.fmt}: mxfp4")
        self.layer, self.experts, self.ogs, self.routing = model.layer, model.experts, ogs, routing
        form, of_values, of_scales = model.layer.activation, {}, {}
        values_layout = scales_layout = layouts.StridedLayout
        if swizzled:
            make = layouts.make_default_matmul_mxfp4_w_layout
            values_layout, of_values = make(mx_axis=1)
            make = layouts.make_default_matmul_mxfp4_w_scale_layout
            scales_layout, of_scales = make(mx_axis=1, num_warps=TRITON_WARPS)
        self.weights = {}
        for part, w, bias in ((W13, model.w13, model.biases[0]), (W2, model.w2, model.biases[1])):
            # K comes first, and lies together.
            wrapped = wrap_torch_tensor(w.data.mT, dtype=FP4)
            scales = convert_layout(wrap_torch_tensor(w.scales.mT), scales_layout, **of_scales)
            flex = ogs.FlexCtx(rhs_data=InFlexData())
            precision = ogs.PrecisionConfig(weight_scale=scales, flex_ctx=flex)
            w = convert_layout(wrapped, values_layout, **of_values)
            self.weights[part] = w, None if bias is None else bias.float(), precision
        specs = ogs.FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"))
        self.swiglu = ogs.FusedActivation(specs, (form.alpha, form.limit), 2)

    def product(self, part: str, x: torch.Tensor, routed: Any, **given: Any) -> torch.Tensor:
        """Compute a product in one launch, or in two with a scatter."""
        w, bias, precision = self.weights[part]
        return self.ogs.matmul_ogs(x, w, bias, routed, precision_config=precision, **given)

    def launch(self, part: str, tokens: Tokens) -> Launch:
        """Return a call of this part; a graph captures the same call."""
        if part == W2:
            return partial(self.product, W2, tokens.h, self._sorted(tokens)[0])
        form, router = self.layer.activation, self.layer.router
        if form.beta != GPT_OSS_BETA or not self.layer.biases:
            raise NotImplementedError("its SwiGLU is that of gpt-oss: gate and up in turn, up + 1")
        if part == W13:
            routed, gather, _ = self._sorted(tokens)
            given = {"gather_indx": gather, "fused_activation": self.swiglu}
            return partial(self.product, W13, tokens.x, routed, **given)
        if part == ORDERED:
            x, routed = glue.gathered(tokens), self._sorted(tokens)[0]
            return partial(self.product, W13, x, routed, fused_activation=self.swiglu)
        if router.scoring != "softmax" or not router.renormalize or router.shared:
            raise NotImplementedError("its router is a softmax over the experts of a token")

        def layer() -> torch.Tensor:
            routed, gather, scatter = self.routing(tokens.logits, router.top_k)
            given = {"gather_indx": gather, "fused_activation": self.swiglu}
            h = self.product(W13, tokens.x, routed, **given)
            return self.product(W2, h, routed, scatter_indx=scatter, gammas=routed.gate_scal)

        return layer

    def _sorted(self, tokens: Tokens) -> Any:
        """Routing to the experts that are chosen already, whatever the router is."""
        logits = tokens.x.new_zeros((len(tokens.x), self.experts), dtype=torch.float32)
        logits.scatter_(1, tokens.ids.long(), 1.0)
        return self.routing(logits, tokens.ids.shape[1])


def digest(folder: Path) -> str:
    """Digest of the sources of a package that has no version of its own."""
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:12]


class Torch:
    """torch's grouped product in bf16, with everything around it as models write it."""

    def __init__(self, model: Model) -> None:
        functional = getattr(torch.nn.functional, "grouped_mm", None)
        self.grouped = functional or torch._grouped_mm
        self.layer, self.alternating = model.layer, model.order == "alternating"
        self.weights = {W13: values(model.w13, model.fmt).mT, W2: values(model.w2, model.fmt).mT}
        self.biases = dict(zip((W13, W2), model.biases, strict=True))

    def product(
        self, part: str, x: torch.Tensor, offsets: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Rows of x sorted by expert; experts: of each."""
        y, bias = self.grouped(x, self.weights[part], offs=offsets), self.biases[part]
        return y if bias is None else y + bias[experts]

    def first(self, x: torch.Tensor, offsets: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The first product, and SwiGLU."""
        both, form = self.product(W13, x, offsets, experts), self.layer.activation
        gate, up = (both[:, ::2], both[:, 1::2]) if self.alternating else both.chunk(2, -1)
        if form.limit is not None:
            gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
        return gate * torch.sigmoid(form.alpha * gate) * (up + form.beta)

    def launch(self, part: str, tokens: Tokens) -> Launch:
        """Return a call of this part; a graph captures the same call."""
        if part != LAYER:
            rows = tokens.rows
            token, expert = self._of_rows(tokens.ids, rows.slot_of_row.long())
            offsets = rows.offsets[1:]
            if part == W13:
                return lambda: self.first(tokens.x[token], offsets, expert)
            if part == ORDERED:
                return partial(self.first, tokens.x[token], offsets, expert)
            return partial(self.product, W2, tokens.h, offsets, expert)
        return partial(self._all, tokens)

    def _all(self, tokens: Tokens) -> torch.Tensor:
        ids, weights = self._route(tokens.logits)
        experts = ids.flatten()
        slot = experts.argsort(stable=True)
        token, expert = self._of_rows(ids, slot)
        edges = torch.arange(self.weights[W2].shape[0], device=ids.device)
        offsets = torch.searchsorted(expert, edges, right=True).int()
        h = self.first(tokens.x[token], offsets, expert)
        y = self.product(W2, h, offsets, expert) * weights.flatten()[slot, None].to(h.dtype)
        of_slots = torch.empty_like(y).index_copy_(0, slot, y)
        return of_slots.view(*ids.shape, -1).sum(1)

    def _route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = vars(self.layer.router).copy()
        shared, weight = given.pop("shared"), given.pop("shared_weight")
        if given["scoring"] == "sqrtsoftplus" or not given.pop("renormalize"):
            raise NotImplementedError(f"a router with {given['scoring']}")
        names = ("top_k", "scoring", "n_group", "topk_group", "scale")
        ids, weights = torch_route(logits, given["bias"], **{name: given[name] for name in names})
        every = torch.arange(shared, device=ids.device) + logits.shape[1]
        every = every.int().expand(len(ids), shared)
        fixed = weights.new_full(every.shape, weight)
        return torch.cat((ids, every), -1), torch.cat((weights, fixed), -1)

    def _of_rows(self, ids: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(token, expert) of each row."""
        return slots // ids.shape[1], ids.flatten()[slots].long()


# Peers with a module of their own, which says why the library cannot run here.
ADAPTERS: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "humming": (humming, {}),
    "humming-ordered": (humming, {"form": humming.GROUPED}),
    "humming-tight": (humming, {"tight": True}),
    "humming-ordered-tight": (humming, {"form": humming.GROUPED, "tight": True}),
    "humming-e4m3": (humming, {"activations": "e4m3"}),
    "humming-ordered-e4m3": (humming, {"form": humming.GROUPED, "activations": "e4m3"}),
    "marlin": (marlin, {}),
    "flashinfer": (flashinfer_moe, {}),
    "deepgemm-e4m3": (deepgemm, {}),
}
PEERS: dict[str, Callable[[Model], Any]] = {
    OURS: Ours,
    OURS_E4M3: partial(Ours, activations="e4m3"),
    OURS_STEPS: partial(Ours, few_rows=False),
    "triton": Triton,
    "triton-plain": partial(Triton, swizzled=False),
    "torch": Torch,
    **{name: partial(module.prepare, **how) for name, (module, how) in ADAPTERS.items()},
}
DISTRIBUTIONS = {
    "moe": ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "nvidia-cutlass-dsl-libs-cu12"),
    "triton": ("triton", "triton-kernels"),
}


def activations_of(name: str) -> str:
    """Return the dtype of the activations of a peer's products."""
    return "e4m3" if name.endswith("e4m3") else "bf16"


def versions_of(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Map each peer to the versions of its distributions that are installed."""
    wanted = {name: DISTRIBUTIONS.get(name, ()) for name in names}
    wanted |= {name: ADAPTERS[name][0].DISTRIBUTIONS for name in names if name in ADAPTERS}
    return {name: found for name, each in wanted.items() if (found := versions(each))}
