"""The limits of the checks are those of the machine. A config inside a limit runs; one outside,
with the check disabled, is refused by ptxemu or the DSL.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

import gqa_lowlatency.launch
from gqa_lowlatency import DecodeConfig, decode
from gqa_lowlatency.launch import check_config
from lab.problems.decode import Case
from ptxemu.errors import HardwareRefusal
from tests.gqa_lowlatency import cases
from tests.gqa_lowlatency.test_kernel import each_arch

HOPPER = "sm_90a"
# 64 columns of O for each of 16 CTAs: mailboxes grow as the number of owners falls.
WIDE = Case((40,), (64, 1), head_dim=64, cluster=16, tuning=(("owners", 4),))


@pytest.fixture
def forced(monkeypatch):
    """Disable the check of configs."""
    monkeypatch.setattr(gqa_lowlatency.launch, "check_config", lambda config, arch: None)


def attend(case: Case, arch: str) -> None:
    """Run a case; its result has to be right."""
    cases.check(case, arch, cases.FRIENDLY)


def test_shared_memory_just_inside():
    attend(WIDE, HOPPER)


def test_shared_memory_just_outside(forced):
    config = DecodeConfig(64, group=64, cluster=16, owners=2, lens=True)
    with pytest.raises(ValueError, match="limit 232448"):
        check_config(config, HOPPER)
    with pytest.raises(HardwareRefusal, match="may have 232448"):
        attend(replace(WIDE, tuning=(("owners", 2),)), HOPPER)


@each_arch
def test_clusters_of_more_than_16(arch, forced, monkeypatch):
    monkeypatch.setattr("gqa_lowlatency.config.CLUSTERS", (1, 2, 4, 8, 16, 32))
    with pytest.raises((HardwareRefusal, ValueError), match="cluster"):
        attend(Case((40,), (8, 1), head_dim=64, cluster=32), arch)


@each_arch
def test_the_smallest_pages(arch):
    """A page of one row is one line."""
    for size in (1, 2, 4, 8):
        attend(Case((37, 0, 20), (4, 2), head_dim=64, keys=size), arch)


PAGES = [*product((HOPPER, "sm_100a", "sm_89"), (256, 528, 48, 17))]


@pytest.mark.parametrize(("arch", "size"), PAGES)
@pytest.mark.parametrize(
    "case",
    [
        Case((700, 0, 37, 529), (4, 2), head_dim=64),
        Case((1100, 5, 260), (8, 2), 2, window=300, sink_tokens=20, cluster=1),
        Case((600, 40), (8, 1), kv_dtype="e4m3", firsts=(270, 3), cluster=1),
    ],
    ids=["lengths", "a window", "first keys"],
)
def test_pages_of_any_number_of_rows(arch, size, case):
    """Pages of hybrid models are included, such as 528 = 33 x 16; pages that no token sees are
    absent."""
    attend(replace(case, keys=size), arch)


@pytest.mark.parametrize("arch", [HOPPER, "sm_100a", "sm_89"])
def test_pages_may_lie_apart(arch):
    """K and V alternate page by page, so no other shape of the same memory is equivalent."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn((5, 2, 528, 1, 64), generator=generator).half()
    q = torch.randn((2, 1, 2, 64), generator=generator).half()
    table = torch.tensor([[3, 0], [4, 1]], dtype=torch.int32)
    lengths = torch.tensor([1000, 529], dtype=torch.int32)
    paged = decode(q, pool[:, 0], pool[:, 1], kv_lens=lengths, page_table=table, arch=arch)
    k, v = (pool[:, side][table.long()].flatten(1, 2) for side in (0, 1))
    assert torch.equal(paged, decode(q, k, v, kv_lens=lengths, arch=arch))


@each_arch
def test_more_query_rows_than_a_cta_holds(arch):
    """All heads on one KV head, 8 tokens: 256 rows, which several CTAs share."""
    attend(Case((130, 9), (32, 1), 8, head_dim=128), arch)


@each_arch
def test_a_launch_serves_any_length_up_to_the_capacity(arch):
    """max_kv_len determines the cluster; tiles are distributed by the lengths that the device
    reads."""
    case = Case((700, 1, 130), (4, 2), head_dim=64)
    for bound in (700, 737):
        results = cases.run(case, arch, max_kv_len=bound)
        cases.expect(cases.judge(case, arch, results))


@each_arch
def test_strides_beyond_two_gigabytes(arch):
    """A view of few keys, far apart, needs 64-bit addresses."""
    far = 3 << 29  # elements of 2 bytes
    generator = torch.Generator().manual_seed(0)
    q = torch.randn((2, 1, 2, 64), generator=generator).half()
    storage = torch.empty(far + 40 * 64, dtype=torch.float16)  # untouched pages cost nothing
    cache = storage.as_strided((2, 40, 1, 64), (far, 64, 64, 1))
    cache.copy_(torch.randn((2, 40, 1, 64), generator=generator))
    near = cache.contiguous()
    assert torch.equal(decode(q, cache, cache, arch=arch), decode(q, near, near, arch=arch))
