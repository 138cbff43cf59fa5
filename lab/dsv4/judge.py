"""Comparison of a step of the layer over the cache with the model that recomputes everything.

Every component is held against the definition in fp64 with what the kernels had before it, so that
its limit is its own; end to end nothing is shared but the tokens.

window, entries, keys   what the step stored, against the model's numbers before their record:
                        2 E + 1 ulp (`kernelkit.numerics.tolerance`), E the error of the record
                        itself. NoPE and RoPE elements apart. `differ` counts those that are not the
                        model's: an error of 16 fp32 ulps takes one of 2^11 bf16 roundings to the
                        other side; twice as many may, and a few
scores                  on the stored keys and queries: (heads + 8) 2^-24 sum |w| relu(q k), what
                        fp32 sums may lose in any order; where keys are multiplied in parts, too
selected                exactly the best of these scores; `swapped`: not the model's own choice
attention               over what is stored and selected: 2 E + 1 ulp, E of the same roundings
end to end              attention against the model's own entries and selection. What the stored
                        entries differ in was within limits above; how much that may move O is
                        computed, not guessed: limit = that of attention + |O(stored) - O(model)|
experts                 by their norm: 1.02 times what their format costs (run.py moe)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kernelkit.numerics.tolerance import Report, compare_output
from kvcache.books.requests import Request
from kvcache.books.step import Step
from kvcache.layouts.latent import LATENTS
from kvcache.layouts.rows import Rows as Place
from kvcache.movement import reference
from lab.dsv4.layer import FORMAT, SCALES, Layer, Taps
from lab.dsv4.model import Recompute, Rows, State
from lab.flags.dsv4 import ROPE
from lab.measure.accuracy import EXTRA
from mla import reference as sparse
from mla.indexer import quantised as index
from mla.indexer.formats import FORMATS
from moe import reference as moe_reference
from moe import unpack
from moe.reference_routing import route

RATE, SOME = 2.0**-10, 8  # numbers that may be rounded otherwise: of all, and always
# Of fp32; roundings of a score beside those of the sum over heads.
SUM_ULP, SUM_TERMS, TINY = 2.0**-24, 8, 1e-30


@dataclass
class Finding:
    """Figures of one component in a step.

    share: largest error as a share of the limit.
    differ: how many of `of` numbers differ from the model's."""

    error: float = 0.0
    share: float = 0.0
    differ: int = 0
    of: int = 0

    def add(self, report: Report) -> None:
        """The worse of both."""
        self.error = max(self.error, report.error)
        share = report.error / report.limit if report.limit else float(not report.ok)
        self.share = max(self.share, share if report.ok or share > 1.0 else float("inf"))

    def count(self, found: torch.Tensor, expected: torch.Tensor, *, stored: bool = False) -> None:
        """Numbers that differ; of those that are stored only few may."""
        self.differ += int((found != expected).sum())
        self.of += expected.numel()
        if stored:
            self.share = max(self.share, self.differ / (SOME + self.of * RATE))


@dataclass
class Verdict:
    """Findings by component, of a step."""

    findings: dict[str, Finding] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Finding:
        return self.findings.setdefault(name, Finding())

    @property
    def ok(self) -> bool:
        """Everything within its limit."""
        return all(finding.share <= 1.0 for finding in self.findings.values())


@dataclass(frozen=True)
class Seen:
    """A request in a step. stored: its entries as the cache has them, by component."""

    step: Step
    taps: Taps
    state: State
    stored: Mapping[str, torch.Tensor]
    verdict: Verdict


