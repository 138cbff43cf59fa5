"""Compressors on the GPU itself: whole histories, cuts, poison, pools beyond 4 GiB, graphs.

`python -m pytest --hw -m hw tests/mla/test_compressor_hw.py`
"""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from kvcache.layouts.rows import Rows
from mla.compressor import reference
from tests.mla.compressor_cases import (
    KINDS,
    assert_same_pools,
    check_cuts,
    check_poisoned,
    check_rollback,
    copied,
    poisoned_job,
    run,
)
from tests.mla.compressor_cases import setup_of as setup_on

pytestmark = [pytest.mark.hw, pytest.mark.xdist_group("kvcache-hw")]
each_kind = pytest.mark.parametrize("kind", KINDS)
setup_of = partial(setup_on, device="cuda")
GIB = 1 << 30


@each_kind
@pytest.mark.parametrize("record", ["bf16", "fp8", "fp8-index8"])
def test_cuts(kind, record):
    near = [x + d for x in (128, 256, 512) for d in (-1, 0, 1)]
    cuts = [[cut] for cut in near]
    cuts += [[3, 4, 5, 127, 128, 129], [1, 2, 254, 255, 256, 257], range(1, 600)]
    check_cuts(setup_of(kind, record=record), 600, cuts)


@each_kind
@pytest.mark.parametrize("draft", [0, 3])
def test_poison(kind, draft):
    check_poisoned(setup_of(kind, draft=draft))


@each_kind
def test_rollback(kind):
    check_rollback(setup_of(kind, draft=3), steps=150, every=150)


@each_kind
def test_equal_bytes_every_time(kind):
    first, *others = [poisoned_job(setup_of(kind)) for _ in range(10)]
    run(first)
    for job in others:
        run(job)
        assert_same_pools(job, first)


@each_kind
def test_is_captured_in_a_graph(kind):
    """Replays have other numbers, and a step that completes no entry."""
    job = poisoned_job(setup_of(kind))
    run(job)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(job)
    job.values.mul_(0.5)
    again = copied(job)
    graph.replay()
    run(again)
    assert_same_pools(job, again)
    for name in ("ends", "tail_rows", "entries"):
        getattr(job.tables, name).fill_(-1)
    before = copied(job)
    graph.replay()
    assert_same_pools(job, before)


@each_kind
def test_out_of_range_is_passed_over(kind):
    """On a GPU nothing checks the numbers before."""
    job = poisoned_job(setup_of(kind))
    for name in ("tail_rows", "entries"):
        getattr(job.tables, name).copy_(torch.tensor([1 << 40, -2])[torch.arange(
            len(job.tables.positions)) % 2])  # fmt: skip
    job.tables.ends.fill_(1 << 30)
    before = copied(job)
    run(job)
    assert_same_pools(job, before)


@each_kind
def test_pools_behind_four_gib(kind):
    job = poisoned_job(setup_of(kind))
    before = copied(job)
    states = torch.zeros(8, 5 * GIB // 8 // 16 * 16, dtype=torch.uint8, device="cuda")
    states[:, : job.tail.pool.shape[1]] = job.tail.pool
    pool = torch.zeros(len(job.out.pool), 5 * GIB // len(job.out.pool) // 16 * 16,
                       dtype=torch.uint8, device="cuda")  # fmt: skip
    size = job.out.pool.shape[1]
    pool[:, :size] = job.out.pool
    far = dataclasses.replace(
        job,
        tail=dataclasses.replace(job.tail, pool=states),
        out=Rows(pool, job.out.data_offset, job.out.scale_offset, job.out.rows, job.out.record),
    )
    run(far)
    run(job)
    assert torch.equal(pool[:, :size], job.out.pool)
    assert torch.equal(states[:, : job.tail.pool.shape[1]], job.tail.pool)
    assert not torch.equal(job.tail.pool, before.tail.pool)
    assert not pool[:, size:].any()


def test_torch_of_the_reference_runs_on_the_gpu():
    job = poisoned_job(setup_of("csa"))
    run(job)
    again = poisoned_job(setup_of("csa"))
    reference.compress(again)
    assert torch.equal(job.tail.pool, again.tail.pool)
