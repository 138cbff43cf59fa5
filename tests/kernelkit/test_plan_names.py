"""Reports of emulated launches name warps and barriers as the kernel's plan does."""

from __future__ import annotations

import pytest
import torch

from fmha.config import AttentionConfig
from gqa_lowlatency.config import DecodeConfig
from kernelkit.call.launch import emulation
from kernelkit.compile import plan_names
from kernelkit.compile.keys import KernelKey
from moe.config import GroupedConfig
from tests.kernelkit.scale_kernel import scale

KEYS = (
    KernelKey("fmha.sm100.kernel", AttentionConfig(), "sm_100a"),
    KernelKey("fmha.sm100.kernel", AttentionConfig(schedule="pingpong"), "sm_100a"),
    KernelKey("gqa_lowlatency.sm100.kernel", DecodeConfig(), "sm_100a"),
    KernelKey("moe.sm100.kernel", GroupedConfig(), "sm_100a"),
    KernelKey("moe.sm100.kernel", GroupedConfig(tile_rows=256), "sm_100a"),
)


@pytest.mark.parametrize("key", KEYS, ids=KernelKey.title)
def test_a_kernel_with_edges_names_its_barriers_and_warps(key):
    naming = plan_names.naming(key)
    names = naming["names"]
    assert len(names) == len(set(names.values())) > 4
    assert [*names] == [*range(min(names), min(names) + 8 * len(names), 8)]
    assert [*naming["roles"]] == [*range(len(naming["roles"]))]


def test_a_kernel_without_a_plan_has_no_names():
    for key in (None, KernelKey("outer.<locals>.describe", "scale", "sm_100a")):
        assert not plan_names.naming(key)["names"]
        assert not plan_names.naming(key)["roles"]


def test_a_launch_takes_the_names_and_makes_no_plan(monkeypatch):
    made = []
    monkeypatch.setattr(plan_names, "plan_of", lambda key: made.append(key))
    with emulation() as run:
        scale(torch.ones(2, 4), 3.0)
    (launch,) = run.reports[0].launches
    assert not made
    assert not launch.options.names
    assert len(made) == 1
