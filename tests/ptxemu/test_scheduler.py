"""The default schedule: warps that waited together stay in step, as on hardware."""

from __future__ import annotations

import numpy as np

from tests.ptxemu.kernels import DYNAMIC, kernel, launch

# Every round reuses the buffer after one barrier only: round k + 1's store races with round k's
# load, which other schedules may show. CUTLASS's mla_decode_fp16.py does this.
EXCHANGE = """
    mov.u32 %r0, %tid.x;
    ld.param.u64 %rd0, [d];
    mad.wide.u32 %rd1, %r0, 4, %rd0;
    mov.u32 %r1, dynamic;
    mad.lo.u32 %r2, %r0, 4, %r1;
    xor.b32 %r3, %r0, 64;
    mad.lo.u32 %r3, %r3, 4, %r1;
    mov.u32 %r4, 0;
    mov.u32 %r5, 0;
ROUND:
    mad.lo.u32 %r6, %r5, 1000, %r0;
    st.shared.b32 [%r2], %r6;
    bar.sync 2, 128;
    ld.shared.b32 %r7, [%r3];
    add.u32 %r4, %r4, %r7;
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p0, %r5, 8;
    @%p0 bra ROUND;
    st.global.b32 [%rd1], %r4;
"""


def test_all_released_warps_run_before_one_runs_ahead() -> None:
    out = np.zeros(128, np.uint32)
    launch(kernel(EXCHANGE, ".param .u64 d", DYNAMIC), out, block=(128,), smem_bytes=512)
    np.testing.assert_array_equal(out, 8 * (np.arange(128) ^ 64) + 1000 * sum(range(8)))
