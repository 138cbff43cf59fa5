"""`prepare_attention` in the emulator, under its checker: the bytes of the separate calls."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kvcache.layouts.records import FP4_288
from kvcache.layouts.rows import Rows
from kvcache.movement.config import AppendConfig
from mla.compressor.config import WalkConfig, WindowConfig
from mla.glue import Queries
from mla.glue.config import GlueConfig, QueriesConfig
from mla.indexer.query_config import QueryConfig
from mla.prepare import launch
from mla.prepare.api import IndexQueries, prepare_attention
from mla.prepare.config import Ctas, PrepareConfig
from mla.prepare.launch import ARCHS
from mla.prepare.warm import warmup_prepare
from tests.kvcache.movement.rows_cases import checked
from tests.mla.prepare_cases import Setup, Twins, cache_of, one_by_one, parts_of

PARTS = ("entries", "index_keys", "index_queries", "queries", "window")
CSA = WindowConfig("fp8_584", 4, 2, 512)
INDEX = WindowConfig("indexer_fp8", 4, 2, 128)
HCA, WALK = WindowConfig("fp8_584", 128, 1, 512), WalkConfig("fp8_584", 128, 1, 512, staged=8)


def given(setup: Setup, tokens: int = 1):
    """Return a cache and the arguments of a step of one request."""
    cache = cache_of(setup)
    with cache.step({cache.admit("one", [5] * tokens).request: [5] * tokens}) as step:
        arrays = step.tensors(setup.device)
    return cache, parts_of(setup, cache, arrays, 1)


def kv_of(window):
    """The rows of a window as queries of one head, of the same memory."""
    return window.kv[:, None]


@pytest.fixture
def parts():
    """Arguments of a step, made before nothing may run any more."""
    return given(Setup())[1]


# -- the bytes of the separate calls --------------------------------------------------------------


def test_steps_leave_the_same_bytes():
    """A CSA layer that decodes: both streams, queries and the window, and padding."""
    twins = Twins(Setup(padded=3))
    twins.step(a=3, b=1)
    twins.step(a=1, b=1)
    twins.step(b=1, a=1, c=2)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "setup",
    [
        Setup(draft=3),
        Setup(record="fp8", draft=2),
        Setup(record="bf16", padded=1, heads=64),
        Setup("hca", draft=3),
        Setup("hca", online=False, padded=2),
        Setup("hca", record="bf16", draft=1),
    ],
    ids=lambda setup: f"{setup.kind}-{setup.record}-{setup.draft}-{setup.padded}-{setup.online}",
)
def test_any_layer(setup, arch):
    """Chunks, drafts that are taken back, single tokens, and a request that begins in between."""
    twins = Twins(dataclasses.replace(setup, arch=arch))
    twins.step(a=126, b=5)
    twins.step(a=1 + setup.draft, b=1)
    if setup.draft:
        twins.back("a", setup.draft)
    twins.step(b=2, a=1, c=1)
    twins.step(hint=False, b=1, a=1, c=130)


@pytest.mark.parametrize("kept", PARTS)
def test_parts_may_be_missing(kept):
    """A part alone writes what it writes beside others."""
    setup = Setup()
    (cache, parts), (other, same) = given(setup, 4), given(setup, 4)
    parts, same = (
        {name: part for name, part in each.items() if name in ("arrays", "rope", kept)}
        for each in (parts, same)
    )
    with checked():
        found = prepare_attention(**parts, longest=4, arch="sm_90a")
        expected = one_by_one(same, 4, {"arch": "sm_90a"})
    if kept == "queries":
        assert torch.equal(parts[kept].q, same[kept].q)
    for name, pool in cache.storage.pools.items():
        assert torch.equal(pool, other.storage.pools[name])
    assert (found is None) == (expected is None) == (kept != "index_queries")
    for mine, theirs in zip(found or (), expected or (), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("part", PARTS)
def test_a_launch_without_ctas_of_a_part_is_noticed(part, monkeypatch):
    """CTAs of the part do nothing."""
    place = PARTS.index(part)

    def fewer(self, ctas):
        ranges, end = right(self, ctas)
        wrong = Ctas(begin=ranges[place].begin, count=0)
        return [wrong if n == place else each for n, each in enumerate(ranges)], end

    right = PrepareConfig.ranges
    monkeypatch.setattr(PrepareConfig, "ranges", fewer)
    with pytest.raises(AssertionError):
        Twins(Setup()).step(a=4)


# -- nothing compiles -----------------------------------------------------------------------------


def test_clusters_have_ctas_of_one_part():
    config = PrepareConfig(WALK, None, None, None, AppendConfig("fp8_584", "bf16"))
    assert (config.slices, config.threads) == (8, 128)
    ranges, ctas = config.ranges([16, 0, 0, 0, 3])
    assert [each.begin for each in ranges] == [0, 16, 16, 16, 16]
    assert [each.count for each in ranges] == [16, 0, 0, 0, 3]
    assert ctas == 24


def test_layers_of_deepseek_v4_fit_in_a_launch():
    query, window = QueryConfig("indexer_fp8", "bf16", "fp32"), AppendConfig("fp8_584", "bf16")
    heads = GlueConfig(None, None, None, QueriesConfig(True, "neighbours"), True)
    layers = [
        PrepareConfig(CSA, INDEX, query, heads, window),
        PrepareConfig(None, None, query, None, None),
        *(PrepareConfig(each, None, None, heads, window) for each in (HCA, WALK)),
    ]
    for config in layers:
        assert config.refused() is None
    assert "128 and 256 threads" in str(PrepareConfig(CSA, HCA, None, None, None).refused())
    assert "clusters of" in str(PrepareConfig(
        WALK, WalkConfig("fp8_584", 128, 1, 512, 8, channels=128), None, None, None
    ).refused())  # fmt: skip


def test_what_is_refused(parts, nothing_runs):
    arrays, rope = parts["arrays"], parts["rope"]

    def refused(error, text, **changes):
        with pytest.raises(error, match=text):
            prepare_attention(**(parts | {"arch": "sm_90a"} | changes))

    entries, window, queries = parts["entries"], parts["window"], parts["index_queries"]
    with pytest.raises(ValueError, match="nothing to do: give entries"):
        prepare_attention(arrays, rope, arch="sm_90a")
    refused(TypeError, "arrays is ", arrays=None)
    refused(ValueError, "no positions", arrays={})
    refused(ValueError, "no tables", arrays={"positions": arrays["positions"]})
    refused(TypeError, "rope is ", rope=rope[0])
    refused(TypeError, "entries is WindowKeys", entries=window)
    refused(TypeError, "window is Compression", window=entries)
    refused(TypeError, "index_queries is ", index_queries=window)
    refused(TypeError, "queries is ", queries=window)
    refused(ValueError, "queries.out", queries=Queries(kv_of(window), eps=1e-6))
    refused(NotImplementedError, "width 128: entries of fp8_584", entries=dataclasses.replace(
        entries, tail=parts["index_keys"].tail))  # fmt: skip
    refused(ValueError, "no tables", entries=dataclasses.replace(entries, stream="hca"))
    refused(ValueError, "share memory", index_keys=entries)
    refused(ValueError, "window.kv and entries.out", window=dataclasses.replace(
        window, kv=entries.out.pool.view(torch.bfloat16)[:1, :512]))  # fmt: skip
    far = Rows(window.rows.pool, 0, 0, 1, FP4_288)
    refused(NotImplementedError, "record fp4_288", window=dataclasses.replace(window, rows=far))
    refused(ValueError, "slots is", window=dataclasses.replace(window, slots=window.slots.int()))
    refused(ValueError, r"q is .*\[T, H, 128\]", index_queries=IndexQueries(
        queries.q[..., :64], queries.weights))  # fmt: skip
    refused(NotImplementedError, "record fp8_584", index_queries=IndexQueries(
        queries.q, queries.weights, "fp8_584"))  # fmt: skip
    refused(ValueError, "values is", entries=dataclasses.replace(
        entries, values=entries.values.bfloat16()))  # fmt: skip
    refused(ValueError, "longest -1", longest=-1)
    refused(NotImplementedError, "arch 'sm_89'", arch="sm_89")


def test_nothing_to_do(parts, nothing_runs):
    """A step without tokens."""
    q = torch.zeros(0, 4, 128).bfloat16()
    arrays = {"positions": torch.zeros(0, dtype=torch.int64)}
    queries = IndexQueries(q, torch.zeros(0, 4), "indexer_fp8")
    found = prepare_attention(arrays, parts["rope"], index_queries=queries, arch="sm_90a")
    assert found.data.shape == (0, 4, 128)


def test_tracers_see_what_comes(parts):
    with FakeTensorMode() as mode:
        fake = mode.from_tensor
        queries = parts["index_queries"]
        found = prepare_attention(
            {"positions": fake(parts["arrays"]["positions"])},
            tuple(map(fake, parts["rope"])),
            index_queries=IndexQueries(fake(queries.q), fake(queries.weights), queries.record),
        )
    assert found.data.dtype == torch.float8_e4m3fn
    assert found.data.shape == (1, 4, 128)
    assert found.weights.shape == (1, 4)


def test_a_warm_up_names_the_kernel_of_a_call(parts, monkeypatch):
    """The call after it asks for the same kernel."""
    asked = []
    monkeypatch.setattr("mla.prepare.warm.warm", lambda keys, progress: keys)
    monkeypatch.setattr(launch, "compile_once", lambda *key: asked.append(key))
    monkeypatch.setattr(launch, "launch", lambda *_: None)
    (key,) = warmup_prepare(**parts, longest=1, arch="sm_90a")
    prepare_attention(**parts, longest=1, arch="sm_90a")
    assert asked == [(key.config, key.arch, key.source)]
