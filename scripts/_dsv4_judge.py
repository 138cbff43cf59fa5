"""How a step of the layer over the cache compares with the model that computes everything anew.

Every component is held against the definition in fp64 with what the kernels had before it, so that
its limit is its own; end to end nothing is shared but the tokens.

window, entries, keys   what the step stored, against the model's numbers before their record:
                        2 E + 1 ulp (`kernelkit.tolerance`), E the error of the record itself.
                        NoPE and RoPE elements apart; `differ` counts those that are not the model's
scores                  on the stored keys and queries: (heads + 8) 2^-24 sum |w| relu(q k), what
                        fp32 sums may lose in any order; where keys are multiplied in parts, too
selected                exactly the best of these scores; `swapped`: not the model's own choice
attention               over what is stored and selected: 2 E + 1 ulp, E of the same roundings
end to end              attention against the model's own entries and selection. What the stored
                        entries differ in was within limits above; how much that may move O is
                        computed, not guessed: limit = that of attention + |O(stored) - O(model)|
experts                 by their norm: 1.02 times what their format costs (run_moe.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from _dsv4_layer import FORMAT, SCALES, Layer, Taps
from _dsv4_model import Recompute, Rows, State
from _dsv4_weights import ROPE
from kernelkit.tolerance import Report, compare_output
from kvcache import reference
from kvcache.indexer import quantised as index
from kvcache.indexer.formats import FORMATS
from kvcache.latent import LATENTS
from kvcache.requests import Request
from kvcache.rows import Rows as Place
from kvcache.step import Step
from moe import reference as moe_reference
from moe import unpack
from moe.reference_routing import route
from run_moe import EXTRA

SUM_ULP, SUM_TERMS = 2.0**-24, 8  # of fp32; roundings of a score beside those of the sum over heads


@dataclass
class Finding:
    """Of one component in a step. share: of the limit, the largest. differ: numbers that are not
    the model's, of `of`."""

    error: float = 0.0
    share: float = 0.0
    differ: int = 0
    of: int = 0

    def add(self, report: Report) -> None:
        """The worse of both."""
        self.error = max(self.error, report.error)
        share = report.error / report.limit if report.limit else float(not report.ok)
        self.share = max(self.share, share if report.ok or share > 1.0 else float("inf"))

    def count(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Numbers that differ."""
        self.differ += int((found != expected).sum())
        self.of += expected.numel()


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


class Judge:
    """Holds steps of `layer` against `model`."""

    def __init__(self, layer: Layer, model: Recompute) -> None:
        self.layer, self.model, self.shape = layer, model, layer.shape
        self.experts = unpack(layer.experts)

    def step(self, step: Step, taps: Taps, inputs: Mapping[Request, torch.Tensor]) -> Verdict:
        """inputs: all tokens of every request of the step, [tokens, hidden]."""
        verdict = Verdict()
        for number, request in enumerate(step.requests):
            first, end = step.cu_tokens[number : number + 2].tolist()
            x = inputs[request][: int(step.lengths[number])]
            state = self.model.state(x, end - first)
            stored = self._stored(step, number, state, verdict)
            for token in range(first, end):
                self._token(step, token, taps, state, stored, verdict)
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

    def _token(
        self,
        step: Step,
        token: int,
        taps: Taps,
        state: State,
        stored: dict[str, torch.Tensor],
        verdict: Verdict,
    ) -> None:
        model, position = self.model, int(step.positions[token])
        q = state.projected.q[position]
        seen = mine = torch.arange(model.visible(position))
        if self.shape.kind == "csa":
            seen, mine = self._selected(step, token, taps, state, stored, verdict)
        none = stored["window"][:0]
        chosen = stored["entries"][seen] if "entries" in stored else none
        own = state.entries.stored[mine] if "entries" in stored else none
        exact = model.attend(q, stored["window"], chosen, position)
        rounded = model.attend_rounded(q, stored["window"], chosen, position)
        report = compare_output(taps.o[token].double(), exact, rounded, torch.bfloat16)
        verdict["attention"].add(report)
        alone = model.attend(q, state.window.stored, own, position)
        limit = report.limit + (exact - alone).abs().max().item()
        error = (taps.o[token].double() - alone).abs().max().item()
        verdict["end to end"].add(Report("O", error <= limit, (), error, limit, 0.0))

    def _selected(
        self,
        step: Step,
        token: int,
        taps: Taps,
        state: State,
        stored: dict[str, torch.Tensor],
        verdict: Verdict,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(entries that were selected, those that the model selects)."""
        model, position = self.model, int(step.positions[token])
        count, weights = model.visible(position), state.projected.index_weights[position]
        mine = state.queries[position - len(state.projected.kv)]
        query, found = self._query(taps, token, weights), taps.scores[token, :count]
        verdict["keys"].count(query, mine)
        exact = model.score(query, weights, stored["keys"][:count])
        weight = model.score(query, weights.abs(), stored["keys"][:count])
        limit = (self.shape.index_heads + SUM_TERMS) * SUM_ULP * weight + 1e-30
        error = (found.double() - exact).abs()
        if count:
            worst = int((error / limit).argmax())
            values = error[worst].item(), limit[worst].item()
            ok = bool(values[0] <= values[1])
            verdict["scores"].add(Report("scores", ok, (worst,), *values, 0.0))
        best, own = (
            model.select(found.double()),
            model.select(model.score(mine, weights, state.keys.stored[:count])),
        )
        verdict["scores"].differ += len({*own.tolist()} - {*best.tolist()})
        verdict["scores"].of += len(own)
        rows = self.layer.cache.rows("csa", 0).rows
        table = torch.from_numpy(step.block_tables[int(step.owners[token])]).long()
        wanted = table[best // rows] * rows + best % rows
        right = torch.equal(taps.entries[token, : len(wanted)], wanted)
        right = right and int(taps.chosen[token]) == len(wanted)
        verdict["selected"].add(Report("selected", right, (), float(not right), 0.0, 0.0))
        return best, own

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
    finding.count(found[first:], mine.stored[first:])
