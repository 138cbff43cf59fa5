"""`prepare_attention` on the GPU itself: the bytes of the separate calls, graphs.

`python -m pytest --hw -m hw tests/mla/test_prepare_hw.py`
"""

from __future__ import annotations

import pytest
import torch

from mla.prepare.api import prepare_attention
from tests.mla.prepare_cases import Setup, Twins, cache_of, one_by_one, parts_of

pytestmark = [pytest.mark.hw, pytest.mark.xdist_group("kvcache-hw")]
SETUPS = [
    Setup(kind, record, draft, online, heads=64, padded=padded, arch=None, device="cuda")
    for kind, record, draft, online, padded in (
        ("csa", "fp8-index8", 3, True, 0), ("csa", "fp8", 0, True, 5), ("csa", "bf16", 1, True, 0),
        ("hca", "fp8", 3, True, 0), ("hca", "fp8", 0, False, 2), ("hca", "bf16", 1, True, 0),
    )
]  # fmt: skip


@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: f"{s.kind}-{s.record}-{s.online}")
def test_steps_leave_the_same_bytes(setup):
    twins = Twins(setup)
    twins.step(a=126, b=5)
    for _ in range(5):
        twins.step(a=1 + setup.draft, b=1)
        if setup.draft:
            twins.back("a", setup.draft)
    twins.step(b=2, a=1, c=1)
    twins.step(hint=False, b=1, a=1, c=130)


@pytest.mark.parametrize("setup", SETUPS[::3], ids=lambda s: s.kind)
def test_is_captured_in_a_graph(setup):
    """Replays have other numbers than the capture."""
    caches = [cache_of(setup) for _ in range(2)]
    both = []
    for cache in caches:
        with cache.step({cache.admit("one", [5] * 4).request: [5] * 4}) as step:
            both.append(parts_of(setup, cache, step.tensors("cuda"), 1))
    mine, theirs = both
    prepare_attention(**mine, longest=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query = prepare_attention(**mine, longest=4)
    for parts in both:
        parts["entries"].values.mul_(0.5)
        parts["window"].kv.mul_(2.0)
        parts["queries"].q.copy_(parts["window"].kv[:, None].expand(-1, 3, -1))
    graph.replay()
    expected = one_by_one(theirs, 4, {})
    assert torch.equal(mine["queries"].q, theirs["queries"].q)
    for name, pool in caches[0].storage.pools.items():
        assert torch.equal(pool, caches[1].storage.pools[name])
    for one, other in zip(query or (), expected or (), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
