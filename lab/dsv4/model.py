"""Reference layer of DeepSeek-V4 in plain torch. It keeps all of a request's tokens and
recomputes everything in every step.

All of it is fp64 but for what the model itself rounds: entries and the indexer's queries in the
format of their records, as DeepSeek's inference code simulates them (act_quant, fp4_act_quant).
`_dsv4_shape.Definition` says what a layer is; a wrong one has to be noticed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvcache.layouts.latent import LATENTS
from kvcache.layouts.records import Record
from kvcache.movement import reference
from lab.dsv4.weights import Projected, Squeeze, Weights, angles, rms_norm, rotate
from lab.flags.dsv4 import Definition
from mla import reference as sparse
from mla.indexer import quantised as index


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows in two precisions.

    exact: fp64, before conversion to a record's format.
    stored: fp64, as a reader of the record sees them."""

    exact: torch.Tensor
    stored: torch.Tensor


@dataclass(frozen=True, eq=False)
class State:
    """State of a request so far.

    entries: entries of a CSA or HCA layer.
    keys, queries: those of the indexer; queries as stored [n, HI, 128], of the last n tokens."""

    projected: Projected
    window: Rows
    entries: Rows | None = None
    keys: Rows | None = None
    queries: torch.Tensor | None = None


class Recompute:
    """records: of the window, the entries and the indexer's keys."""

    def __init__(
        self, weights: Weights, records: dict[str, Record], definition: Definition
    ) -> None:
        self.weights, self.shape, self.records = weights, weights.shape, records
        self.definition = definition

    def state(self, x: torch.Tensor, new: int) -> State:
        """State of all tokens x [T, hidden], of which the last `new` ask."""
        positions = torch.arange(len(x))
        projected, shape = self.weights.project(x, positions), self.shape
        cos, sin = angles(shape.kind, positions)
        window = self._latents(rotate(projected.kv, cos, sin))
        if not shape.ratio:
            return State(projected, window)
        made = self._pooled(self.weights.main, projected.main)
        entries = self._latents(rotate(made, *self._entry_angles(len(made))))
        if self.weights.index is None:
            return State(projected, window, entries)
        made = self._pooled(self.weights.index, projected.index)
        keys = index.hadamard(rotate(made, *self._entry_angles(len(made))))
        last = index.hadamard(rotate(projected.index_q[-new:], cos[-new:], sin[-new:]))
        queries = self._index_rows(last.flatten(0, 1)).stored.view(last.shape)
        return State(projected, window, entries, self._index_rows(keys), queries)

    def _entry_angles(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.arange(count) * self.shape.ratio + self.definition.rope_shift
        return angles(self.shape.kind, first)

    def _pooled(self, squeeze: Squeeze, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Complete windows [n, d]: a softmax per channel over the rows of one window or two."""
        ratio, overlap = self.shape.ratio, self.shape.overlap
        count, width = len(given[0]) // ratio, len(squeeze.norm)
        values, scores = (x[: count * ratio].double().unflatten(0, (count, ratio)) for x in given)
        phases = (torch.arange(ratio) + self.definition.phase) % ratio
        scores = scores + squeeze.ape.double()[phases]
        if overlap == 2:
            values, scores = (
                torch.cat((_behind(x[..., :width], before), x[..., width:]), 1)
                for x, before in ((values, 0.0), (scores, -math.inf))
            )
        return rms_norm((values * scores.softmax(1)).sum(1), squeeze.norm)

    def _latents(self, rows: torch.Tensor) -> Rows:
        record = self.records["window"]
        stored = rows.bfloat16()
        if LATENTS[record.name].group:
            stored = reference.dequantised(*reference.quantised(stored, record), record)
        return Rows(rows, stored.double())

    def _index_rows(self, rows: torch.Tensor) -> Rows:
        record = self.records["keys"]
        stored = index.dequantised(*index.quantised(rows.bfloat16(), record), record)
        return Rows(rows, stored.double())

    # -- of one token ------------------------------------------------------------------------

    def visible(self, position: int) -> int:
        """Entries that the token at `position` may see: the window that it completes is one."""
        return (position + 1) // self.shape.ratio if self.shape.ratio else 0

    def select(self, scores: torch.Tensor) -> torch.Tensor:
        """The largest of scores [n], of equal ones the first, in ascending order."""
        order = scores.argsort(descending=True, stable=True)
        return order[: self.shape.select].sort().values

    def token(
        self, q: torch.Tensor, window: torch.Tensor, chosen: torch.Tensor, position: int
    ) -> sparse.Token:
        """A query q [H, 512] with what it attends to: of window [n, 512], all entries up to
        `position`, the last ones; of compressed entries those of chosen [k, 512]."""
        near = sparse.seen(window, position, self.definition.window)
        return sparse.Token(
            q, position, near, chosen if len(chosen) else None,
            rope=angles(self.shape.kind, torch.arange(position + 1)),
            sinks=self.weights.sinks if self.definition.sinks else None,
        )  # fmt: skip

    @staticmethod
    def score(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """fp64 [n] of one token's q [HI, 128] and weights [HI] with keys [n, 128]."""
        return weights.double() @ (q.double() @ keys.double().T).clamp(min=0)


def _behind(x: torch.Tensor, first: float) -> torch.Tensor:
    """x [n, m, d] one window later; what is before the first one is `first`."""
    return torch.cat((torch.full_like(x[:1], first), x[:-1]))
