"""Calls of `mla`: cached attention of a step of one request, the indexer's queries, scores and
selection."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from kernelkit.numerics.tolerance import compare_output
from kvcache import Manager, Sizes
from kvcache.layouts.layout import Layout
from kvcache.layouts.models import Options, deepseek_v4
from kvcache.layouts.records import FP8_656
from kvcache.layouts.rows import Rows
from kvcache.movement import reference as movement
from lab.problems.attention import DTYPES
from lab.support.space import GPU, GPUS, Row, Space
from mla import Every, Selected, StepView, cached_attention, select, step_view
from mla.indexer import reference as indexer
from mla.reference import Token, definition, rounded
from mla.window import PAGE, ChunkWindow, TokenWindow

BEFORE, DRAFT, WIDTH = 13, 3, 512  # tokens before the step, and of a step that decodes
SINKS = {"none": None, "fp32 [H]": torch.float32, "bf16 [H]": torch.bfloat16}
SCALES = {"none": None, "0.1": 0.1, "1e-20": 1e-20}


@dataclass(frozen=True)
class Given:
    """Arguments of `cached_attention`."""

    q: torch.Tensor
    kv: torch.Tensor
    ring: Rows
    view: StepView
    past: Selected | Every | None
    options: dict[str, Any]

    def call(self, arch: str) -> torch.Tensor:
        """Make the call."""
        place = {"arch": arch, "past": self.past, **self.options}
        return cached_attention(self.q, self.kv, self.ring, self.view.window, **place)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@lru_cache
def _layout(record: str) -> Layout:
    options = Options(record, draft=DRAFT, online_hca=True)
    return deepseek_v4("three", [0, 4, 128], 16, options)


@lru_cache
def _view(record: str, tokens: int) -> StepView:
    """What the tokens of a step see."""
    layout = _layout(record)
    manager = Manager(layout, Sizes(4, 2))
    request = manager.admit("one", [7] * BEFORE).request
    manager.append({request: [7] * BEFORE})
    arrays = manager.append({request: [7] * tokens}).tensors("cpu")
    return step_view(layout, arrays, longest=tokens)


@lru_cache
def _filled(record: str, name: str) -> Rows:
    """Rows of a ring or a stream whose entries are random numbers."""
    layout = _layout(record)
    size = layout.state_bytes if name == "swa" else layout.block_bytes
    rows = Rows(torch.zeros(5, size, dtype=torch.uint8), **vars(layout.place(name, 0)))
    numbers = _normal(rows.entries, WIDTH).bfloat16()
    if record == "bf16":
        rows.data().copy_(numbers.view(torch.uint8).view(rows.data().shape))
        return rows
    data, scales = movement.quantised(numbers, rows.record)
    rows.data().copy_(data.view(rows.data().shape))
    rows.scales().copy_(scales.view(rows.scales().shape))
    return rows


def given_of(row: Row) -> Given:
    """Return the arguments of a row."""
    tokens, heads, record = int(row["tokens"]), int(row["heads"]), row["record"]
    ring = _filled("bf16" if record == "fp8_656" else record, "swa")
    ring = replace(ring, pool=ring.pool.clone())
    if record == "fp8_656":
        ring, record = replace(ring, record=FP8_656), "bf16"
    view = copy.deepcopy(_view(record, tokens))
    past: Selected | Every | None = None
    if row["past"] == "Selected":
        entries = torch.tensor([[32, 34, -1]]).repeat(tokens, 1)
        past = Selected(_filled(record, "csa"), entries, torch.full((tokens,), 2).int())
    elif row["past"] == "Every":
        past = Every(_filled(record, "hca"), view.pages["hca"])
    sinks = SINKS[row["sinks"]]
    angles = torch.arange(32.0)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    options = {
        "rope": (angles.cos(), angles.sin()),
        "sinks": None if sinks is None else _normal(heads).to(sinks),
        "scale": SCALES[row["scale"]],
    }
    q = _normal(tokens, heads, WIDTH).to(DTYPES[row["q"]])
    return Given(q, _normal(tokens, WIDTH).to(DTYPES[row["kv"]]), ring, view, past, options)


def _read(rows: Rows, entries: torch.Tensor) -> torch.Tensor:
    """bf16 [n, 512] of entries, as their record gives them back."""
    out = torch.zeros(len(entries), WIDTH, dtype=torch.bfloat16)
    movement.gather(rows, entries, out)
    return out


def _near(given: Given, ring: Rows, token: int) -> torch.Tensor:
    """The entries of the window that a token sees. ring: before the call."""
    window, (cos, sin) = given.view.window, given.options["rope"]
    ring = replace(ring, pool=ring.pool.clone())
    old = replace(ring, pool=ring.pool.clone())
    movement.append_swa(ring, given.kv, window.positions, window.slots, cos, sin)
    if isinstance(window, TokenWindow):
        return _read(ring, window.entries[token, : window.lengths[token]])
    return _near_of_chunk(window, old, ring, token)


def _near_of_chunk(window: ChunkWindow, old: Rows, ring: Rows, token: int) -> torch.Tensor:
    """The same of a chunk of one request, whose own tokens are all in the ring, too."""
    last = int(window.positions[token])
    seen = torch.arange(max(0, last - window.window + 1), last + 1)
    keys = torch.zeros(len(window.own) * PAGE, WIDTH, dtype=torch.bfloat16)
    is_there = window.older[0] >= 0
    keys[window.older_rows[0][is_there]] = _read(old, window.older[0][is_there])
    own = window.own.flatten()
    keys[own >= 0] = _read(ring, window.slots[own[own >= 0]])
    return keys[window.table[0, seen // PAGE].long() * PAGE + seen % PAGE]


def _far(given: Given, token: int) -> torch.Tensor | None:
    """The compressed entries that a token sees."""
    past = given.past
    if past is None:
        return None
    if isinstance(past, Selected):
        return _read(past.rows, past.entries[token, : past.chosen[token]])
    seen = torch.arange(int(past.pages.counts[token]))
    size = past.rows.rows if past.pages.entries is None else PAGE
    pages = past.pages.table[token, seen // size].long()
    if past.pages.entries is None:
        return _read(past.rows, pages * size + seen % size)
    return _read(past.rows, past.pages.entries[pages, seen % size])


def _wrong(row: Row) -> list[str]:
    given, before = given_of(row), given_of(row).ring
    o = given.call(row[GPU])
    options = {name: given.options[name] for name in ("rope", "sinks", "scale")}
    positions = given.view.window.positions.tolist()
    tokens = [
        Token(q, positions[token], _near(given, before, token), _far(given, token), **options)
        for token, q in enumerate(given.q)
    ]
    exact, like = (torch.stack([make(token) for token in tokens]) for make in (definition, rounded))
    report = compare_output(o, exact, like, o.dtype)
    return [] if report.ok else [str(report)]


CACHED = Space(
    "mla.cached_attention",
    "record is that of window and past: bf16_512, fp8_584 or fp8_656. One request has 13 "
    "tokens before a step. Up to 3 new tokens are decoded, 5 are a chunk.",
    {
        GPU: GPUS,
        "record": ("bf16", "fp8", "fp8_656"),
        "past": ("none", "Selected", "Every"),
        "tokens": ("1", "3", "5"),
        "heads": ("4", "1", "16"),
        "q": ("bf16", "fp16"),
        "kv": ("bf16", "fp32", "fp16"),
        "sinks": tuple(SINKS),
        "scale": tuple(SCALES),
    },
    (GPU, "record", "past"),
    (GPU, "record"),
    lambda row: given_of(row).call(row[GPU]),
    _wrong,
)


def _selecting(row: Row) -> dict[str, Any]:
    """Arguments of `select`."""
    candidates = int(row["candidates"])
    given: dict[str, Any] = {
        "scores": _normal(2, candidates).to(DTYPES[row["scores"]]),
        "counts": torch.tensor([candidates, 7], dtype=torch.int32),
        "k": int(row["k"]),
    }
    if "owners" in row["tables"]:
        given["owners"] = torch.tensor([1, 0], dtype=torch.int32)
    if "block_tables" in row["tables"]:
        blocks = torch.arange(2 * -(-candidates // 8), dtype=torch.int32)
        given |= {"block_tables": blocks.view(2, -1), "entries": 8}
    return given


def _wrong_selecting(row: Row) -> list[str]:
    given = _selecting(row)
    found = select(**given, arch=row[GPU])
    paged = given.get("owners"), given.get("block_tables"), given.get("entries")
    tables = None if paged[0] is None else paged
    wanted = indexer.select(given["scores"], given["counts"], given["k"], tables)
    return [] if all(map(torch.equal, found, wanted)) else ["other entries"]


SELECT = Space(
    "mla.select",
    "scores is their dtype, for two tokens.",
    {
        GPU: GPUS,
        "scores": ("fp32", "bf16", "fp16"),
        "k": ("4", "1", "2048", "0", "2049"),
        "candidates": ("20", "4000"),
        "tables": ("none", "owners + block_tables", "owners", "block_tables"),
    },
    (GPU, "scores", "k"),
    (GPU,),
    lambda row: select(**_selecting(row), arch=row[GPU]),
    _wrong_selecting,
)
SPACES = (CACHED, SELECT)
