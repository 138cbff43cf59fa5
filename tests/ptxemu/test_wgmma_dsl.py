"""A GEMM of the CuTe DSL for sm_90a (`hopper_gemm.py`) from end to end: types and major modes of
the DSL's helpers, under every schedule and the checker, and without each of its waits.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import pytest
import torch

import ptxemu
from lab.silicon.conformance.ptx_program import POLICIES
from ptxemu.report import LaunchReport
from tests.ptxemu import hopper_gemm
from tests.ptxemu.hopper_gemm import HopperGemm

M, N, STAGES = 128, 96, 3
STEPS = 5  # along K, more than there are stages
DTYPES = {
    cutlass.Float16: torch.float16,
    cutlass.BFloat16: torch.bfloat16,
    cutlass.Float8E4M3FN: torch.float8_e4m3fn,
    cutlass.Float8E5M2: torch.float8_e5m2,
}
# type of A and B, and whether each is major in M or N
KERNELS = [
    (cutlass.Float16, cutlass.Float16, False, False),
    (cutlass.Float16, cutlass.Float16, True, True),
    (cutlass.BFloat16, cutlass.BFloat16, False, True),
    (cutlass.BFloat16, cutlass.BFloat16, True, False),
    (cutlass.Float8E4M3FN, cutlass.Float8E5M2, False, False),
]
# statement -> what a kernel without it is reported to lack
WAITS = {
    "ring.consumer_wait(read)": "mbarrier.try_wait",
    "warpgroup.fence()": "wgmma.fence",
    "warpgroup.wait_group(0)": "wgmma.wait_group",
    "warpgroup.wait_group(1)": "wgmma.wait_group",
}


def operand(rows: int, k: int, dtype: torch.dtype, *, mn_major: bool) -> torch.Tensor:
    """Small integers with exact sums."""
    values = torch.randint(-3, 4, (k, rows) if mn_major else (rows, k)).to(dtype)
    return values.T if mn_major else values


def launch(
    gemm: HopperGemm,
    types: tuple[type, type],
    majors: tuple[bool, bool] = (False, False),
    policies: tuple[str, ...] = ("round-robin",),
) -> list[LaunchReport]:
    """Launch once per schedule; every launch has to give the product."""
    torch.manual_seed(0)
    k = STEPS * 8 * hopper_gemm.STAGE_BYTES // types[0].width
    a, b = (
        operand(rows, k, DTYPES[type_], mn_major=mn)
        for rows, type_, mn in zip((M, N), types, majors, strict=True)
    )
    c = torch.empty(M, N)
    bits = [x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in (a, b)]
    compiled, views = hopper_gemm.compiled(gemm, [*bits, c], types)
    reports = []
    for policy in policies:
        c.fill_(torch.nan)
        options = ptxemu.Options(policy=policy, check=True)
        reports += ptxemu.run(compiled, *views, options=options).launches
        assert torch.equal(c, a.float() @ b.float().T) or reports[-1].findings
    return reports


@pytest.mark.parametrize(("a_type", "b_type", "a_mn", "b_mn"), KERNELS)
def test_products(a_type: type, b_type: type, a_mn: bool, b_mn: bool) -> None:
    gemm = HopperGemm((64, N), STAGES)
    for report in launch(gemm, (a_type, b_type), (a_mn, b_mn), POLICIES):
        assert not report.findings
        opcodes = report.by_warp[0]
        assert any(opcode.startswith("wgmma.mma_async") for opcode in opcodes)


@pytest.mark.parametrize("statement", WAITS)
def test_without_a_wait(statement: str, changed: Callable[..., None]) -> None:
    changed(hopper_gemm, [hopper_gemm], "HopperGemm", (statement, "pass"))
    types = (cutlass.Float16, cutlass.Float16)
    found = launch(hopper_gemm.HopperGemm((64, N), STAGES), types)[0].findings
    assert any(WAITS[statement] in finding.missing for finding in found), found
