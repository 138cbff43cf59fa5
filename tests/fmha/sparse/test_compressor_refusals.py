"""What compressors refuse before anything compiles, naming value and limit; the operator's schema,
and what tracers see."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fmha.sparse.compressor import api, launch
from fmha.sparse.compressor.arguments import Job
from kvcache.layouts.records import FP8_528, INDEXER_FP4
from tests.fmha.sparse.compressor_cases import Setup, poisoned_job


@pytest.fixture(scope="module")
def job() -> Job:
    return poisoned_job(Setup("csa", record="fp8"))


def call(job: Job) -> None:
    api.compress(
        job.compressor, job.tail, job.out, job.values, job.scores, job.tables,
        cos=job.cos, sin=job.sin, longest=job.longest,
    )  # fmt: skip


def tail_of(job: Job, **changes) -> Job:
    """With another tail, and ape and weight as it wants them."""
    tail = replace(job.tail.tail, **changes)
    ape = torch.zeros(tail.ratio, tail.overlap * tail.width)
    found = replace(job.compressor, ape=ape, weight=torch.zeros(tail.width))
    values = torch.zeros(len(job.values), tail.overlap * tail.width)
    rows = replace(job.tail, tail=tail, rows=tail.ratio * tail.overlap)
    return replace(job, tail=rows, compressor=found, values=values, scores=values)


CASES = [
    (lambda j: replace(j, values=j.values.bfloat16()), ValueError, "values is torch.bfloat16"),
    (lambda j: replace(j, scores=j.scores[:-1]), ValueError, "scores is .* expected torch.float32"),
    (lambda j: replace(j, values=j.values[:, ::2]), ValueError, "values"),
    (lambda j: replace(j, out=replace(j.out, record=FP8_528)), NotImplementedError, "fp8_528"),
    (lambda j: replace(j, out=replace(j.out, record=INDEXER_FP4)), NotImplementedError,
     "width 512: entries of indexer_fp4 have 128 elements"),
    (lambda j: replace(j, tail=replace(j.tail, offset=8)), ValueError, "at 8"),
    (lambda j: replace(j, tail=replace(j.tail, rows=7)), ValueError, "7 rows: .* at least 8"),
    (lambda j: replace(j, longest=3), ValueError, "longest 3: a request has 11 tokens"),
    (lambda j: replace(j, cos=j.cos[:1]), ValueError, "sin is"),
    (lambda j: replace(j, cos=j.cos[:4], sin=j.sin[:4]), ValueError, "angles have 0 to 3"),
    (lambda j: replace(j, tables=replace(j.tables, ends=j.tables.ends + 99)), ValueError,
     "ends has numbers"),
    (lambda j: replace(j, tables=replace(j.tables, owners=j.tables.owners.long())), ValueError,
     "owners is torch.int64"),
    (lambda j: replace(j, tables=replace(j.tables, tail_rows=j.tables.tail_rows + 9999)),
     ValueError, "tail_rows has numbers"),
    (lambda j: replace(j, compressor=replace(j.compressor, eps=-1.0)), ValueError, "eps -1"),
    (lambda j: replace(j, compressor=replace(j.compressor, ape=j.compressor.ape[:3])), ValueError,
     "ape is"),
    (lambda j: tail_of(j, ratio=9, overlap=1), NotImplementedError, "1 windows of 9 rows"),
    (lambda j: tail_of(j, online=True), NotImplementedError, "2 windows of 4 rows, online"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "match"), CASES)
def test_refuses(job, changed, error, match, monkeypatch):
    monkeypatch.setattr(launch, "launch", lambda *_: pytest.fail("launched"))
    with pytest.raises(error, match=match):
        call(changed(job))


def test_gradients_are_refused(job):
    with pytest.raises(NotImplementedError, match="values requires grad"):
        call(replace(job, values=job.values.clone().requires_grad_()))


def test_the_schema_says_what_is_written():
    written = [a.name for a in launch.COMPRESS.default._schema.arguments
               if a.alias_info is not None and a.alias_info.is_write]  # fmt: skip
    assert written == ["tail_pool", "out_pool"]


def test_tracers_see_it_whole(job):
    with FakeTensorMode(allow_non_fake_inputs=True):
        call(job)
