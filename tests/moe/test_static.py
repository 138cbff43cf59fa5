"""What ptxas made of the grouped GEMM: no config spills, and its registers fit an SM."""

from __future__ import annotations

import itertools

import pytest

from kernelkit import hw
from moe.config import GRANULARITIES, GroupedConfig
from moe.formats import FORMATS
from moe.sm100.compile import compile_grouped
from moe.sm100.plan import ROLES
from tests.house.source import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "scripts")
    from _sass import HOW_TO_GET_TOOLS, resources, tools_found

pytestmark = pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS)

QUICK = (
    GroupedConfig(limit=True, amax=True, out="nvfp4", granularity=8),
    GroupedConfig(granularity=64, out="fp32"),
)
OUTPUTS = ("bf16", "nvfp4", "mxfp8")
GRID = [
    GroupedConfig(fmt, granularity=granularity, limit=granularity > 0, out=out, amax=True)
    for fmt, granularity, out in itertools.product(FORMATS, (0, *GRANULARITIES), OUTPUTS)
]


LONGER = [pytest.param(config, marks=pytest.mark.matrix) for config in GRID]


@pytest.mark.parametrize("config", [*QUICK, *LONGER], ids=str)
def test_no_config_spills(config, tmp_path):
    """The stack is where registers spill to; the role with most of them sets those of all warps."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compile_grouped(config).artifacts.CUBIN)
    (usage,) = resources(cubin)
    assert usage.stack == 0
    assert usage.registers * ROLES.threads <= hw.REGISTERS_PER_SM
