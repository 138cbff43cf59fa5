"""A decode and an append, recorded once for all tests: they are small and bind quickly."""

from __future__ import annotations

import pytest
import torch

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, tools_found
from gqa_lowlatency import decode
from kernelkit.call.launch import emulation
from ptxemu.options import Options
from ptxemu.record.recording import Recording


@pytest.fixture(scope="session")
def decoded() -> Recording:
    """A decode for Hopper: cp.async, mma.sync, clusters, st.async."""
    if not tools_found():
        pytest.skip(HOW_TO_GET_TOOLS)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(1, rows, heads, 128, generator=generator).bfloat16()
        for rows, heads in ((1, 16), (512, 2), (512, 2))
    )
    with emulation(Options(record=True, limit=None)) as run:
        decode(q, k, v, backend="emulate", arch="sm_90a")
    (report,) = run.reports
    return report.launches[0].recording