class Judge:
    """Holds steps of `layer` against `model`."""

    def __init__(self, layer: Layer, model: Recompute) -> None:
        self.layer, self.model, self.shape = layer, model, layer.shape
        self.experts = None if layer.experts is None else unpack(layer.experts)

    def step(self, step: Step, taps: Taps, inputs: Mapping[Request, torch.Tensor]) -> Verdict:
        """inputs: all tokens of every request of the step, [tokens, hidden]."""
        verdict = Verdict()
        for number, request in enumerate(step.requests):
            first, end = step.cu_tokens[number : number + 2].tolist()
            x = inputs[request][: int(step.lengths[number])]
            state = self.model.state(x, end - first)
            stored = self._stored(step, number, state, verdict)
            seen = Seen(step, taps, state, stored, verdict)
            for token in range(first, end):
                self._token(seen, token)
        if self.experts is not None:
            self._experts(taps, verdict)
        return verdict

    # -- what is stored ----------------------------------------------------------------------

    def _stored(self, step: Step, number: int, state: State, verdict: Verdict) -> dict[str, Any]:
        """Entries as the cache has them, all of a request; the model's where it has them no more
        (a ring, behind a long chunk)."""
        cache, found = self.layer.cache, {}
        start, length = int(step.starts[number]), int(step.lengths[number])
        ring = cache.rows("swa", 0)
        kept = np.arange(max(0, length - ring.rows), length)
        rows = int(step.state_slots[number]) * ring.rows + kept % ring.rows
        window = state.window.stored.clone()
        window[kept] = read(ring, rows)
        found["window"] = window
        _compare(
            verdict["window"], window, state.window, max(start, int(kept[0]) if len(kept) else 0)
        )
        for name, stream, mine in (("entries", self.shape.kind, state.entries),
                                   ("keys", "index", state.keys)):  # fmt: skip
            if mine is None:
                continue
            place = cache.rows(stream, 0)
            numbers = np.arange(length // self.shape.ratio)
            blocks = step.block_tables[number].astype(np.int64)[numbers // place.rows]
            found[name] = read(place, blocks * place.rows + numbers % place.rows)
            _compare(verdict[name], found[name], mine, start // self.shape.ratio)
        return found

    # -- what is computed --------------------------------------------------------------------

    def _token(self, seen: Seen, token: int) -> None:
        model, state, stored, verdict = self.model, seen.state, seen.stored, seen.verdict
        position = int(seen.step.positions[token])
        q, o = state.projected.q[position], seen.taps.o[token].double()
        chosen = mine = torch.arange(model.visible(position))
        if self.shape.kind == "csa":
            chosen, mine = self._selected(seen, token)
        past = own = stored["window"][:0]
        if state.entries:
            past, own = stored["entries"][chosen], state.entries.stored[mine]
        attended = model.token(q, stored["window"], past, position)
        exact = sparse.definition(attended)
        report = compare_output(o, exact, sparse.rounded(attended).double(), torch.bfloat16)
        verdict["attention"].add(report)
        alone = sparse.definition(model.token(q, state.window.stored, own, position))
        limit = report.limit + (exact - alone).abs().max().item()
        error = (o - alone).abs().max().item()
        verdict["end to end"].add(Report("O", error <= limit, (), error, limit, 0.0))

    def _selected(self, seen: Seen, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(entries that were selected, those that the model selects)."""
        model, state, taps, verdict = self.model, seen.state, seen.taps, seen.verdict
        position = int(seen.step.positions[token])
        count, weights = model.visible(position), state.projected.index_weights[position]
        mine = state.queries[position - len(state.projected.kv)]
        query, found = self._query(taps, token, weights), taps.scores[token, :count]
        verdict["keys"].count(query, mine, stored=True)
        keys = seen.stored["keys"][:count]
        verdict["scores"].add(self._scored(found, query, weights, keys))
        best = model.select(found.double())
        own = model.select(model.score(mine, weights, state.keys.stored[:count]))
        verdict["scores"].differ += len({*own.tolist()} - {*best.tolist()})
        verdict["scores"].of += len(own)
        rows = self.layer.cache.rows("csa", 0).rows
        table = torch.from_numpy(seen.step.block_tables[int(seen.step.owners[token])]).long()
        wanted = table[best // rows] * rows + best % rows
        right = torch.equal(taps.entries[token, : len(wanted)], wanted)
        right = right and int(taps.chosen[token]) == len(wanted)
        verdict["selected"].add(Report("selected", right, (), float(not right), 0.0, 0.0))
        return best, own

    def _scored(
        self, found: torch.Tensor, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor
    ) -> Report:
        """The worst of a token's scores, by its own limit."""
        if not len(keys):
            return Report("scores", True, (), 0.0, 0.0, 0.0)
        error = (found.double() - self.model.score(q, weights, keys)).abs()
        limit = self.model.score(q, weights.abs(), keys) * SUM_ULP
        limit = limit * (self.shape.index_heads + SUM_TERMS) + TINY
        worst = int((error / limit).argmax())
        values = error[worst].item(), limit[worst].item()
        return Report("scores", values[0] <= values[1], (worst,), *values, 0.0)

    def _query(self, taps: Taps, token: int, weights: torch.Tensor) -> torch.Tensor:
        """fp64 [HI, 128] as the kernel quantised it."""
        record = self.model.records["keys"]
        data, scales, scaled = (tensor[token] for tensor in taps.query)
        if FORMATS[record.name].element == "e4m3":  # its scales are in the weights
            return data.view(torch.float8_e4m3fn).double() * (scaled / weights)[:, None].double()
        return index.dequantised(data.view(torch.uint8), scales, record).double()

    def _experts(self, taps: Taps, verdict: Verdict) -> None:
        router, form = self.layer.weights.router, vars(self.layer.weights.activation)
        routed = route(taps.logits, **vars(router))
        exact = moe_reference.layer(taps.h, *self.experts, routed, **form)
        form = {**form, "fmt": FORMAT, "x_scale": SCALES.x, "h_scale": SCALES.h}
        rounded = moe_reference.layer(taps.h, *self.experts, routed, **form)
        error, own = ((x.double() - exact).norm().item() for x in (taps.moe, rounded))
        limit = EXTRA * own
        verdict["experts"].add(Report("experts", error <= limit, (), error, limit, own))
        verdict["experts"].count(taps.moe, rounded)


def read(place: Place, entries: np.ndarray) -> torch.Tensor:
    """fp64 [n, elements] of entries as their readers see them."""
    numbers = torch.from_numpy(np.asarray(entries, np.int64))
    where = numbers // place.rows, numbers % place.rows
    data, scales = (view.cpu()[where] for view in (place.data(), place.scales()))
    record = place.record
    if record.name in FORMATS:
        return index.dequantised(data, scales, record).double()
    if not LATENTS[record.name].group:
        return data.contiguous().view(torch.bfloat16).double()
    return reference.dequantised(data, scales, record).double()


def _compare(finding: Finding, found: torch.Tensor, mine: Rows, first: int) -> None:
    """Entries from `first` on, NoPE and RoPE elements each with their own error of the record."""
    for columns in (slice(0, -ROPE), slice(-ROPE, None)):
        parts = (x[first:, columns] for x in (found, mine.exact, mine.stored))
        finding.add(compare_output(*parts, torch.bfloat16))
    finding.count(found[first:], mine.stored[first:], stored=True)
