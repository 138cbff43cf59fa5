"""Compressors on the GPU itself: whole histories, cuts, poison, pools behind 4 GiB, graphs.

`python -m pytest --hw -m hw tests/fmha/sparse/test_compressor_hw.py`
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fmha.sparse.compressor import reference
from kvcache.layouts.rows import Rows
from tests.fmha.sparse.compressor_cases import (
    Runner,
    Setup,
    check_cuts,
    check_poisoned,
    check_same,
    copied,
    poisoned_job,
    run,
)

pytestmark = [pytest.mark.hw, pytest.mark.xdist_group("kvcache-hw")]
KINDS = ("csa", "index", "hca", "online")
each_kind = pytest.mark.parametrize("kind", KINDS)
GIB = 1 << 30


def setup_of(kind: str, **options) -> Setup:
    options = {"device": "cuda", "online": kind == "online", **options}
    return Setup("hca" if kind == "online" else kind, **options)


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
    setup, draft = setup_of(kind, draft=3), 3
    runner, accepted = Runner(setup), [i % 3 for i in range(121)]
    runner.step(a=accepted)
    for at in range(150):
        proposed = [(at + k) % 10 for k in range(draft)]
        runner.step(a=proposed)
        back = at % draft + 1
        runner.back("a", back)
        accepted = [*accepted, *proposed[: draft - back], at % 4]
        runner.step(a=[at % 4])
    other = Runner(setup)
    other.step(a=accepted)
    check_same(runner, other, "a")


@each_kind
def test_equal_bytes_every_time(kind):
    first, *others = [poisoned_job(setup_of(kind)) for _ in range(10)]
    run(first)
    for job in others:
        run(job)
        assert torch.equal(job.tail.pool, first.tail.pool)
        assert torch.equal(job.out.pool, first.out.pool)


@each_kind
def test_is_captured_in_a_graph(kind):
    """Replayed on other numbers, and on a step in which nobody completes anything."""
    job = poisoned_job(setup_of(kind))
    run(job)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(job)
    job.values.mul_(0.5)
    again = copied(job)
    graph.replay()
    run(again)
    assert torch.equal(job.out.pool, again.out.pool)
    assert torch.equal(job.tail.pool, again.tail.pool)
    for name in ("ends", "tail_rows", "entries"):
        getattr(job.tables, name).fill_(-1)
    before = job.out.pool.clone(), job.tail.pool.clone()
    graph.replay()
    assert torch.equal(job.out.pool, before[0])
    assert torch.equal(job.tail.pool, before[1])


@each_kind
def test_out_of_range_is_passed_over(kind):
    """On a GPU nobody looks before."""
    job = poisoned_job(setup_of(kind))
    for name in ("tail_rows", "entries"):
        getattr(job.tables, name).copy_(torch.tensor([1 << 40, -2])[torch.arange(
            len(job.tables.positions)) % 2])  # fmt: skip
    job.tables.ends.fill_(1 << 30)
    before = job.out.pool.clone(), job.tail.pool.clone()
    run(job)
    assert torch.equal(job.out.pool, before[0])
    assert torch.equal(job.tail.pool, before[1])


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
