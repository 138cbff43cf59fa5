"""What ptxas made of a kernel: registers and stack of its cubin, read by the CUDA binary tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernelkit import hw
from workbench.sass.listing import HOW_TO_GET_TOOLS, resources, tools_found

needs_tools = pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS)
REGISTERS_UNIT = 256  # in which a warp gets them


def check_resources(compiled: Any, threads: int, ctas: int, folder: Path) -> None:
    """Nothing spills, and so many CTAs find their registers on an SM."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.cubin)
    (usage,) = resources(cubin)
    assert usage.stack == 0
    per_warp = -(-usage.registers * hw.WARP_THREADS // REGISTERS_UNIT) * REGISTERS_UNIT
    assert ctas * (threads // hw.WARP_THREADS) * per_warp <= hw.REGISTERS_PER_SM
