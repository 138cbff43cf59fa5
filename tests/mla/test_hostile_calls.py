"""Invalid calls of cached attention, and of the functions that prepare it for a step: the error
names the argument, and nothing has been written. `test_refusals.py` has those of the operators
below.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvcache import Layout, Manager, Ring, Sizes, Stream
from kvcache.layouts.records import BF16_512, FP8_584, INDEXER_BF16
from kvcache.layouts.rows import Rows
from mla import (
    Every,
    Selected,
    Tables,
    cached_attention,
    plan_workspace,
    prepare_query,
    scores,
    step_view,
)
from mla.window import see_entries
from tests.support.hostile.calls import freed, hostile, refused

INT = torch.int32
LAYOUT = Layout(
    "small", 128, (Stream("csa", BF16_512, 4, 1), Stream("hca", BF16_512, 128, 1)),
    (Ring("swa", BF16_512, 128, 1),),
)  # fmt: skip


def arrays_of(tokens: int) -> dict[str, torch.Tensor]:
    """Return the arrays of a step of one request."""
    manager = Manager(LAYOUT, Sizes(4, 2))
    request = manager.admit("one", [1] * tokens).request
    return manager.append({request: [1] * tokens}).tensors("cpu")


ARRAYS, CHUNK = arrays_of(1), step_view(LAYOUT, arrays_of(5), longest=5).window
VIEW = step_view(LAYOUT, ARRAYS, longest=1)
LONG = torch.tensor([128], dtype=INT)
WINDOW, PAGES = VIEW.window, VIEW.pages["hca"]
POOL = torch.zeros(3, LAYOUT.state_bytes, dtype=torch.uint8)
RING = Rows(POOL, **vars(LAYOUT.place("swa", 0)))
BLOCKS = torch.zeros(5, LAYOUT.block_bytes, dtype=torch.uint8)
OF_FP8 = Rows(torch.zeros(5, 32 * 600, dtype=torch.uint8), 0, 32 * 576, 32, FP8_584)
HCA, CSA = (Rows(BLOCKS, **vars(LAYOUT.place(name, 0))) for name in ("hca", "csa"))
Q, KV, COS = torch.ones(1, 16, 512).bfloat16(), torch.ones(1, 512).bfloat16(), torch.ones(16, 32)
ONE, LATE, MANY_HEADS = torch.ones(1, dtype=INT), torch.tensor([16]), Q.repeat(1, 9, 1)[:, :129]
GATHERED = see_entries(ARRAYS, ratio=128, block_entries=1, in_place=False)
OF_CHUNK = see_entries(arrays_of(5), ratio=128, block_entries=1, in_place=True)
CHOSEN = Selected(CSA, torch.tensor([[0, -1]]), torch.tensor([1], dtype=INT))


def called(**options):
    given = {"q": Q, "kv": KV, "ring": RING, "window": WINDOW, "rope": (COS, COS)} | options
    return lambda: cached_attention(**given)


def chunked(past=None, arch=None, **changes):
    kv, q = KV.expand(5, 512).contiguous(), Q.expand(5, 16, 512).contiguous()
    return called(q=q, kv=kv, window=replace(CHUNK, **changes), past=past, arch=arch)


def viewed(longest=1, **changes):
    names = {"layout", "ring", "every", "pages"}
    options = {name: value for name, value in changes.items() if name in names}
    arrays = ARRAYS | {name: value for name, value in changes.items() if name not in names}
    return lambda: step_view(options.pop("layout", LAYOUT), arrays, longest=longest, **options)


def planned(**options):
    given = {"heads": 16, "tokens": 4, "requests": 2, "longest": 1} | options
    return lambda: plan_workspace(LAYOUT, **given)


CALLS = [
    hostile(called(q=None), "q is NoneType"),
    hostile(called(q=Q.to_sparse()), "q is a sparse_coo tensor"),
    hostile(called(q=Q[:, :0]), "0 heads"),
    hostile(called(kv=freed(KV)), "kv reaches to byte"),
    hostile(called(kv=KV.half()), "kv is torch.float16"),
    hostile(called(kv=[1.0]), "kv is list"),
    hostile(called(ring=replace(RING, scale_offset=1 << 40)), "at 1099511627776", name="scales"),
    hostile(called(ring=None), "ring is NoneType, expected Rows"),
    hostile(called(ring=replace(RING, record=INDEXER_BF16)), "ring of indexer_bf16"),
    hostile(called(ring=replace(RING, data_offset=1 << 40)), "1099511627776"),
    hostile(called(window=VIEW), "window is StepView, expected TokenWindow or ChunkWindow"),
    hostile(called(rope=None), "rope is NoneType"),
    hostile(called(rope=(COS, None)), "sin is NoneType"),
    hostile(called(rope=(COS, COS[:, :31])), "sin is torch.float32"),
    hostile(called(rope=(COS[:0], COS[:0])), "the tables have 0"),
    hostile(called(scale=-1.0), "scale -1.0"),
    hostile(called(scale="1"), "scale is '1'"),
    hostile(called(sinks=torch.full((16,), math.inf)), "sinks inf of head 0"),
    hostile(called(sinks=torch.zeros(15)), "sinks is torch.float32"),
    hostile(called(workspace=None), "workspace is None"),
    hostile(called(workspace=math.nan), "workspace is nan"),
    hostile(called(workspace=-1), "workspace -1: at least 0"),
    hostile(called(backend="CUDA"), "backend 'CUDA'"),
    hostile(called(arch="sm_75"), "arch 'sm_75'"),
    hostile(called(arch="sm_80", past=replace(CHOSEN, rows=OF_FP8)),
            "fp8_584 on sm_80: e4m3 needs compute capability 8.9"),
    hostile(called(past=RING), "past is Rows, expected Selected or Every"),
    hostile(called(past=Every(None, PAGES)), "past.rows is NoneType"),
    hostile(called(past=Every(HCA, None)), "past.pages is NoneType"),
    hostile(called(past=replace(CHOSEN, entries=[[0]])), "entries is list"),
    hostile(called(past=replace(CHOSEN, entries=CHOSEN.entries + 160)), "entries has num"),
    hostile(called(past=replace(CHOSEN, chosen=CHOSEN.chosen + 2)), "chosen has numbers from 3"),
    hostile(called(past=Every(HCA, replace(PAGES, counts=PAGES.counts + 999))), "counts has num"),
    hostile(called(past=Every(HCA, GATHERED)), "pages to gather: a decoding step reads blocks"),
    hostile(called(past=Every(HCA, replace(PAGES, table=PAGES.table + 5, counts=ONE))),
            "table has numbers"),
    hostile(called(window=replace(WINDOW, entries=WINDOW.entries + 999)), "entries has numbers"),
    hostile(called(window=replace(WINDOW, positions=LATE)), "positions has numbers"),
    hostile(called(q=MANY_HEADS), "129 heads: at most 128 for decoding"),
    hostile(chunked(past=Every(HCA, OF_CHUNK)), "1 rows of bf16_512 are read"),
    hostile(lambda: replace(WINDOW, lengths=WINDOW.lengths.long()), "lengths is torch.int64"),
    hostile(lambda: replace(WINDOW, slots=None), "slots is NoneType"),
    hostile(lambda: replace(WINDOW, window=999), "window 999: at most 128"),
    hostile(lambda: replace(PAGES, ratio=0), "ratio 0: at least 1"),
    hostile(called(past=replace(CHOSEN, rows=replace(OF_FP8, scale_offset=18436))),
            "scale_offset 18436 of past: a multiple of 8 bytes"),
    hostile(chunked(arch="sm_80"), "arch 'sm_80'"),
    hostile(called(q=Q.expand(5, 16, 512).contiguous(), kv=None, window=CHUNK),
            "kv is None: a chunk reads its own entries from it"),
    hostile(chunked(table=CHUNK.table + 99), "table has numbers"),
    hostile(chunked(older=CHUNK.older.clamp(min=0) + 999), "older has numbers"),
    hostile(chunked(cu_tokens=CHUNK.cu_tokens.flip(0)), r"cu_tokens \[5, 0\]"),
    hostile(chunked(longest=4), "longest 4: a request has 5 tokens"),
    hostile(viewed(layout=None), "layout is None"),
    hostile(viewed(ring="csa"), "'csa' is not a ring"),
    hostile(viewed(ring=None), "ring is None"),
    hostile(viewed(every="hca"), "every is 'hca'"),
    hostile(viewed(every=("swa",)), "'swa' is not a stream"),
    hostile(viewed(pages={"hca": 1.5}), "pages is 1.5"),
    hostile(viewed(longest=None), "longest is None"),
    hostile(viewed(owners=ARRAYS["owners"] + 1), "owners has numbers from 1"),
    hostile(viewed(block_tables=ARRAYS["block_tables"][:, :0].contiguous(), lengths=LONG),
            "lengths has numbers from 128 to 128: the block tables have room for 0 entries"),
    hostile(viewed(positions=None), "positions is NoneType"),
    hostile(viewed(block_tables=ARRAYS["block_tables"].long()), "block_tables is torch.int64"),
    hostile(lambda: step_view(LAYOUT, {}, longest=1), "no table 'rows_of.swa'"),
    hostile(planned(heads=0), "heads 0: at least 1"),
    hostile(planned(tokens=1.5), "tokens is 1.5"),
    hostile(planned(selected="2"), "selected is '2'"),
    hostile(planned(ring="hca"), "'hca' is not a ring"),
    hostile(planned(ring=1.0), "ring is 1.0"),
    hostile(planned(longest=1 << 70), "longest 1180591620717411303424: at most"),
    hostile(lambda: Tables.of({}, "csa", "tail"), r"no tables \['positions'"),
    hostile(lambda: scores(HCA, None, None, None, None, None), "query is NoneType"),
    hostile(lambda: prepare_query(Q[..., :128].contiguous(), torch.ones(1, 16),
                                  torch.zeros(1).long(), COS, COS, factor=1e39), "factor 1e.39"),
]  # fmt: skip


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("attempt", "words"), CALLS)
def test_a_named_error(attempt, words):
    refused(attempt, words)
    assert not POOL.any(), "the ring was written before the call was refused"
