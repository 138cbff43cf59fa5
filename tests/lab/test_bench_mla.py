"""bench.py mla without a GPU: problems, inputs, the reference, peers, the check before every time,
tables and files.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from lab.bench import mla, mla_peers
from lab.bench.mla_peers import ROWS, Problem, drawn, errors_of, ours, reference
from lab.tools.common import read_rows, save_rows
from mla.attention import reference as definition

SMALL = (
    Problem("dense", 2, 4, 64),
    Problem("v4", 2, 4, 20, "fp8_584", 16, "fp8_584"),
    Problem("v3.2", 2, 4, 20, "fp8_656"),
    Problem("prefill", 3, 4, 20, "bf16_512"),
)
ids = pytest.mark.parametrize("problem", SMALL, ids=lambda problem: problem.rows)


@pytest.fixture(autouse=True)
def small_caches(monkeypatch):
    for name in ("LEAST_ENTRIES", "PREFILL_ENTRIES"):
        monkeypatch.setattr(mla_peers, name, 128)


def exact(problem, inputs):
    """O and LSE by the fp64 definition of the package."""
    sources = []
    for cache in inputs.caches:
        if problem.dense:
            sources.append(definition.of_pages(cache.store, cache.places))
            continue
        store = cache.store
        store = store if isinstance(store, torch.Tensor) else mla_peers.codec.unpack(store)
        sources.append(definition.Source(store.flatten(0, 1), cache.places))
    found = definition.definition(inputs.q.unsqueeze(1), sources)
    return found.o.squeeze(1), found.lse.squeeze(2)


def test_bytes_and_operations():
    v4 = next(p for p in ROWS["v4"] if (p.heads, p.entries, p.keys) == (64, 8, 512))
    assert v4.nbytes == 8 * (640 * 584 + 2 * 64 * 1024)
    assert v4.flop == 8 * 64 * 640 * 2 * 1024
    assert len(ROWS["dense"]) == 18
    assert {p.entries for p in ROWS["prefill"]} == {4096}


@ids
def test_the_reference_is_the_definition(problem):
    first, second = drawn(problem, 2, "cpu")
    for inputs in (first, second):
        o, lse = errors_of(reference(inputs, problem), exact(problem, inputs))
        assert max(o, lse) < 1e-5
    assert not torch.equal(first.caches[-1].places, second.caches[-1].places)


def test_entries_of_a_token_differ():
    inputs = drawn(SMALL[1], 1, "cpu")[0]
    for cache in inputs.caches:
        assert all(len(row.unique()) == len(row) for row in cache.places)


def test_ours_in_the_emulator_and_the_check():
    problem = SMALL[1]
    sets = drawn(problem, 2, "cpu")
    expected = [reference(inputs, problem) for inputs in sets]
    launches = ours(kernel="warp", arch="sm_89")(problem, sets)
    assert mla_peers.checked(launches, expected)["error"] < 0.01
    with pytest.raises(ValueError, match="wrong: O is"):
        mla_peers.checked(launches[::-1], expected)


def imitation(problem, inputs):
    """A module with FlashMLA's functions, which checks shapes and gives what is right."""

    def decoded(q, k_cache, table, lens, head_dim_v, schedule, **given):
        assert (q.shape[1], k_cache.shape[2], head_dim_v) == (1, 1, 512)
        assert given["use_legacy"]
        assert ("indices" in given) == (table is None) == (not problem.dense)
        o, lse = exact(problem, inputs)
        return o.unsqueeze(1).bfloat16(), lse.unsqueeze(2).float()

    def prefilled(q, kv, indices, scale, d_v, use_legacy):
        assert kv.shape[1:] == (1, problem.columns)
        assert indices.shape == (problem.entries, 1, problem.keys)
        o, lse = exact(problem, inputs)
        return o.bfloat16(), None, lse.float()

    return SimpleNamespace(
        flash_mla_with_kvcache=decoded, flash_mla_sparse_fwd=prefilled,
        get_mla_metadata=lambda: (object(), None),
    )  # fmt: skip


@ids
def test_flashmla_is_called_and_compared(monkeypatch, problem):
    sets = drawn(problem, 1, "cpu")
    monkeypatch.setitem(sys.modules, "flash_mla", imitation(problem, sets[0]))
    launches = mla_peers.flashmla(problem, sets)
    assert mla_peers.checked(launches, [reference(sets[0], problem)] * 2)["error"] < 0.01


def test_a_peer_that_cannot_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    monkeypatch.setattr(mla, "measure", lambda rows, samplers: [each({}) for each in samplers])
    with pytest.raises(ImportError, match="flash_mla"):
        mla.rows_of(SMALL[0], ["flashmla"], drawn(SMALL[0], 1, "cpu"))
    with pytest.raises(NotImplementedError, match=r"V4\.1"):
        mla_peers.flashmla(ROWS["v4.1"][0], [])


def timed(peer, us):
    """A row of a file."""
    row = {"kind": "latent", "peer": peer, "error": 1e-3, "lse_error": 1e-6, **SMALL[1].sizes}
    return row | {f"{when}_{what}": value for when in ("cold", "warm")
                  for what, value in (("us", us), ("spread", 0.01))}  # fmt: skip


def test_a_file_is_shown_again(printed, tmp_path):
    rows = mla.with_rates([timed("mla", 10.0), timed("flashmla", 15.0)])
    assert rows[0]["of_flashmla"] == 1.5
    file = tmp_path / "mla.json"
    save_rows(file, [{"kind": "setting", "date": "2026-01-01"}, *rows])
    assert "1.50" in printed("bench.py mla --show", str(file))
    assert "| 10.0 / 10.0 | 15.0 / 15.0 |" in printed("bench.py mla --markdown --show", str(file))


def test_without_a_gpu(printed, tmp_path):
    file = tmp_path / "mla.json"
    shown = printed("bench.py mla --rows v3.2 dense --heads 64 --entries 8 --json", str(file))
    assert "No CUDA GPU here" in shown
    _, *rows = read_rows(file)
    assert [row["problem"] for row in rows] == [
        "v3.2: 8 x 2k, 64 heads, fp8_656", "dense: 8 x 8k, 64 heads, bf16_576",
    ]  # fmt: skip
    assert all(row["ctas"] >= 8 for row in rows)
