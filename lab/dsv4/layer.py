"""A layer of DeepSeek-V4 over the cache, with this repository's kernels for every step:
prepare,
score, select, attend, experts. Dense products are `_dsv4_weights`'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvcache.books.step import Step
from kvcache.layouts.layout import Layout
from kvcache.layouts.models import Options, deepseek_v4
from kvcache.memory.cache import Cache
from lab.dsv4.weights import EPS, Squeeze, Weights, angles
from mla.api import Every, Past, Selected, StepView, cached_attention, step_view
from mla.compressor import Compressor
from mla.indexer import IndexQuery, scores, select
from mla.prepare import Compression, IndexQueries, WindowKeys, prepare_attention
from mla.window import TokenWindow
from moe import PackedExperts, Scales, fused_moe, pack

# Of experts: of x each token's own, so that none depends on others; h is known to stay below 27.
FORMAT, SCALES = "nvfp4", Scales("token", torch.tensor([100.0]))
Tensors = Mapping[str, torch.Tensor]


def layout_of(kind_ratio: int, options: Options) -> Layout:
    """Layout of one layer. One of the window alone has a CSA layer beside it, since a cache has a
    paged stream; nobody writes there."""
    ratios = [kind_ratio] if kind_ratio else [0, 4]
    return deepseek_v4("deepseek-v4 layer", ratios, 128, options)


@dataclass(frozen=True, eq=False)
class Taps:
    """Intermediate results of a step's T tokens, on the CPU.

    o: output of attention, [T, H, 512].
    behind: the residual stream after attention.
    gpu_seconds: GPU time from the first launch up to `o`.
    out: output of the layer.
    h: input of the experts.
    logits: router logits.
    moe: output of the experts.
    query: index query of a CSA layer; the fields below are of such a layer, too.
    scores: [T, S].
    entries: [T, k].
    chosen: [T].
    """

    o: torch.Tensor
    behind: torch.Tensor
    gpu_seconds: float
    out: torch.Tensor
    h: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    moe: torch.Tensor | None = None
    query: IndexQuery | None = None
    scores: torch.Tensor | None = None
    entries: torch.Tensor | None = None
    chosen: torch.Tensor | None = None


class Layer:
    """Layer 0 of `cache`.

    place: backend and arch of all kernels.
    positions: number of positions in the RoPE tables."""

    def __init__(
        self, cache: Cache, weights: Weights, place: dict[str, Any], positions: int
    ) -> None:
        self.cache, self.weights, self.shape, self.place = cache, weights, weights.shape, place
        self.device = cache.device
        cos, sin = angles(self.shape.kind, torch.arange(positions))
        self.rope = cos.to(self.device), sin.to(self.device)
        self.sinks = weights.sinks.to(self.device)
        self.main, self.index = (self._compressor(s) for s in (weights.main, weights.index))
        self.experts: PackedExperts | None = None
        if self.shape.experts:
            self.experts = pack(weights.w13, weights.w2, FORMAT)
        self.stopwatch = Stopwatch(self.device)

    def _compressor(self, squeeze: Squeeze | None) -> Compressor | None:
        if squeeze is None:
            return None
        return Compressor(squeeze.ape.to(self.device), squeeze.norm.to(self.device), EPS)

    def run(self, step: Step, x: torch.Tensor) -> Taps:
        """The tokens of an open step, x [T, hidden] bf16."""
        tensors = step.tensors(self.device)
        view = step_view(self.cache.layout, tensors, longest=step.longest)
        projected = self.weights.project(x, torch.from_numpy(step.positions))
        projected = projected.to(self.device)
        self.stopwatch.start()
        query = self._prepare(step, projected, tensors, view)
        found = {} if query is None else self._select(step, query, tensors)
        kv = None if isinstance(view.window, TokenWindow) else projected.kv
        o = cached_attention(
            projected.q, kv, self.cache.rows("swa", 0), view.window, rope=self.rope,
            sinks=self.sinks,
            past=self._past(view, found), **self.place,
        )  # fmt: skip
        seconds, o = self.stopwatch.stop(), o.cpu()
        behind = self.weights.attended(x, o)
        found = {name: _to_cpu(value) for name, value in found.items()}
        if self.experts is None:
            return Taps(o, behind, seconds, behind, **found)
        h, logits = self.weights.routed(behind)
        moe = fused_moe(
            h.to(self.device), self.experts, logits.to(self.device), self.weights.router,
            activation=self.weights.activation, activations=FORMAT, scales=SCALES, **self.place,
        ).cpu()  # fmt: skip
        out = self.weights.joined(behind, h, moe)
        return Taps(o, behind, seconds, out, h, logits, moe, **found)

    def _prepare(
        self, step: Step, projected: Any, tensors: Tensors, view: StepView
    ) -> IndexQuery | None:
        """What the step's tokens write before scores and attention, in one launch; queries of the
        indexer."""
        kind, parts = self.shape.kind, {}
        if self.main:
            parts["entries"] = self._compression(self.main, kind, projected.main)
        if self.index:
            parts["index_keys"] = self._compression(self.index, "index", projected.index)
            parts["index_queries"] = IndexQueries(
                projected.index_q, projected.index_weights, self.cache.rows("index", 0).record.name
            )
        if isinstance(view.window, TokenWindow):  # a chunk's attention writes its own keys
            ring = self.cache.rows("swa", 0)
            parts["window"] = WindowKeys(ring, projected.kv, view.window.slots)
        if not parts:
            return None
        options = {"longest": step.longest, **self.place}
        return prepare_attention(tensors, self.rope, **parts, **options)

    def _compression(
        self, compressor: Compressor, stream: str, given: tuple[torch.Tensor, torch.Tensor]
    ) -> Compression:
        """A compressor with what was projected for it."""
        tail, rows = self.cache.tail(f"{stream}_tail", 0), self.cache.rows(stream, 0)
        return Compression(compressor, tail, rows, *given, stream)

    def _select(self, step: Step, query: IndexQuery, tensors: Tensors) -> dict[str, Any]:
        """The entries of every token with the highest scores."""
        keys, positions = self.cache.rows("index", 0), tensors["positions"]
        counts = ((positions + 1) // self.shape.ratio).int()
        most = int(step.entries("index").max(initial=0))
        found = torch.full((len(positions), most), torch.nan, device=self.device)
        where = tensors["owners"], counts, tensors["block_tables"]
        scores(keys, query, *where, found, longest=step.longest, **self.place)
        entries, chosen = select(
            found, counts, self.shape.select, owners=tensors["owners"],
            block_tables=tensors["block_tables"], entries=keys.rows, **self.place,
        )  # fmt: skip
        return {"query": query, "scores": found, "entries": entries, "chosen": chosen}

    def _past(self, view: StepView, found: Mapping[str, Any]) -> Past | None:
        kind = self.shape.kind
        if kind == "swa":
            return None
        rows = self.cache.rows(kind, 0)
        if kind == "csa":
            return Selected(rows, found["entries"], found["chosen"])
        return Every(rows, view.pages[kind])


class Stopwatch:
    """Seconds of what is launched between start and stop; 0 where that is no GPU."""

    def __init__(self, device: torch.device) -> None:
        gpu = torch.device(device).type == "cuda"
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if gpu else []

    def start(self) -> None:
        if self.events:
            self.events[0].record()

    def stop(self) -> float:
        """Waits for the GPU."""
        if not self.events:
            return 0.0
        self.events[1].record()
        self.events[1].synchronize()
        return self.events[0].elapsed_time(self.events[1]) / 1e3


def _to_cpu(value: Any) -> Any:
    if isinstance(value, IndexQuery):
        return IndexQuery(*(tensor.cpu() for tensor in value))
    return value.cpu()
