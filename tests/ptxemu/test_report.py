"""What a launch reports: counts, bytes, timeline, progress; and that looking changes nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ptxemu
from ptxemu.machine import machine
from tests.ptxemu.kernels import kernel, launch

# y[i] = 2 x[i] by each of two warps per CTA, with a barrier between load and store.
DOUBLE = kernel(
    """ld.param.u64 %rd0, [x];
    ld.param.u64 %rd1, [y];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
    mad.lo.u32 %r2, %r1, 64, %r0;
    mul.wide.u32 %rd2, %r2, 4;
    add.u64 %rd3, %rd0, %rd2;
    add.u64 %rd4, %rd1, %rd2;
    ld.global.f32 %f0, [%rd3];
    add.f32 %f1, %f0, %f0;
    bar.sync 0;
    st.global.f32 [%rd4], %f1;""",
    ".param .u64 x, .param .u64 y",
)
CTAS = 3


def doubled(**options: object) -> tuple[ptxemu.LaunchReport, np.ndarray, np.ndarray]:
    x, y = np.arange(64 * CTAS, dtype=np.float32), np.full(64 * CTAS, np.nan, np.float32)
    return launch(DOUBLE, x, y, grid=(CTAS,), block=(64,), **options), x, y


def test_counts_are_per_warp_and_opcode():
    report, x, y = doubled()
    assert np.array_equal(y, 2 * x)
    assert set(report.by_warp) == {0, 1}
    for counter in report.by_warp.values():
        assert counter["ld.param.u64"] == 2 * CTAS
        assert counter["bar.sync"] == CTAS
        assert sum(counter.values()) == 13 * CTAS
    assert report.warp_instructions == 2 * 13 * CTAS
    assert report.grid == (CTAS, 1, 1)


def test_bytes_are_per_path():
    report, x, _ = doubled()
    assert report.bytes["ld.global"] == report.bytes["st.global"] == x.nbytes


def test_a_trace_is_asked_for_and_changes_no_bits(tmp_path):
    plain, _, expected = doubled()
    traced, _, y = doubled(trace=True)
    assert plain.trace is None
    assert np.array_equal(y, expected)
    assert traced.warp_instructions == plain.warp_instructions
    assert traced.trace.ctas() == list(range(CTAS))
    assert traced.trace.agents(0) == ["warp 0", "warp 1"]
    busy = sum(s.end - s.start for s in traced.trace.spans if s.category == "compute")
    assert busy == traced.warp_instructions  # one nominal cycle each
    path = tmp_path / "trace.json"
    traced.trace.to_perfetto(path)
    assert json.loads(path.read_text())["traceEvents"]


@pytest.mark.parametrize("policy", ["round-robin", "random", "adversarial"])
def test_every_policy_runs_every_instruction_once(policy):
    assert doubled(policy=policy)[0].warp_instructions == 2 * 13 * CTAS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "lifo"}, "policy='lifo'; must be one of round-robin"),
        ({"resident": 0}, "resident=0; must be >= 1"),
        ({"limit": 0}, "limit=0; must be > 0"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        ptxemu.Options(**options)


def test_blas_threads_are_restored():
    control = machine._thread_control()
    if control is None:
        pytest.skip("numpy was built with another BLAS than OpenBLAS")
    set_threads, get_threads = control
    before = get_threads()
    set_threads(2)
    try:
        with machine.one_thread():
            assert get_threads() == 1
        assert get_threads() == 2
    finally:
        set_threads(before)
