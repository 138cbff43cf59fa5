"""A model with a used cache, and a history without rings, pages and slots: every token's window
entry and every compressed entry of a layer, as its record rounds them.

Memory that was never written is NaN. Old tokens are written by the definition in torch, which is
fast; the judged step goes through `cached_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kernelkit.numerics.tolerance import Report, compare_output
from kvcache.books.requests import Request
from kvcache.books.slot_pool import Sizes
from kvcache.books.step import Step
from kvcache.books.work import Pool
from kvcache.layouts.latent import LATENTS, ROPE
from kvcache.layouts.layout import GUARD_BYTES
from kvcache.layouts.models import Options, deepseek_v4
from kvcache.layouts.records import Record
from kvcache.layouts.rows import Rows
from kvcache.memory.cache import Cache
from kvcache.movement import reference
from mla.api import Every, Selected, StepView, cached_attention, step_view
from mla.reference import Token, definition, rounded, seen
from mla.window import pages_of

BF16 = torch.bfloat16
NAN_BYTE = 0xFF
POSITIONS = 700
LAYERS = {"swa": 0, "csa": 4, "hca": 128, "whole": 4}  # kind -> ratio; layer i is of kind i
STREAMS = {"csa": ("csa", 0), "hca": ("hca", 0), "whole": ("csa", 1)}  # kind -> name, copy


@dataclass(frozen=True)
class Case:
    """A model's options.

    record: record of all entries.
    selected: most entries that a token of the CSA layer attends to.
    arch: architecture of all kernels.
    """

    record: str = "fp8"
    heads: int = 4
    window: int = 128
    draft: int = 0
    block_tokens: int = 128
    sinks: bool = True
    selected: int = 6
    workspace: int = 1 << 30
    kv: torch.dtype = BF16
    arch: str = "sm_100a"

    def __str__(self) -> str:
        flags = f"{'-sinks' * self.sinks}-{str(self.kv)[6:]}"
        sizes = f"h{self.heads}-w{self.window}-d{self.draft}-b{self.block_tokens}-k{self.selected}"
        return f"{self.record}-{sizes}{flags}-{self.workspace >> 20}M-{self.arch}"


@dataclass
class Past:
    """Expected entries of a request, bf16 [n, 512], by layer."""

    near: dict[str, torch.Tensor] = field(default_factory=dict)
    far: dict[str, torch.Tensor] = field(default_factory=dict)

    def cut(self, tokens: int) -> None:
        self.near = {name: entries[:tokens] for name, entries in self.near.items()}
        self.far = {name: x[: tokens // LAYERS[name]] for name, x in self.far.items()}


@dataclass(frozen=True)
class Inputs:
    """Inputs of a step in a layer: q [T, H, 512], kv [T, 512], chosen entries."""

    q: torch.Tensor
    kv: torch.Tensor
    chosen: list[list[int]]


class Model:
    """Layers of each kind, with a cache."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        options = Options(case.record, case.block_tokens, case.draft, online_hca=True)
        layout = deepseek_v4("four", list(LAYERS.values()), case.window, options)
        self.layout, self.cache = layout, Cache(layout, Sizes(24, states=6))
        for pool in (Pool.BLOCKS, Pool.STATES):
            self.cache.storage.pools[pool][1:, :-GUARD_BYTES] = NAN_BYTE
        self.generator = torch.Generator().manual_seed(seed)
        self.pasts: dict[Request, Past] = {}
        self.rope = _rope()
        self.sinks = self.random(case.heads).float() if case.sinks else None

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator)

    # -- old tokens ------------------------------------------------------------------------------

    def admit(self, name: str, tokens: int) -> Request:
        """Admit a request with `tokens` tokens, written block by block by the definition."""
        request = self.cache.admit(name, [7] * max(tokens, 1), use_cache=False).request
        self.pasts[request] = Past()
        done = 0
        while done < tokens:
            part = min(tokens - done, self.layout.block_tokens)
            with self.cache.step({request: [7] * part}) as step:
                self._write_old(step)
            done += part
        return request

    def _write_old(self, step: Step) -> None:
        for name in LAYERS:
            self._write_near(step, name)
        self.compress(step)

    def _write_near(self, step: Step, name: str) -> None:
        """Write window entries of a layer, without attention."""
        kv = self.random(len(step.positions), 512).to(self.case.kv)
        positions, slots = (torch.from_numpy(x) for x in (step.positions, step.rows_of("swa")))
        rows = self.cache.rows("swa", list(LAYERS).index(name))
        reference.append_swa(rows, kv, positions, slots, *self.rope)
        self.remember(step, name, kv)

    def compress(self, step: Step) -> None:
        """Write random entries for the windows that a step completes."""
        for kind, (name, copy) in STREAMS.items():
            slots = torch.from_numpy(step.rows_of(name))
            entries = self.random(len(slots), 512).bfloat16()
            stored = _put(self.cache.rows(name, copy), slots, entries)
            for request, mine in _by_request(step, slots >= 0):
                far = self.pasts[request].far
                far[kind] = _joined(far.get(kind), stored[mine])

    def remember(self, step: Step, name: str, kv: torch.Tensor) -> None:
        entries = as_stored(self.cache.rows("swa", 0).record, kv, step.positions, self.rope)
        for request, mine in _by_request(step, torch.ones(len(kv), dtype=torch.bool)):
            near = self.pasts[request].near
            near[name] = _joined(near.get(name), entries[mine])

    def rollback(self, request: Request, tokens: int) -> None:
        self.cache.rollback(request, tokens)
        self.pasts[request].cut(request.length)

    # -- a step ----------------------------------------------------------------------------------

    def step(
        self, batch: Mapping[Request, int], kinds: Sequence[str] = tuple(LAYERS), padding: int = 0
    ) -> dict[str, Report]:
        """Run a step through `cached_attention`, and return verdicts by kind of layer.

        Args:
            batch: new tokens by request.
            padding: number of tokens, and of requests, after those of the step.
        """
        given = {request: [7] * tokens for request, tokens in batch.items()}
        with self.cache.step(given) as step:
            self.compress(step)
            view = self.view(step, padding)
            reports = {}
            for kind in LAYERS:
                if kind not in kinds:
                    self._write_near(step, kind)
                    continue
                inputs = self.inputs(step, padding)
                o = self.attend(kind, inputs, view)
                assert o.shape == inputs.q.shape
                count = len(step.positions)
                self.remember(step, kind, inputs.kv[:count])
                assert not o[count:].any(), "padding has a result"
                reports[kind] = self.judge(kind, step, inputs, o[:count])
        return reports

    def view(self, step: Step, padding: int = 0) -> StepView:
        """Return the step's view; HCA entries have exactly as many pages as needed."""
        pages = {"hca": pages_of(step.entries("hca"))}
        arrays, every = padded(step, padding), ("hca", "csa")
        return step_view(self.layout, arrays, longest=step.longest, every=every, pages=pages)

    def inputs(self, step: Step, padding: int = 0) -> Inputs:
        tokens = len(step.positions)
        q = apart(self.random(tokens + padding, self.case.heads, 512).bfloat16())
        kv = apart(self.random(tokens + padding, 512).to(self.case.kv))
        chosen = []
        for position in step.positions.tolist():
            count = (position + 1) // LAYERS["csa"]
            order = torch.randperm(count, generator=self.generator)[: self.case.selected]
            chosen.append(sorted(order.tolist()))
        return Inputs(q, kv, chosen + [[]] * padding)

    def attend(self, kind: str, inputs: Inputs, view: StepView) -> torch.Tensor:
        return cached_attention(
            inputs.q, inputs.kv, self.cache.rows("swa", list(LAYERS).index(kind)), view.window,
            rope=self.rope, sinks=self.sinks, past=self.past(kind, inputs, view),
            workspace=self.case.workspace, arch=self.case.arch,
        )  # fmt: skip

    def past(self, kind: str, inputs: Inputs, view: StepView) -> Selected | Every | None:
        if kind == "csa":
            return self.selected(inputs)
        if kind not in STREAMS:
            return None
        name, copy = STREAMS[kind]
        return Every(self.cache.rows(name, copy), view.pages[name])

    def selected(self, inputs: Inputs) -> Selected:
        """Return the chosen entries as `select` does: numbers of entries in order, then -1."""
        size = self.layout.entries(self.layout.find("csa"))
        entries = torch.full((len(inputs.q), self.case.selected), -1)
        owners = self.owners
        for token, chosen in enumerate(inputs.chosen):
            for place, number in enumerate(chosen):
                block = owners[token].blocks[number // size]
                entries[token, place] = block * size + number % size
        counts = torch.tensor([len(chosen) for chosen in inputs.chosen], dtype=torch.int32)
        return Selected(self.cache.rows("csa", 0), entries, counts)

    @property
    def owners(self) -> list[Request]:
        """Requests of the open step's tokens."""
        step = self.cache._open
        return [step.requests[owner] for owner in step.owners.tolist()]

    # -- expected results ------------------------------------------------------------------------

    def judge(self, kind: str, step: Step, inputs: Inputs, o: torch.Tensor) -> Report:
        tokens = self.tokens(kind, step, inputs)
        exact, rough = (torch.stack([f(token) for token in tokens]) for f in (definition, rounded))
        return compare_output(o.double(), exact, rough, BF16)

    def tokens(
        self, kind: str, step: Step, inputs: Inputs, *, window: int = 0, sinks: bool = True
    ) -> list[Token]:
        """Return every token of the step with the entries that it sees. window, sinks: wrong
        values, for mutants."""
        found = []
        pairs = zip(self.owners, step.positions.tolist(), strict=True)
        for index, (request, position) in enumerate(pairs):
            past, far = self.pasts[request], None
            if kind == "csa":
                far = past.far[kind][inputs.chosen[index]]
            elif kind in STREAMS:
                far = past.far[kind][: (position + 1) // LAYERS[kind]]
            near = seen(past.near[kind], position, window or self.case.window)
            found.append(
                Token(inputs.q[index], position, near, far, self.rope,
                      sinks=self.sinks if sinks else None)
            )  # fmt: skip
        return found


def apart(x: torch.Tensor) -> torch.Tensor:
    """Copy x into a wider tensor of NaN."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 24), math.nan, dtype=x.dtype)
    wide[..., 8:-16] = x
    return wide[..., 8:-16]


def padded(step: Step, padding: int) -> dict[str, torch.Tensor]:
    """Return the step's arrays in buffers with `padding` more tokens and requests."""
    arrays = step.tensors("cpu")
    if not padding:
        return arrays
    grown = {}
    for name, array in arrays.items():
        size = [len(array) + padding, *array.shape[1:]]
        if name == "block_tables":
            size[1] += 1
        grown[name] = torch.full(size, 99, dtype=array.dtype)
    step.fill(grown)
    return grown


def as_stored(record: Record, kv: torch.Tensor, positions, rope) -> torch.Tensor:
    """Return entries as a record of window entries restores them, bf16 [n, 512]."""
    places = torch.as_tensor(positions)
    entries = reference.rotated(kv, *(table[places] for table in rope))
    if not LATENTS[record.name].group:
        return entries
    return reference.dequantised(*reference.quantised(entries, record), record)


def _put(rows: Rows, slots: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """Write entries to the rows in `slots`; return them as the record restores them."""
    kept = slots >= 0
    place = slots[kept] // rows.rows, slots[kept] % rows.rows
    if not LATENTS[rows.record.name].group:
        rows.data()[place] = entries[kept].view(torch.uint8)
        return entries
    data, scales = reference.quantised(entries, rows.record)
    rows.data()[place], rows.scales()[place] = data[kept], scales[kept]
    return reference.dequantised(data, scales, rows.record)


def _by_request(step: Step, kept: torch.Tensor):
    """Yield (request, mask of its kept tokens)."""
    owners = torch.from_numpy(step.owners)
    for index, request in enumerate(step.requests):
        yield request, kept & (owners == index)


def _joined(before: torch.Tensor | None, entries: torch.Tensor) -> torch.Tensor:
    return entries if before is None else torch.cat((before, entries))


def _rope() -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of angles whose rows are separated by NaN."""
    inverse = 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)
    angles = torch.arange(POSITIONS)[:, None] * inverse
    tables = torch.full((POSITIONS, 2, ROPE // 2 + 4), math.nan)
    tables[:, 0, : ROPE // 2], tables[:, 1, : ROPE // 2] = angles.cos(), angles.sin()
    return tables[:, 0, : ROPE // 2], tables[:, 1, : ROPE // 2]
