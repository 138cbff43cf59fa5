"""Calls of `norm_rope_append` that are refused: the error names the argument, and nothing has been
written.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvcache.layouts.records import FP4_288, FP8_584, FP8_656, INDEXER_FP8, Record
from kvcache.layouts.rows import Rows
from mla import IndexKeys, LatentKeys, LowRank, Queries, norm_rope_append
from mla.indexer.formats import Rotation
from tests.support.hostile.calls import hostile, refused

T, E4M3 = 3, torch.float8_e4m3fn
POSITIONS, ROPE = torch.arange(T), (torch.ones(8, 32), torch.zeros(8, 32))


def rows_of(record: Record, pages: int = 2, rows: int = 4, room: int = 0) -> Rows:
    size = -(-rows * record.bytes // 16) * 16 + room
    return Rows(torch.zeros(pages, size, dtype=torch.uint8), 0, rows * record.data_bytes, rows,
                record)  # fmt: skip


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(shape).bfloat16()


POOL = rows_of(FP8_656)
KEYS = LatentKeys(bf16(T, 576), POOL, torch.arange(T), torch.ones(512))
V4 = replace(KEYS, x=bf16(T, 512), rows=rows_of(FP8_584))
IN_E4M3 = replace(KEYS, rows=torch.zeros(2, 4, 576).to(E4M3))
INDEX = IndexKeys(
    bf16(T, 128), rows_of(INDEXER_FP8, room=16), torch.arange(T), torch.ones(128), torch.ones(128)
)
QUERIES, LOW = Queries(bf16(T, 2, 192)), LowRank(bf16(T, 64), torch.ones(64))


def called(**options):
    given = {"positions": POSITIONS, "rope": ROPE, **options}
    return lambda: norm_rope_append(**given)


def keys(**changes):
    return called(keys=replace(KEYS, **changes))


def index(**changes):
    return called(index_keys=replace(INDEX, **changes))


def queries(*given, **options):
    return called(queries=Queries(*given, **options))


def low(**changes):
    return called(low_rank=replace(LOW, **changes))


CALLS = [
    hostile(called(), "nothing to do: give keys, index_keys, queries or low_rank"),
    hostile(called(keys=POOL), "keys is Rows, expected LatentKeys"),
    hostile(called(index_keys=KEYS), "index_keys is LatentKeys, expected IndexKeys"),
    hostile(called(queries=bf16(T, 2, 64)), "queries is Tensor, expected Queries"),
    hostile(called(low_rank=KEYS), "low_rank is LatentKeys, expected LowRank"),
    hostile(called(keys=KEYS, is_neox=True), "is_neox"),
    hostile(called(keys=KEYS, pairs="neox"), "pairs 'neox': one of .'neighbours', 'halves'"),
    hostile(called(keys=KEYS, rope=ROPE[0]), "rope is Tensor, expected two tables"),
    hostile(called(keys=KEYS, rope=(ROPE[0], ROPE[1][:, :31])), "sin is torch.float32"),
    hostile(called(keys=KEYS, rope=(ROPE[0][:0], ROPE[1][:0])), "expected a row for every pos"),
    hostile(called(keys=KEYS, positions=POSITIONS.float()), "positions is torch.float32"),
    hostile(called(keys=KEYS, positions=POSITIONS + 6), "positions has numbers from 6 to 8"),
    hostile(called(keys=KEYS, pdl=True, arch="sm_89"), "pdl=True on sm_89"),
    hostile(called(keys=KEYS, arch="sm_86"), "keys of fp8_656 on sm_86: e4m3 needs compute cap"),
    hostile(called(keys=IN_E4M3, arch="sm_80"), "keys of e4m3_576 on sm_80"),
    hostile(called(index_keys=INDEX, arch="sm_80"), "index_keys of indexer_fp8 on sm_80"),
    hostile(called(keys=KEYS, arch="sm_75"), "arch 'sm_75'"),
    hostile(keys(x=bf16(T, 512)), r"keys.x is torch.bfloat16 \(3, 512\), expected .* \(3, 576\)"),
    hostile(keys(x=bf16(T + 1, 576)), r"keys.x is .* \(4, 576\)"),
    hostile(keys(x=torch.ones(T, 576)), "keys.x is torch.float32"),
    hostile(keys(x=bf16(T, 580)[:, 4:]), "keys.x starts at address"),
    hostile(keys(x=bf16(1, 576).expand(T, 576)), "keys.x has a stride of 0 bytes"),
    hostile(keys(weight=torch.ones(576)), r"keys.weight is torch.float32 \(576,\)"),
    hostile(keys(weight=torch.ones(512).half()), "keys.weight is torch.float16, expected one of"),
    hostile(keys(eps=-1.0), "keys.eps -1.0: from 0"),
    hostile(keys(eps=math.nan), "keys.eps nan"),
    hostile(keys(slots=torch.arange(T).float()), "keys.slots is torch.float32"),
    hostile(keys(slots=torch.arange(T + 1)), r"keys.slots is torch.int64 \(4,\)"),
    hostile(keys(slots=torch.tensor([5, 1, 5])), "keys.slots has 5 twice, at 0 and 2"),
    hostile(keys(scale=torch.ones(1)), "keys.scale: only a tensor of entries in e4m3"),
    hostile(called(keys=replace(IN_E4M3, scale=torch.zeros(1))), "keys.scale 0.0: from 1.175e-38"),
    hostile(called(keys=replace(IN_E4M3, scale=torch.ones(2))), "keys.scale is torch.float32"),
    hostile(keys(rows=None), "keys.rows is None, expected Rows"),
    hostile(keys(rows=rows_of(FP4_288)), "record fp4_288 of 288 bytes: keys are in one of"),
    hostile(keys(rows=rows_of(Record("fp8_656", 640))), "record fp8_656 of 640 bytes"),
    hostile(keys(rows=replace(POOL, data_offset=8)), "data of fp8_656 at 8"),
    hostile(keys(rows=bf16(2, 4, 512)), r"keys.x is .* \(3, 576\), expected .* \(3, 512\)"),
    hostile(keys(rows=torch.zeros(2, 4, 576)), "dtype torch.float32 of keys.rows"),
    hostile(keys(rows=bf16(2, 4, 640)), "keys.rows has 640 columns"),
    hostile(keys(rows=bf16(2, 4, 640)[..., :576]), "entries of a page have to be side by side"),
    hostile(keys(rows=bf16(1, 4, 576).expand(2, 4, 576)), "keys.rows"),
    hostile(keys(x=POOL.pool.view(torch.bfloat16).flatten()[: T * 576].view(T, 576)),
            "keys.x and the keys share memory"),
    hostile(called(keys=V4, index_keys=replace(INDEX, rows=replace(INDEX.rows, pool=V4.rows.pool))),
            "the keys of the indexer and the keys share memory"),
    hostile(queries(bf16(T, 2, 512), eps=-1.0), "queries.eps -1.0"),
    hostile(index(x=bf16(T, 64)), r"index_keys.x is torch.bfloat16 \(3, 64\)"),
    hostile(index(rows=POOL), "record fp8_656 of 656 bytes: index_keys are in one of"),
    hostile(index(bias=torch.ones(128).bfloat16()), "index_keys.bias is torch.bfloat16"),
    hostile(index(slots=torch.tensor([1, 2, 2])), "index_keys.slots has 2 twice"),
    hostile(index(rows=replace(INDEX.rows, scale_offset=514)), "scales of index_keys at 514"),
    hostile(index(rotation=Rotation("neox")), "pairs 'neox'"),
    hostile(index(rotation=None), "index_keys.rotation is None, expected Rotation"),
    hostile(queries(bf16(T, 2, 32)), r"queries.out is torch.bfloat16 \(3, 2, 32\)"),
    hostile(queries(bf16(T, 2, 576), eps=1e-6), r"expected torch.bfloat16 \(3, 2, 512\)"),
    hostile(queries(bf16(T, 2, 64), bf16(T, 1, 64)), "queries.q is torch.bfloat16"),
    hostile(queries(bf16(T, 2, 64), bf16(T, 1, 64).expand(T, 2, 64)), "queries.out has"),
    hostile(queries(None), "queries.q is NoneType"),
    hostile(called(queries=QUERIES, positions=torch.tensor([0, 8, 1])), "positions has numbers"),
    hostile(low(x=bf16(T, 60)), "low_rank.out has 60 columns: a multiple of 8 up to 4096"),
    hostile(low(x=bf16(T, 4104), weight=torch.ones(4104)), "4104 columns"),
    hostile(low(weight=torch.ones(63)), "low_rank.weight is"),
    hostile(low(out=bf16(T, 72)), "low_rank"),
    hostile(called(low_rank=replace(LOW, out=LOW.x[:, :])), "low_rank"),
]  # fmt: skip


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("attempt", "words"), CALLS)
def test_a_named_error(attempt, words):
    refused(attempt, words)
    pools = (POOL, V4.rows, INDEX.rows)
    assert not any(rows.pool.any() for rows in pools), "an entry was written"


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("slots", [[-1, -1, -1], [8, 1 << 40, -5]], ids=str)
def test_numbers_that_are_no_entries_are_no_errors(slots, monkeypatch):
    launched = []
    monkeypatch.setattr("mla.glue.launch.compile_once", lambda *_: None)
    monkeypatch.setattr("mla.glue.launch.launch", lambda *_: launched.append(1))
    norm_rope_append(POSITIONS + 99, ROPE, keys=replace(KEYS, slots=torch.tensor(slots)))
    assert launched
