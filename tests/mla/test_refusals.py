"""Arguments that the operators refuse before anything compiles, naming value and limit; outputs
that their schemas declare; views of tracers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kvcache.layouts.records import FP8_528, FP8_584, INDEXER_FP4
from mla import compress, prepare_query, scores, select
from mla.compressor.launch import COMPRESS
from mla.indexer.scores_launch import SCORES
from tests.mla.compressor_cases import Setup, poisoned_job
from tests.mla.index_cases import Query
from tests.mla.scores_cases import Scored
from tests.mla.select_cases import Case

pytestmark = pytest.mark.usefixtures("nothing_runs")

SCORED = Scored(tokens=((0, 40), (1, 3)))


def queries() -> dict:
    names = ("q", "weights", "positions", "cos", "sin")
    return dict(zip(names, Query("indexer_fp4").build(), strict=True))


def scored(case: Scored = SCORED) -> dict:
    rows, query, tables, out = case.build()
    named = zip(("owners", "counts", "block_tables"), tables, strict=True)
    return {"rows": rows, "query": query, **dict(named), "out": out}


def selected() -> dict:
    case = Case(16, (40, 30, 20))
    named = zip(("owners", "block_tables", "entries"), case.paging(), strict=True)
    counts = torch.tensor(case.counts).int()
    return {"scores": case.scores(), "counts": counts, "k": case.k, **dict(named)}


@cache
def compressed() -> dict:
    return vars(poisoned_job(Setup("csa", record="fp8")))


@pytest.fixture(scope="module", autouse=True)
def cache_is_there() -> None:
    """Make a cache, which launches its own kernels, before launches are forbidden."""
    compressed()


OPERATORS = {  # with the makers of valid arguments
    prepare_query: queries, scores: scored, select: selected, compress: compressed,
}  # fmt: skip


# -- changes of an argument: values, or functions of the old value --------------------------------


def having(**changes):
    """Change fields of a dataclass."""

    def change(old):
        found = {n: c(getattr(old, n)) if callable(c) else c for n, c in changes.items()}
        return replace(old, **found)

    return change


def part(index, change):
    """Change one part of a tuple."""
    return lambda old: (*old[:index], change(old[index]), *old[index + 1 :])


def shifted(x):
    """Return the same numbers at odd addresses."""
    wide = torch.zeros((*x.shape[:-1], x.shape[-1] + 32), dtype=x.dtype)[..., 1:]
    return wide[..., : x.shape[-1]]


def table(**changes):
    return {"tables": having(**changes)}


def query(index, change):
    """Change one of data, scales and weights."""
    return {"query": part(index, change)}


def other_tail(**changes):
    """Change the tail, with an ape, a weight and rows of the step that fit it."""
    tail = replace(compressed()["tail"].tail, **changes)
    columns = tail.overlap * tail.width
    values = torch.zeros(len(compressed()["values"]), columns)
    weights = {"ape": torch.zeros(tail.ratio, columns), "weight": torch.zeros(tail.width)}
    return {
        "tail": having(tail=tail, rows=tail.ratio * tail.overlap), "values": values,
        "scores": values, "compressor": having(**weights),
    }  # fmt: skip


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def int32(*values):
    return torch.tensor(values).int()


REFUSED = {
    prepare_query: [
        ({"q": bf16(3, 5, 64)}, ValueError, r"\(3, 5, 64\)"),
        ({"q": torch.zeros(3, 5, 128).half()}, ValueError, "float16"),
        ({"q": bf16(3, 5, 132)[..., 2:130]}, ValueError, "multiple of 16"),
        ({"q": torch.zeros(1, 1, 128).expand(3, 5, 128)}, ValueError, "stride"),
        ({"q": lambda q: q.clone().requires_grad_()}, NotImplementedError, "grad"),
        ({"weights": torch.zeros(3, 4)}, ValueError, r"\(3, 4\)"),
        ({"weights": torch.zeros(3, 5).double()}, ValueError, "float64"),
        ({"weights": [1.0]}, TypeError, "weights"),
        ({"positions": torch.tensor([0, 1, 37])}, ValueError, "0 to 36"),
        ({"positions": torch.tensor([0, -1, 3])}, ValueError, "-1 to 3"),
        ({"positions": int32(0, 0, 0)}, ValueError, "int32"),
        (dict.fromkeys(("cos", "sin"), torch.zeros(0, 32)), ValueError, "every position"),
        ({"sin": torch.zeros(36, 32)}, ValueError, "sin"),
        ({"cos": torch.zeros(37, 34)[:, :32]}, ValueError, "multiple of 16"),
        ({"record": "fp8_584"}, NotImplementedError, "fp8_584"),
        ({"arch": "sm_80"}, NotImplementedError, "sm_80"),
        ({"backend": "cuda"}, ValueError, "cuda"),
    ],
    scores: [
        ({"rows": having(record=FP8_584)}, NotImplementedError,
         "record fp8_584: index keys are in"),
        ({"rows": having(rows=12)}, NotImplementedError, "pages of 12 rows: a multiple of 8"),
        ({"rows": having(data_offset=8)}, ValueError, "data of indexer_fp4 at 8"),
        ({"rows": having(scale_offset=2082)}, ValueError, "scales at offset 2082 of a slot"),
        (query(0, lambda q: q[:, :24]), NotImplementedError, "24 heads: one of"),
        (query(0, lambda q: q.float()), ValueError, "q is torch.float32"),
        (query(0, lambda q: q[..., :32]), ValueError, r"\[T, H, 64\]"),
        (query(0, lambda q: q[0]), ValueError, "q has shape"),
        (query(0, shifted), ValueError, "q starts at address"),
        (query(0, lambda q: q[:, :1].expand(-1, 64, -1)), ValueError, "stride"),
        (query(1, lambda s: s[..., :2]), ValueError, "q_scales is"),
        (query(1, shifted), ValueError, "q_scales at address"),
        (query(2, lambda w: w.bfloat16()), ValueError, "weights is torch.bfloat16"),
        (query(2, lambda w: w[:, :1].expand(-1, 64)), ValueError, "last stride"),
        (query(2, lambda w: w.requires_grad_()), NotImplementedError, "weights requires grad"),
        ({"owners": torch.zeros(2).long()}, ValueError, "owners is torch.int64"),
        ({"owners": lambda x: x + 2}, ValueError, "owners has numbers from 2 to 3: there are 3"),
        ({"counts": lambda x: x[:1]}, ValueError, "counts is"),
        ({"counts": lambda x: x + 1}, ValueError, "out has 40 columns, 2 blocks have 64 keys"),
        ({"counts": lambda x: x - 50}, ValueError, "counts has numbers from -47"),
        ({"block_tables": lambda x: x - 100}, ValueError, "the pool has slots 0 to"),
        ({"block_tables": lambda x: x[0]}, ValueError, "block_tables is"),
        ({"block_tables": lambda x: x[:, :1]}, ValueError, "1 blocks have 32 keys"),
        ({"out": lambda x: x.double()}, ValueError, "out is torch.float64"),
        ({"out": lambda x: x[:1]}, ValueError, "out is"),
        ({"out": lambda x: x[:1].expand(2, -1)}, ValueError, "out .* share memory"),
        ({"longest": -1}, ValueError, "longest -1"),
        ({"kernel": "fast"}, ValueError, "kernel 'fast': one of"),
        ({"kernel": "tcgen05", "arch": "sm_90a"}, NotImplementedError, "on sm_90a"),
        ({"arch": "sm_80"}, NotImplementedError, "arch 'sm_80'"),
        ({"backend": "cuda"}, ValueError, "backend 'cuda' needs CUDA"),
    ],
    select: [
        ({"k": 0}, ValueError, "k 0: from 1 to 2048"),
        ({"k": 2049}, ValueError, "k 2049: from 1 to 2048"),
        ({"scores": torch.zeros(3, 40).half()}, ValueError, "float16"),
        ({"scores": torch.zeros(120)}, ValueError, "rank 1"),
        ({"scores": torch.zeros(1, 40).expand(3, 40)}, ValueError, "strides"),
        ({"scores": torch.zeros(40, 3).T}, ValueError, "strides"),
        ({"scores": torch.zeros(3, 40, requires_grad=True)}, NotImplementedError, "grad"),
        ({"counts": int32(40, 41, 0)}, ValueError, "0 to 40"),
        ({"counts": int32(40, -1, 0)}, ValueError, "-1 to 40"),
        ({"counts": int32(40, 1)}, ValueError, r"\(2,\)"),
        ({"counts": torch.tensor([40, 1, 3])}, ValueError, "int64"),
        ({"owners": int32(0, 3, 0)}, ValueError, "0 to 2"),
        ({"owners": None}, ValueError, "give both or neither"),
        ({"block_tables": torch.zeros(3, 1).int()}, ValueError, "have 32"),
        ({"block_tables": torch.zeros(3, 0).int()}, ValueError, "at least one block"),
        ({"entries": 0}, ValueError, "entries 0"),
        ({"arch": "sm_80"}, NotImplementedError, "sm_80"),
        ({"backend": "cuda"}, ValueError, "cuda"),
    ],
    compress: [
        ({"values": lambda x: x.bfloat16()}, ValueError, "values is torch.bfloat16"),
        ({"values": lambda x: x[:, ::2]}, ValueError, "values"),
        ({"values": lambda x: x.clone().requires_grad_()}, NotImplementedError,
         "values requires grad"),
        ({"scores": lambda x: x[:-1]}, ValueError, "scores is .* expected torch.float32"),
        ({"out": having(record=FP8_528)}, NotImplementedError, "fp8_528"),
        ({"out": having(record=INDEXER_FP4)}, NotImplementedError,
         "width 512: entries of indexer_fp4 have 128 elements"),
        ({"tail": having(offset=8)}, ValueError, "at 8"),
        ({"tail": having(rows=7)}, ValueError, "7 rows: .* at least 8"),
        ({"longest": 3}, ValueError, "longest 3: a request has 11 tokens"),
        ({"cos": lambda x: x[:1]}, ValueError, "sin is"),
        (dict.fromkeys(("cos", "sin"), lambda x: x[:4]), ValueError, "angles have 0 to 3"),
        (table(ends=lambda x: x + 99), ValueError, "ends has numbers"),
        (table(owners=lambda x: x.long()), ValueError, "owners is torch.int64"),
        (table(tail_rows=lambda x: x + 9999), ValueError, "tail_rows has numbers"),
        ({"compressor": having(eps=-1.0)}, ValueError, "eps -1"),
        ({"compressor": having(ape=lambda x: x[:3])}, ValueError, "ape is"),
        (lambda: other_tail(ratio=9, overlap=1), NotImplementedError, "1 windows of 9 rows"),
        (lambda: other_tail(online=True), NotImplementedError, "2 windows of 4 rows, online"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "changes", "error", "match"),
    [
        pytest.param(operator, *row, id=f"{operator.__name__}-{row[2]}")
        for operator, rows in REFUSED.items()
        for row in rows
    ],
)
def test_refused(operator, changes, error, match):
    given = {**OPERATORS[operator]()}
    for name, change in (changes() if callable(changes) else changes).items():
        given[name] = change(given[name]) if callable(change) else change
    with pytest.raises(error, match=match):
        operator(**given)


def test_queries_are_of_the_record_of_the_keys():
    given = scored(replace(SCORED, record="indexer_fp8"))
    as_bytes = part(0, lambda q: q.view(torch.uint8))(given["query"])
    with pytest.raises(ValueError, match=r"q is torch.uint8 .*, expected torch.float8_e4m3fn"):
        scores(**(given | {"query": as_bytes}))
    with pytest.raises(NotImplementedError, match="tcgen05' with record indexer_fp8"):
        scores(**given, kernel="tcgen05", arch="sm_100a")
    with pytest.raises(NotImplementedError, match="wgmma' with record indexer_fp8 on sm_100a"):
        scores(**given, kernel="wgmma", arch="sm_100a")
    with pytest.raises(NotImplementedError, match="wgmma' with record indexer_fp4 on sm_90a"):
        scores(**scored(SCORED), kernel="wgmma", arch="sm_90a")


@pytest.mark.parametrize(
    ("operator", "written"), [(SCORES, ["out"]), (COMPRESS, ["tail_pool", "out_pool"])]
)
def test_the_schema_says_what_is_written(operator, written):
    arguments = operator.default._schema.arguments
    assert [a.name for a in arguments if a.alias_info and a.alias_info.is_write] == written


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        (scores, None),
        (select, [((3, 16), torch.int64), ((3,), torch.int32)]),
        (compress, None),
    ],
)
def test_tracers_see_what_comes(operator, expected):
    given = OPERATORS[operator]()
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = operator(**given)
    assert (found and [(x.shape, x.dtype) for x in found]) == expected
