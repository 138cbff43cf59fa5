"""An attention of 4096 tokens in the emulator, under the checker: not a tile, a layer (make sweep).

Its time is part of the test, so that the emulator stays quick enough for sizes of models.
"""

from __future__ import annotations

import time

import pytest

from ptxemu import Options
from workbench.problems import attention as cases

TOKENS = 4096
CPU_SECONDS = 90.0  # of this process, the kernel's compilation among them


@pytest.mark.usefixtures("poisoned_outputs")
def test_a_causal_head_of_4096_tokens():
    case = cases.Case(TOKENS, TOKENS, causal=True, dims=(128, 128))
    begin = time.process_time()
    results = cases.run(case, Options(check=True, limit=None))
    seconds = time.process_time() - begin
    print(f"{case}: {seconds:.1f} s")
    for report in cases.judge(case, results):
        assert report.ok, report
    assert seconds <= CPU_SECONDS
