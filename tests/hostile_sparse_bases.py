"""Right calls of sparse attention, for hostile ones to be made of."""

from __future__ import annotations

import copy
import functools

import torch

from kvcache import Manager, Sizes
from kvcache.layouts.models import Options, deepseek_v4
from kvcache.layouts.records import INDEXER_BF16
from kvcache.layouts.rows import Rows, TailRows
from mla import (
    Compressor,
    Every,
    IndexQuery,
    Selected,
    StepView,
    Tables,
    Workspace,
    cached_attention,
    compress,
    plan_workspace,
    prepare_query,
    scores,
    select,
    step_view,
)
from tests.hostile_generator import Base, Given
from tests.hostile_values import angles, bf16, normal, positive

INT = torch.int32
LAYOUT = deepseek_v4("three", [0, 4, 128], 16, Options("bf16", draft=1, online_hca=True))
BEFORE = 13  # tokens of the request before the step
HEADS = 4


@functools.cache
def _step(tokens: int) -> dict[str, torch.Tensor]:
    """The arrays of a step of one request."""
    manager = Manager(LAYOUT, Sizes(4, 2))
    request = manager.admit("one", [7] * BEFORE).request
    manager.append({request: [7] * BEFORE})
    return manager.append({request: [7] * tokens}).tensors("cpu")


def _arrays(tokens: int) -> dict[str, torch.Tensor]:
    return {name: array.clone() for name, array in _step(tokens).items()}


@functools.cache
def _seen(tokens: int) -> StepView:
    return step_view(LAYOUT, _step(tokens), longest=tokens)


def _view(tokens: int) -> StepView:
    return copy.deepcopy(_seen(tokens))


def _pool(slots: int, size: int) -> torch.Tensor:
    """Bytes that are numbers of bfloat16."""
    return bf16(slots, size // 2).view(torch.uint8)


def _blocks(name: str) -> Rows:
    return Rows(_pool(5, LAYOUT.block_bytes), **vars(LAYOUT.place(name, 0)))


def _attending(tokens: int) -> Given:
    ring = Rows(_pool(3, LAYOUT.state_bytes), **vars(LAYOUT.place("swa", 0)))
    return {"q": bf16(tokens, HEADS, 512), "kv": bf16(tokens, 512), "ring": ring,
            "window": _view(tokens).window, "rope": angles(32, 32),
            "sinks": normal(HEADS)}  # fmt: skip


def _of_selected() -> Given:
    chosen = torch.tensor([[32, 34, -1]]), torch.tensor([2], dtype=INT)
    return _attending(1) | {"past": Selected(_blocks("csa"), *chosen)}


def _of_every() -> Given:
    return _attending(1) | {"past": Every(_blocks("hca"), _view(1).pages["hca"])}


def _viewing() -> Given:
    names = ("positions", "owners", "starts", "lengths", "cu_tokens", "state_slots",
             "block_tables", "rows_of.swa")  # fmt: skip
    arrays = {name: array for name, array in _arrays(3).items() if name in names}
    return {"layout": LAYOUT, "arrays": arrays, "longest": 3, "pages": {"hca": 1}}


def _workspace() -> Given:
    return {"layout": LAYOUT, "heads": 4, "tokens": 3, "requests": 2, "longest": 2, "selected": 8}


def _preparing() -> Given:
    cos, sin = angles(8, 32)
    return {"q": bf16(3, 2, 128), "weights": normal(3, 2), "positions": torch.arange(3),
            "cos": cos, "sin": sin, "factor": 0.5}  # fmt: skip


def _scoring() -> Given:
    pool = _pool(3, 8 * 256)
    query = IndexQuery(bf16(2, 16, 128), torch.empty(2, 16, 0, dtype=torch.uint8), positive(2, 16))
    return {"rows": Rows(pool, 0, 0, 8, INDEXER_BF16), "query": query,
            "owners": torch.tensor([0, 1], dtype=INT), "counts": torch.tensor([11, 3], dtype=INT),
            "block_tables": torch.tensor([[2, 1], [0, 0]], dtype=INT),
            "out": normal(2, 16)}  # fmt: skip


def _selecting() -> Given:
    return {"scores": normal(2, 20), "counts": torch.tensor([20, 7], dtype=INT), "k": 4,
            "owners": torch.tensor([1, 0], dtype=INT), "entries": 8,
            "block_tables": torch.tensor([[3, 1, 0], [2, 5, 4]], dtype=INT)}  # fmt: skip


def _compressing() -> Given:
    tail = LAYOUT.find("csa_tail")
    rows = tail.rows(LAYOUT.draft)
    pool = normal(3, LAYOUT.state_bytes // 4).view(torch.uint8)
    columns, (cos, sin) = tail.overlap * tail.width, angles(32, 32)
    return {"compressor": Compressor(normal(tail.ratio, columns), positive(tail.width)),
            "tail": TailRows(pool, LAYOUT.offset("csa_tail", 0), rows, tail),
            "out": _blocks("csa"), "values": normal(4, columns), "scores": normal(4, columns),
            "tables": Tables.of(_arrays(4), "csa", "csa_tail"), "cos": cos, "sin": sin,
            "longest": 4}  # fmt: skip


SPARSE_BASES = (
    Base("cached_attention", cached_attention, lambda: _attending(2), ("ring/pool",)),
    Base("cached_attention of a chunk", cached_attention, lambda: _attending(5), ("ring/pool",)),
    Base("cached_attention of selected", cached_attention, _of_selected, ("ring/pool",)),
    Base("cached_attention of every", cached_attention, _of_every, ("ring/pool",)),
    Base("step_view", step_view, _viewing),
    Base("plan_workspace", plan_workspace, _workspace),
    Base(
        "at_once", Workspace.at_once,
        lambda: {"self": plan_workspace(**_workspace()), "limit": 1 << 20, "tokens": 3},
    ),
    Base("prepare_query", prepare_query, _preparing),
    Base("scores", scores, _scoring, ("out",)),
    Base("select", select, _selecting),
    Base("compress", compress, _compressing, ("tail/pool", "out/pool")),
)  # fmt: skip
