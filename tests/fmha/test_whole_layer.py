"""Attention of 2048 and 4096 tokens in the emulator, under the checker: a layer (make sweep).

Its time is part of the test, so that the emulator stays fast enough for model sizes.
"""

from __future__ import annotations

import time

import pytest

from kernelkit.plan import hw
from lab.problems import attention as cases
from ptxemu import Options

CASES = {  # with the CPU seconds of this process, including the kernel's compilation
    "a causal head of 4096 tokens": (
        cases.Case(4096, 4096, causal=True, dims=(128, 128)), 90.0,
    ),
    "gpt-oss, 2048 tokens in all heads of a layer": (
        cases.Case(2048, 2048, (64, 8), causal=True, window=(127, None), sinks=True), 90.0,
    ),
}  # fmt: skip


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("name", CASES)
def test_a_layer(name, at_once):
    """The emulated GPU has as many SMs as a B200."""
    case, most = CASES[name]
    at_once(hw.SMS)
    begin = time.process_time()
    results = cases.run(case, Options(check=True, limit=None))
    seconds = time.process_time() - begin
    print(f"{case}: {seconds:.1f} s")
    for report in cases.judge(case, results):
        assert report.ok, report
    assert seconds <= most
