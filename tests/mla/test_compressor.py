"""Compressors in the emulator, under its checker: whole histories in fp64, cuts of tokens into
steps, batches, rollbacks, hits, records, poison."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvcache.layouts.records import FP8_584, INDEXER_BF16, INDEXER_FP4, INDEXER_FP8
from kvcache.movement import reference as records
from mla.compressor import reference
from mla.compressor.launch import ARCHS
from mla.indexer import quantised as index_records
from ptxemu import Options
from tests.mla.compressor_cases import (
    KINDS,
    Runner,
    assert_same_pools,
    check_cuts,
    check_poisoned,
    check_rollback,
    check_same,
    copied,
    poisoned_job,
    run,
    setup_of,
    written,
)

# -- every kernel once ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "total", "cuts"),
    [
        ("csa", 9, []),
        ("online", 128, []),
        ("csa", 15, [[1, 3, 4, 9], [11]]),  # 11: a window ends with the first token of a step
        ("hca", 130, []),
        ("online", 131, [[60]]),
    ],
    ids=["csa, few", "online, few", "csa", "hca", "online"],
)
def test_cuts_leave_the_same_bytes(kind, total, cuts):
    check_cuts(setup_of(kind), total, cuts)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_formula(kind, monkeypatch):
    """Steps of the reference alone are compared with whole histories."""

    def by_reference(compressor, tail, out, values, scores, tables, *, longest, arch, **angles):
        reference.compress(
            reference.Job(compressor, tail, out, values, scores, tables, **angles, longest=longest)
        )

    monkeypatch.setattr("tests.mla.compressor_cases.compress", by_reference)
    runner, tokens = Runner(setup_of(kind, draft=2)), [5 * i % 7 for i in range(139)]
    runner.steps("a", tokens[:124], (1, 5, 122))
    runner.step(a=[3, 3], b=tokens[:9])
    runner.back("a", 2)
    runner.step(a=tokens[124:], b=tokens[9:])
    runner.check_history("a")
    runner.check_history("b")


# -- in every way ---------------------------------------------------------------------------------

# An H100 runs the tests for sm_90a (test_compressor_hw.py), which differs in few instructions.
each_arch = pytest.mark.parametrize("arch", ARCHS)
each_kind = pytest.mark.parametrize(  # kinds share no kernel, so each may have its own worker
    "kind", [pytest.param(k, marks=pytest.mark.xdist_group(f"compressor {k}")) for k in KINDS]
)


@each_arch
@each_kind
def test_cuts_around_windows_and_blocks(kind, arch):
    setup = setup_of(kind, arch=arch)
    around = [1, 2, 126, 127, 128, 129, 130, 254, 255, 256, 257]
    check_cuts(setup, 261, [[3, 127, 255], [4, 128, 256], [5, 129, 257], around, [7, 131]])


@pytest.mark.parametrize("arch", ARCHS)
@each_kind
def test_single_cuts(kind, arch):
    cuts = (1, 2, 3, 4, 5, 126, 127, 128, 129, 130, 131, 254, 255, 256, 257)
    check_cuts(setup_of(kind, arch=arch), 261, [[cut] for cut in cuts])


KINDS_AND_RECORDS = [
    *((kind, record) for kind in KINDS for record in ("bf16", "fp8")), ("index", "fp8-index8"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "record"), KINDS_AND_RECORDS)
def test_one_by_one(kind, record):
    total = 135 if kind in ("hca", "online") else 24
    check_cuts(setup_of(kind, record=record), total, [range(1, total)])


@pytest.mark.parametrize("seed", [0, 1])
@each_kind
def test_in_any_order(kind, seed, monkeypatch):
    """Warps and clusters run in random order: nothing in a tail is overwritten before it is
    read."""
    shuffled = Options(policy="random", seed=seed, resident=64, limit=600.0)
    monkeypatch.setattr("tests.kvcache.movement.rows_cases.CHECKED", shuffled)
    total, cuts = (15, [[1, 3, 4, 9], [2, 10]]) if kind in ("csa", "index") else (256, [[60]])
    check_cuts(setup_of(kind), total, cuts)


@each_kind
def test_ends_backwards_one_cluster_after_another(kind, monkeypatch):
    """The window that reads rows of the previous step comes last."""
    alone = Options(resident=1, check=True, limit=600.0)
    monkeypatch.setattr("tests.kvcache.movement.rows_cases.CHECKED", alone)
    tokens = [i % 7 for i in range(256)]
    one, other = Runner(setup_of(kind)), Runner(setup_of(kind))
    other.backwards = True
    for runner in (one, other):
        runner.steps("a", tokens, (62,))
    check_same(one, other, "a")
    one.check_history("a")


@each_arch
@each_kind
def test_mixed_batches(kind, arch):
    """Requests that decode in a batch with prefills have the same results as alone."""
    setup = setup_of(kind, arch=arch)
    texts = {"a": [i % 11 for i in range(133)], "b": [i % 5 for i in range(270)], "c": [9] * 5}
    mixed = Runner(setup, blocks=40)
    mixed.step(a=texts["a"][:127], b=texts["b"][:3])
    mixed.step(a=texts["a"][127:128], b=texts["b"][3:258], c=texts["c"][:1])
    mixed.step(a=texts["a"][128:130], c=texts["c"][1:4])
    mixed.step(c=texts["c"][4:], b=texts["b"][258:259], a=texts["a"][130:])
    mixed.step(hint=False, b=texts["b"][259:])
    for name, tokens in texts.items():
        alone = Runner(setup)
        alone.step(a=tokens)
        alone.histories[name], alone.requests[name] = alone.histories["a"], alone.requests["a"]
        check_same(mixed, alone, name)


@each_kind
@pytest.mark.parametrize("draft", [1, 3])
def test_rollback(kind, draft):
    check_rollback(setup_of(kind, draft=draft), steps=12, every=3)


@each_kind
@pytest.mark.parametrize("draft", [0, 2])
def test_hits_continue_from_a_checkpoint(kind, draft):
    setup = setup_of(kind, draft=draft)
    tokens = [i % 9 for i in range(300)]
    runner = Runner(setup)
    runner.steps("a", tokens, (128, 256))
    runner.step(b=tokens)
    assert runner.hits["b"] == 256
    check_same(runner, _renamed(runner, "a", "b"), "b")


def _renamed(runner, old, new):
    """A view of a runner in which one request is renamed."""
    other = Runner(runner.setup)
    other.cache, other.requests = runner.cache, {new: runner.requests[old]}
    other.histories = {new: runner.histories[old]}
    return other


@each_arch
@each_kind
def test_poison(kind, arch):
    for draft in (0, 3):
        check_poisoned(setup_of(kind, arch=arch, draft=draft))


@each_arch
@each_kind
def test_records_quantise_what_bf16_stores(kind, arch):
    """The bytes of every record follow from those of bf16."""
    setup = setup_of(kind, arch=arch)
    plain = poisoned_job(setup, INDEXER_BF16.name if kind == "index" else None)
    wanted = (INDEXER_FP4, INDEXER_FP8) if kind == "index" else (FP8_584,)
    run(plain, arch=arch)
    place = written(plain)
    entries = plain.out.data()[place].view(torch.bfloat16)
    for record in wanted:
        job = _of_record(poisoned_job(setup), record)
        run(job, arch=arch)
        quantise = index_records.quantised if kind == "index" else records.quantised
        data, scales = quantise(entries, record)
        assert torch.equal(job.out.data()[place], data)
        assert torch.equal(job.out.scales()[place], scales)


def _of_record(job, record):
    rows = job.out.rows
    pool = torch.zeros(len(job.out.pool), rows * record.bytes + 64 & ~15, dtype=torch.uint8)
    out = dataclasses.replace(
        job.out, pool=pool, record=record, data_offset=0, scale_offset=rows * record.data_bytes
    )
    return dataclasses.replace(job, out=out)


@each_kind
def test_nothing_to_do(kind):
    job = poisoned_job(setup_of(kind))
    empty = dataclasses.replace(
        job, values=job.values[:0], scores=job.scores[:0],
        tables=dataclasses.replace(job.tables, **{
            name: table[:0] for name, table in job.tables.named.items()
            if name in ("positions", "owners", "tail_rows", "entries", "ends")
        }, cu_tokens=job.tables.cu_tokens * 0),
    )  # fmt: skip
    before = copied(empty)
    run(empty)
    assert_same_pools(empty, before)


@each_kind
def test_what_is_not_finite_stays_in_its_channel_or_entry(kind):
    """A NaN among the scores of a channel makes the entry NaN; other entries are unchanged."""
    setup = setup_of(kind)
    clean, job = poisoned_job(setup), poisoned_job(setup)
    job.scores[job.tables.ends[job.tables.ends >= 0][0], -1] = float("nan")
    run(clean)
    run(job)
    mine, theirs = (x.out.data()[written(x)].view(torch.bfloat16) for x in (job, clean))
    assert mine[0].isnan().all()
    apart = setup.tail.overlap  # with 2 a window's last token also counts in the next entry
    assert len(mine) > apart
    assert torch.equal(mine[apart:], theirs[apart:])
