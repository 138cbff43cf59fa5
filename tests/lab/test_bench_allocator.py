"""bench.py kvcache-host: figures, files, and vLLM's pool if its sources are installed."""

from __future__ import annotations

import sys

import pytest

from lab.bench import allocator
from lab.bench import allocator as _bench_allocator

SMALL = "bench.py kvcache-host --blocks 300 --batches 1 100 --requests 2 --repeats 20"
POOL = """\
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import Block
from vllm.v1.request import Request

logger = init_logger(__name__)


class BlockPool:
    def __init__(self, num_gpu_blocks, enable_caching, hash_block_size):
        self.free = [Block(n) for n in range(num_gpu_blocks)]

    def get_new_blocks(self, count):
        return [self.free.pop() for _ in range(count)]

    def free_blocks(self, blocks):
        self.free += blocks
"""
UTILS = """\
from dataclasses import dataclass

from vllm import envs
from vllm.config import VllmConfig


class Special(VllmConfig):
    pass


@dataclass
class Block:
    number: int
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder laid out like vLLM; its modules are removed afterwards."""
    core = tmp_path / "vllm" / "v1" / "core"
    core.mkdir(parents=True)
    (core / "block_pool.py").write_text(POOL)
    (core / "kv_cache_utils.py").write_text(UTILS)
    (tmp_path / "PKG-INFO").write_text("Name: vllm\nVersion: 1.2.3\n")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def test_figures(printed, written, tmp_path):
    text, rows = written(SMALL)
    assert (rows[0]["kind"], rows[0]["blocks"], len(rows[0]["load"])) == ("setting", 300, 3)
    pools = [row for row in rows if row["kind"] == "pool" and "batch" in row]
    assert [(row["peer"], row["batch"]) for row in pools if row["peer"] != "vllm"] == [
        ("kvcache", 1), ("kvcache, kept", 1), ("kvcache", 100), ("kvcache, kept", 100),
    ]  # fmt: skip
    assert all(row["million_per_s"] > 0.01 for row in pools)
    managers = [row for row in rows if row["kind"] == "manager"]
    assert [row["layout"] for row in managers] == ["gqa", "deepseek-v4-pro"]
    assert all(row["admit_hit_us"] > row["admit_miss_us"] > 0 for row in managers)
    assert printed("bench.py kvcache-host --show", tmp_path / "report.json") == text


def test_kept_blocks_are_evicted():
    """The row measures eviction: each block that is taken was kept for its content before."""
    pool, gone = _bench_allocator.SlotPool("blocks", 8, first=1), []
    pool.on_evict = lambda slot, key: gone.append(key)
    _bench_allocator._register_all(pool)
    assert pool.kept == 8
    for _ in range(3):
        _bench_allocator._keep(pool, pool.take(2))
    assert pool.kept == 8
    assert len(gone) == 6


def test_a_checkout_is_a_peer(printed, checkout):
    assert printed(f"{SMALL} --requests --vllm", checkout).count("vllm") == 2
    make, said = allocator.block_pool(checkout)
    assert said == "vllm 1.2.3, its imports replaced"
    assert [block.number for block in make(3).get_new_blocks(2)] == [2, 1]


def test_without_it_the_row_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)
    make, said = allocator.block_pool(None)
    assert make is None
    assert said.startswith("vllm is not importable")
    monkeypatch.delitem(sys.modules, "vllm")
    make, said = allocator.block_pool(tmp_path)
    assert make is None
    assert said.startswith(f"no BlockPool in {tmp_path.name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
